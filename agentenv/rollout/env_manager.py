"""One environment slot: plays one episode after another, each from reset to its end.

Invariants:

* An episode ends as a trajectory, as :class:`EpisodeFailedError`, or by cancellation; nothing else comes out.
* Each stage has an absolute deadline: that of the stage or of the episode, whichever is nearer.
* After a failure the environment is not used again: the slot gets a new one. A failed reset is tried again in one.
* Reaching the turn or token limit is a truncation, which is a sample; a failure never is.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentenv.conversation import Conversation, end_of_turn_ids
from agentenv.errors import AgentEnvError, EnvError, EpisodeTimeoutError, UsageError
from agentenv.inference.protocol import GenerationRequest, SamplingParams
from agentenv.rollout.failures import EpisodeFailedError, FailurePolicy
from agentenv.rollout.group import EpisodeTicket
from agentenv.rollout.slot_context import SlotContext
from agentenv.rollout.workers import EnvFn, EnvWorker, make_worker, worker_kind
from agentenv.rollout.workers.env_payload import EnvPayload
from agentenv.rollout.workers.wire import json_able
from agentenv.trace import slot_track
from agentenv.trajectory import Trajectory

logger = logging.getLogger(__name__)

_DEFAULT_MAX_TURNS = 50
_PROCESS_PATIENCE_S = 1.0


@dataclass
class _Episode:
    """State of the episode being played."""

    ticket: EpisodeTicket
    sampling_seed: int
    deadline: float
    conversation: Conversation
    time: Callable[[], float]
    """Of its loop, also where the loop has gone and the episode is thrown away."""
    stage: str = "reset"
    stage_began: float = 0.0
    is_in_stage: bool = False
    turns: int = 0
    rewards: list[float] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"reset": 0.0, "generate": 0.0, "step": 0.0})

    @property
    def request_id(self) -> str:
        return f"{self.ticket.episode_id}/{self.turns}"


class EnvManager:
    """One slot.

    Args:
        name: of the slot, for logs.
        env_fn: makes an environment; called in the slot's worker when first needed and after each failure. Packed by
            another process it needs ``config.worker`` to say where.
        context: the run that it belongs to.
    """

    def __init__(self, name: str, env_fn: EnvFn | EnvPayload, context: SlotContext) -> None:
        self.name = name
        self._env_fn = env_fn
        self._proxy, self._tokenizer, self._config = context.proxy, context.tokenizer, context.config
        self._sampling = context.turn_sampling
        self._stop_ids = tuple(
            dict.fromkeys((*self._sampling.stop_token_ids, *end_of_turn_ids(self._tokenizer)))
        )
        self._turn_sampling = self._sampling_with(self._sampling.max_tokens)
        self._policy = context.policy or FailurePolicy(self._config)
        self._barrier = context.barrier
        self._trace, self._track = self._proxy.trace, slot_track(name)
        self._kind = worker_kind(env_fn, self._config.worker)
        self.workers_made = 0
        """Workers of the slot so far, the present one included; all but the first replaced one that failed."""
        self._worker = self._new_worker()
        self._left: list[EnvWorker] = []
        self._episode: _Episode | None = None

    @property
    def action_tokens(self) -> int:
        """Tokens that the policy sampled in the present or last episode, those of an aborted turn included."""
        if self._episode is None:
            return 0
        conversation = self._episode.conversation
        return sum(sum(part.action_mask) for part in [*conversation.earlier_segments, conversation.segment])

    async def run_episode(self, ticket: EpisodeTicket, sampling_seed: int) -> Trajectory:
        """Play one episode.

        Args:
            ticket: which one; its id is unique among those running, its ``task_seed`` is for ``env.reset``.
            sampling_seed: of the policy's random numbers in this episode.

        Raises:
            EpisodeFailedError: no sample; the slot is usable again.
            UsageError: the environment cannot be made: bad input by the user.
            asyncio.CancelledError: as cancelled; the slot is usable again after :meth:`settle`.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        conversation = Conversation(
            self._tokenizer, stop_token_ids=self._stop_ids, history=self._config.history
        )
        deadline = started + self._config.episode_timeout_s
        episode = self._episode = _Episode(ticket, sampling_seed, deadline, conversation, loop.time)
        if self._barrier is not None:
            self._barrier.join()
        try:
            if self._barrier is not None:
                # Those that start with this one must have joined before it arrives anywhere.
                await asyncio.sleep(0)
            await self._reset(episode)
            terminated, truncated, end_reason = await self._play(episode)
        except UsageError:
            self._rebuild()
            raise
        except AgentEnvError as error:
            if self._policy.replaces_environment(episode.stage):
                self._rebuild()
            raise EpisodeFailedError(episode.stage, error) from error
        finally:
            if episode.is_in_stage:
                self._end_stage(episode)
            if self._barrier is not None:
                self._barrier.leave()
            await self._proxy.release(ticket.episode_id)
        segment = conversation.segment
        info = episode.info
        info["timing_s"] = {stage: round(seconds, 6) for stage, seconds in episode.seconds.items()}
        info["rewards"] = episode.rewards
        # Reserved: it marks what must not be trained on.
        info.pop("failure", None)
        return Trajectory(
            prompt_ids=segment.prompt_ids,
            completion_ids=segment.completion_ids,
            rollout_logprobs=segment.rollout_logprobs,
            action_mask=segment.action_mask,
            policy_versions=segment.policy_versions,
            reward=math.fsum(episode.rewards),
            terminated=terminated,
            truncated=truncated,
            end_reason=end_reason,
            episode_id=ticket.episode_id,
            task_id=str(info.get("task_id", ticket.task_seed)),
            group_id=ticket.group_id,
            seed=ticket.task_seed,
            start_version=ticket.start_version,
            turns=episode.turns,
            duration_s=loop.time() - started,
            messages=conversation.messages,
            info=info,
            earlier_segments=conversation.earlier_segments,
        )

    async def abort_turn(self) -> bool:
        """Have the turn that is being sampled return its partial tokens; its episode then fails.

        Returns:
            whether a turn was being sampled.
        """
        if self._episode is None or self._episode.stage != "generate":
            return False
        await self._proxy.abort(self._episode.request_id)
        return True

    async def settle(self) -> None:
        """After a cancelled episode: wait until its environment call is over, or give the environment up.

        A thread must be waited for, up to the call's deadline; a process or another node that does not answer soon is
        replaced, which is cheaper.
        """
        try:
            if self._kind in ("process", "ray"):
                async with asyncio.timeout(_PROCESS_PATIENCE_S):
                    await self._worker.settle()
            else:
                await self._worker.settle()
        except TimeoutError:
            self._rebuild()
        except EpisodeTimeoutError as error:
            logger.warning("%s: %s, after its episode was cancelled", self.name, error)
            self._rebuild()

    def end(self) -> None:
        """Have the environment closed as soon as its worker is free; does not wait."""
        self._worker.end()

    async def join(self, deadline: float) -> list[str]:
        """Wait until the slot's workers have ended; returns the names of those that have not by the deadline."""
        workers = [*self._left, self._worker]
        joined = await asyncio.gather(*(worker.join(deadline) for worker in workers))
        return [worker.name for worker, ended in zip(workers, joined, strict=True) if not ended]

    async def _reset(self, episode: _Episode) -> None:
        """Reset, again after a pause where it fails, and begin the conversation."""
        loop = asyncio.get_running_loop()
        began = self._begin_stage(episode, "reset")
        attempt = 0
        while True:
            try:
                observation, info = await self._worker.reset(
                    episode.ticket.task_seed,
                    min(loop.time() + self._config.reset_timeout_s, episode.deadline),
                )
                break
            except AgentEnvError as error:
                pause_s = self._policy.reset_pause_s(attempt, error)
                if pause_s is None or loop.time() + pause_s >= episode.deadline:
                    raise
                logger.info(
                    "%s: reset of task seed %d failed: %s", self.name, episode.ticket.task_seed, error
                )
                self._rebuild()
                await asyncio.sleep(pause_s)
                attempt += 1
        episode.seconds["reset"] = self._end_stage(episode) - began
        episode.info.update(json_able(info))
        system = self._config.system_prompt
        opening = [{"role": "system", "content": system}] if system else []
        episode.conversation.start([*opening, {"role": "user", "content": observation}])
        if episode.conversation.num_tokens >= self._config.max_tokens_per_episode:
            raise EnvError(
                f"the first prompt of task seed {episode.ticket.task_seed} has {episode.conversation.num_tokens} "
                f"tokens, max_tokens_per_episode is {self._config.max_tokens_per_episode}"
            )

    async def _play(self, episode: _Episode) -> tuple[bool, bool, str]:
        """Generate and step to the end; returns terminated, truncated and the end's reason."""
        config, conversation, time = self._config, episode.conversation, asyncio.get_running_loop().time
        max_turns = config.max_turns or self._worker.max_turns or _DEFAULT_MAX_TURNS
        while True:
            action = await self._generate(episode)
            episode.turns += 1
            before = time()
            await self._arrive(episode)
            began = self._begin_stage(episode, "step")
            observation, reward, terminated, truncated, info = await self._worker.step(
                action, min(began + config.step_timeout_s, episode.deadline)
            )
            episode.seconds["step"] += self._end_stage(episode) - before
            await self._arrive(episode)
            episode.rewards.append(reward)
            if info:
                episode.info.update(json_able(info))
            if terminated:
                return True, truncated, "terminated"
            if truncated:
                return False, True, "truncated"
            if episode.turns >= max_turns:
                return False, True, "max_turns"
            room = config.max_tokens_per_episode - conversation.num_tokens
            if conversation.delta_length(observation) >= room:
                return False, True, "max_tokens"
            conversation.add_observation(observation)
            if conversation.num_tokens >= config.max_tokens_per_episode:
                # A fork encodes the episode's text anew, which may take more tokens than were sampled.
                return False, True, "max_tokens"
            if time() >= episode.deadline:
                raise self._ran_out(episode)

    async def _generate(self, episode: _Episode) -> str:
        """One turn of the policy; returns its text."""
        began = self._begin_stage(episode, "generate")
        conversation = episode.conversation
        room = self._config.max_tokens_per_episode - conversation.num_tokens
        sampling = (
            self._turn_sampling if room >= self._turn_sampling.max_tokens else self._sampling_with(room)
        )
        generation = await self._proxy.generate(
            GenerationRequest(
                request_id=episode.request_id,
                prompt_ids=conversation.live_prompt_ids,
                sampling=sampling,
                episode_id=episode.ticket.episode_id,
                affinity="" if self._config.prompt_replication else episode.ticket.group_id,
                deadline=min(began + self._config.generate_timeout_s, episode.deadline),
                seed=_mix(episode.sampling_seed, episode.turns),
            )
        )
        action = conversation.add_action(
            generation.token_ids, generation.logprobs, generation.policy_versions
        )
        episode.seconds["generate"] += self._end_stage(episode, tokens=len(generation.token_ids)) - began
        if generation.finish_reason == "abort":
            raise EnvError(
                f"turn {episode.turns} of episode {episode.ticket.episode_id!r} was aborted from outside"
            )
        return action

    async def _arrive(self, episode: _Episode) -> None:
        if self._barrier is None:
            return
        time = asyncio.get_running_loop().time
        before = time()
        try:
            async with asyncio.timeout_at(episode.deadline):
                await self._barrier.arrive()
        except TimeoutError as error:
            raise self._ran_out(episode) from error
        finally:
            self._trace.span(self._track, "barrier", before, time())

    def _begin_stage(self, episode: _Episode, stage: str) -> float:
        """The episode is in this stage from now on; returns the time."""
        episode.stage, episode.is_in_stage = stage, True
        episode.stage_began = now = episode.time()
        return now

    def _end_stage(self, episode: _Episode, **arguments: int) -> float:
        """The stage is over, however it ended; returns the time."""
        now = episode.time()
        episode.is_in_stage = False
        self._trace.span(self._track, episode.stage, episode.stage_began, now, **arguments)
        return now

    def _ran_out(self, episode: _Episode) -> EpisodeTimeoutError:
        return EpisodeTimeoutError(
            "episode", f"episode {episode.ticket.episode_id!r} ran past {self._config.episode_timeout_s} s"
        )

    def _sampling_with(self, max_tokens: int) -> SamplingParams:
        sampling = self._sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=max_tokens,
            stop_token_ids=self._stop_ids,
        )

    def _new_worker(self) -> EnvWorker:
        self.workers_made += 1
        name = f"agentenv-{self.name}-{self.workers_made}"
        placement = self._config.placement() if self._kind == "ray" else None
        return make_worker(self._kind, self._env_fn, name, placement)

    def _rebuild(self) -> None:
        self._worker.end()
        self._left = [worker for worker in self._left if worker.is_running]
        if self._worker.is_running:
            self._left.append(self._worker)
        self._worker = self._new_worker()


def _mix(seed: int, turn: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
