"""Agent programs in the place of environments: each episode is a program with a loop of its own.

    runner = AgentRunner(play)
    controller = AsyncController(runner, LLMProxy([engine]), tokenizer, config)
    SAOTrainer(model, sao_config, controller, tokenizer).train()

Per episode a slot opens an episode of the endpoint, calls ``play`` in a thread with the endpoint's address and a key,
and makes the trajectory from what was asked and answered, with the reward that ``play`` returns.

Invariants:

* The server runs in the event loop of the engines, from the first episode to the end of the last slot.
* An episode in which the policy was never asked, whose ``play`` raised, or whose turn failed is no sample.
* When an episode is cancelled its key is worth nothing at once, and ``play`` is told (:attr:`AgentCall.cancelled`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from agentenv.agents.endpoint import AgentEndpoint, EpisodeSettings, OpenEpisode
from agentenv.agents.episode_record import Outcome
from agentenv.agents.program import AgentCall, AgentOutcome, PlayFn
from agentenv.conversation import Tokenizer
from agentenv.errors import AgentEnvError, EnvError, EpisodeTimeoutError, MissingExtraError, UsageError
from agentenv.inference.proxy import LLMProxy
from agentenv.listening import listen
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.failures import EpisodeFailedError
from agentenv.rollout.group import EpisodeTicket
from agentenv.rollout.slot_context import SlotContext
from agentenv.rollout.workers.call_thread import CallThread
from agentenv.rollout.workers.wire import json_able
from agentenv.trace import slot_track
from agentenv.trajectory import Trajectory

if TYPE_CHECKING:
    from agentenv.agents.server import AgentServer

__all__ = ["AgentRunner"]

logger = logging.getLogger(__name__)

_DEFAULT_MAX_TURNS = 50


class AgentRunner:
    """Makes slots that play agent programs; see the module docstring. Stands in for ``env_fn``.

    Args:
        play: runs one episode. Of the rollout's settings ``episode_timeout_s`` is its deadline, and
            ``step_timeout_s`` what it may take after that, to grade; ``reset_timeout_s`` is added to both.
        host: address to listen on. The default is reachable from this machine only.
        port: 0 is any free one.
        model: name that the endpoint lists.
        address: HOST:PORT under which programs reach the endpoint; None: host and port.
        close: called when the last slot has ended.

    Raises:
        MissingExtraError: the extra ``service`` is not installed.
    """

    def __init__(
        self,
        play: PlayFn,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model: str = "policy",
        address: str | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        try:
            from agentenv.agents import server
        except ImportError as error:
            raise MissingExtraError(str(error.name), "service") from error
        self._server_class = server.AgentServer
        self.play = play
        self._host, self._port, self._model, self._address = host, port, model, address
        self._close = close
        self._slots: set[AgentSlot] = set()
        self._lock = threading.Lock()
        self._starting: asyncio.Task[tuple[AgentEndpoint, AgentServer]] | None = None

    @staticmethod
    def check(config: RolloutConfig) -> None:
        """Whether agent programs can be played under these settings.

        Raises:
            UsageError: they need to see turns begin and end, or set what a program brings itself.
        """
        if config.mode == "batch" or config.deterministic:
            what = "mode is 'batch'" if config.mode == "batch" else "deterministic is true"
            raise UsageError(
                f"RolloutConfig.{what}: an agent program's turns come when it likes; must be another"
            )
        if config.worker == "ray":
            raise UsageError(
                "RolloutConfig.worker is 'ray': agent programs run beside the rollout, or in sandboxes, which may be "
                "elsewhere; must be another"
            )
        if config.system_prompt is not None:
            raise UsageError(
                "RolloutConfig.system_prompt is set: an agent program brings its own; must be None"
            )

    def make_slot(self, name: str, context: SlotContext) -> AgentSlot:
        """A slot for one program at a time.

        Raises:
            UsageError: see :meth:`check`.
        """
        self.check(context.config)
        slot = AgentSlot(name, self, context)
        with self._lock:
            self._slots.add(slot)
        return slot

    async def reach(self, proxy: LLMProxy, tokenizer: Tokenizer) -> tuple[AgentEndpoint, str]:
        """The endpoint and its address; started by the first slot that asks.

        Raises:
            UsageError: the address can't be had.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(proxy, tokenizer))
        try:
            endpoint, server = await asyncio.shield(self._starting)
        except AgentEnvError:
            self._starting = None
            raise
        return endpoint, f"http://{self._address}" if self._address else server.url

    async def left(self, slot: AgentSlot) -> None:
        """A slot has ended; with the last one the server does."""
        with self._lock:
            if slot not in self._slots:
                return
            self._slots.discard(slot)
            if self._slots:
                return
        starting, self._starting = self._starting, None
        if starting is not None:
            _, server = await starting
            await server.stop()
        if self._close is not None:
            await asyncio.to_thread(self._close)

    async def _start(self, proxy: LLMProxy, tokenizer: Tokenizer) -> tuple[AgentEndpoint, AgentServer]:
        endpoint = AgentEndpoint(proxy, tokenizer, model=self._model)
        server = self._server_class(endpoint, listen(self._host, self._port))
        await server.start()
        return endpoint, server


class AgentSlot:
    """Plays one agent program after another; see :class:`~agentenv.rollout.slot.EpisodeSlot`."""

    def __init__(self, name: str, runner: AgentRunner, context: SlotContext) -> None:
        self.name = name
        self._runner = runner
        self._proxy, self._tokenizer, self._config = context.proxy, context.tokenizer, context.config
        self._sampling = context.turn_sampling
        self.workers_made = 0
        self._thread = self._new_thread()
        self._left: list[CallThread] = []
        self._endpoint: AgentEndpoint | None = None
        self._episode: OpenEpisode | None = None

    @property
    def action_tokens(self) -> int:
        """Tokens that the policy sampled in the present or last episode, those of an aborted turn included."""
        episode = self._episode
        return 0 if episode is None else episode.record.action_tokens + episode.aborted_tokens

    async def run_episode(self, ticket: EpisodeTicket, sampling_seed: int) -> Trajectory:
        """Play one program.

        Raises:
            EpisodeFailedError: no sample; the slot is usable again.
            UsageError: the program cannot be started, or the endpoint has no address: bad input by the user.
            asyncio.CancelledError: as cancelled; the slot is usable again after :meth:`settle`.
        """
        loop, config = asyncio.get_running_loop(), self._config
        started = loop.time()
        endpoint, url = await self._runner.reach(self._proxy, self._tokenizer)
        self._endpoint = endpoint
        allowed_s = config.reset_timeout_s + config.episode_timeout_s
        settings = EpisodeSettings(
            sampling=self._sampling,
            max_turns=config.max_turns or _DEFAULT_MAX_TURNS,
            max_context=config.max_tokens_per_episode,
            generate_timeout_s=config.generate_timeout_s,
            deadline=started + allowed_s,
            seed=sampling_seed,
            affinity="" if config.prompt_replication else ticket.group_id,
        )
        episode = self._episode = endpoint.open(settings, ticket.episode_id)
        episode.track = slot_track(self.name)
        began = loop.time()
        call = AgentCall(
            seed=ticket.task_seed,
            base_url=f"{url}/episodes/{ticket.episode_id}/v1",
            api_key=episode.api_key,
            model=endpoint.model,
            deadline=time.monotonic() + allowed_s,
            exhausted=lambda: episode.exhausted,
        )
        episode.on_failure = call.cancelled.set
        try:
            outcome = await self._play(call, episode, started + allowed_s + config.step_timeout_s)
        finally:
            call.cancelled.set()
            await endpoint.close(episode)
            self._proxy.trace.span(episode.track, "program", began, loop.time())
        truncated = outcome.truncated
        reason = "terminated" if not truncated else episode.exhausted or "truncated"
        info = json_able(outcome.info)
        info.pop("failure", None)  # reserved: it marks what must not be trained on
        trajectory = episode.record.trajectory(
            Outcome(outcome.reward, not truncated, truncated, reason, info),
            episode_id=ticket.episode_id,
            task_id=str(info.get("task_id", ticket.task_seed)),
            group_id=ticket.group_id,
            seed=ticket.task_seed,
            start_version=ticket.start_version,
            duration_s=loop.time() - started,
        )
        if trajectory is None:
            text = str(info.get("output", ""))[-500:]
            raise self._failed(EnvError(f"the agent program asked nothing of its endpoint: {text!r}"))
        return trajectory

    async def abort_turn(self) -> bool:
        """Have the turns that are being sampled return their partial tokens; their episode then fails."""
        if self._episode is None or self._endpoint is None or self._episode.is_closed:
            return False
        return await self._endpoint.abort_turns(self._episode)

    async def settle(self) -> None:
        """After a cancelled episode: wait until its program is over, or give its thread up."""
        try:
            await self._thread.settle()
        except EpisodeTimeoutError as error:
            logger.warning("%s: %s, after its episode was cancelled", self.name, error)
            self._rebuild()

    def end(self) -> None:
        """End the thread as soon as it is free; does not wait."""
        self._thread.end()

    async def join(self, deadline: float) -> list[str]:
        """Wait until the slot's threads have ended; returns the names of those that have not by the deadline."""
        threads = [*self._left, self._thread]
        joined = await asyncio.gather(*(thread.join(deadline) for thread in threads))
        await self._runner.left(self)
        return [thread.name for thread, ended in zip(threads, joined, strict=True) if not ended]

    async def _play(self, call: AgentCall, episode: OpenEpisode, deadline: float) -> AgentOutcome:
        try:
            outcome: Any = await self._thread.call(
                partial(self._runner.play, call), deadline, stage="episode", what="the agent program"
            )
        except UsageError:
            raise
        except AgentEnvError as error:
            if isinstance(error, EpisodeTimeoutError):
                self._rebuild()
            # What ended the turns explains more than what became of the program for want of them.
            raise self._failed(episode.failure or error) from error
        except Exception as error:
            wrapped = EnvError(f"playing an agent program raised {type(error).__name__}: {error}")
            wrapped.origin = type(error).__name__
            raise self._failed(episode.failure or wrapped) from error
        if episode.failure is not None:
            raise self._failed(episode.failure)
        if not isinstance(outcome, AgentOutcome) or not isinstance(outcome.info, dict):
            raise self._failed(
                EnvError(f"play returned a {type(outcome).__name__}, must be an AgentOutcome with a dict")
            )
        return outcome

    def _failed(self, error: AgentEnvError) -> EpisodeFailedError:
        return EpisodeFailedError("episode", error)

    def _new_thread(self) -> CallThread:
        self.workers_made += 1
        return CallThread(f"agentenv-{self.name}-{self.workers_made}")

    def _rebuild(self) -> None:
        self._thread.end()
        self._left = [thread for thread in self._left if thread.is_running]
        if self._thread.is_running:
            self._left.append(self._thread)
        self._thread = self._new_thread()
