"""One environment slot: plays one episode after another, each from reset to its end.

Invariants:

* An episode ends as a trajectory, as :class:`EpisodeFailedError`, or by cancellation; nothing else comes out.
* Each stage has an absolute deadline: that of the stage or of the episode, whichever is nearer.
* After a failure the environment is not used again: the slot gets a new one.
* Reaching the turn or token limit is a truncation, which is a sample; a failure never is.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from dataclasses import dataclass, field
from typing import Any

from agentenv.conversation import Conversation, Tokenizer, end_of_turn_ids
from agentenv.errors import AgentEnvError, EnvError, EpisodeTimeoutError, UsageError
from agentenv.inference.protocol import GenerationRequest, SamplingParams
from agentenv.inference.proxy import LLMProxy
from agentenv.rollout.config import RolloutConfig
from agentenv.rollout.failures import EpisodeFailedError
from agentenv.rollout.workers import EnvFn, EnvWorker, make_worker, worker_kind
from agentenv.trajectory import Trajectory

logger = logging.getLogger(__name__)

_DEFAULT_MAX_TURNS = 50


@dataclass
class _Episode:
    """State of the episode being played."""

    conversation: Conversation
    stage: str = "reset"
    turns: int = 0
    rewards: list[float] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"reset": 0.0, "generate": 0.0, "step": 0.0})

    @property
    def action_tokens(self) -> int:
        segments = [*self.conversation.earlier_segments, self.conversation.segment]
        return sum(sum(segment.action_mask) for segment in segments)


class EnvManager:
    """One slot.

    Args:
        name: of the slot, for logs.
        env_fn: makes an environment; called in the slot's worker when first needed and after each failure.
        proxy: where turns come from.
        tokenizer: with a chat template.
        config: limits and deadlines.
        sampling: of every turn; ``max_tokens`` is cut to what the episode has left. None: the config's.
    """

    def __init__(
        self,
        name: str,
        env_fn: EnvFn,
        proxy: LLMProxy,
        tokenizer: Tokenizer,
        config: RolloutConfig,
        *,
        sampling: SamplingParams | None = None,
    ) -> None:
        self.name = name
        self._env_fn = env_fn
        self._proxy = proxy
        self._tokenizer = tokenizer
        self._config = config
        self._sampling = sampling or config.sampling()
        self._stop_ids = tuple(dict.fromkeys((*self._sampling.stop_token_ids, *end_of_turn_ids(tokenizer))))
        self._workers = 0
        self._kind = worker_kind(env_fn, config.worker)
        self._worker = self._new_worker()
        self._left: list[EnvWorker] = []
        self.wasted_tokens = 0
        """Tokens sampled in episodes that gave no sample."""

    async def run_episode(
        self, *, episode_id: str, group_id: str, task_seed: int, sampling_seed: int, start_version: int
    ) -> Trajectory:
        """Play one episode.

        Args:
            episode_id: unique among those running.
            group_id: copied to the trajectory.
            task_seed: for ``env.reset``.
            sampling_seed: of the policy's random numbers in this episode.
            start_version: copied to the trajectory.

        Raises:
            EpisodeFailedError: no sample; the slot is usable again.
            UsageError: the environment cannot be made: bad input by the user.
            asyncio.CancelledError: as cancelled; the slot is usable again.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + self._config.episode_timeout_s
        conversation = Conversation(
            self._tokenizer, stop_token_ids=self._stop_ids, history=self._config.history
        )
        episode = _Episode(conversation)
        try:
            terminated, truncated, end_reason = await self._play(
                episode, episode_id, task_seed, sampling_seed, deadline
            )
        except asyncio.CancelledError:
            self.wasted_tokens += episode.action_tokens
            raise
        except UsageError:
            self._rebuild()
            raise
        except AgentEnvError as error:
            self.wasted_tokens += episode.action_tokens
            if episode.stage != "generate":
                self._rebuild()
            raise EpisodeFailedError(episode.stage, error, action_tokens=episode.action_tokens) from error
        finally:
            await self._proxy.release(episode_id)
        segment = conversation.segment
        info = episode.info
        info["timing_s"] = {stage: round(seconds, 6) for stage, seconds in episode.seconds.items()}
        info["rewards"] = episode.rewards
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
            episode_id=episode_id,
            task_id=str(info.get("task_id", task_seed)),
            group_id=group_id,
            seed=task_seed,
            start_version=start_version,
            turns=episode.turns,
            duration_s=loop.time() - started,
            messages=conversation.messages,
            info=info,
            earlier_segments=conversation.earlier_segments,
        )

    async def settle(self) -> None:
        """After a cancelled episode: wait until its environment call is over, or give the environment up."""
        try:
            await self._worker.settle()
        except EpisodeTimeoutError as error:
            logger.warning("%s: %s, after its episode was cancelled", self.name, error)
            self._rebuild()

    def end(self) -> None:
        """Have the environment closed as soon as its thread is free; does not wait."""
        self._worker.end()

    async def join(self, deadline: float) -> list[str]:
        """Wait until the slot's threads have ended; returns the names of those that have not by the deadline."""
        workers = [*self._left, self._worker]
        joined = await asyncio.gather(*(worker.join(deadline) for worker in workers))
        return [worker.name for worker, ended in zip(workers, joined, strict=True) if not ended]

    async def _play(
        self, episode: _Episode, episode_id: str, task_seed: int, sampling_seed: int, deadline: float
    ) -> tuple[bool, bool, str]:
        """Play to the end; returns terminated, truncated and the end's reason."""
        config, conversation, loop = self._config, episode.conversation, asyncio.get_running_loop()

        def until(stage: str, timeout_s: float) -> float:
            episode.stage = stage
            return min(loop.time() + timeout_s, deadline)

        before = loop.time()
        observation, info = await self._worker.reset(task_seed, until("reset", config.reset_timeout_s))
        episode.seconds["reset"] = loop.time() - before
        episode.info.update(_json_able(info))
        max_turns = config.max_turns or self._worker.max_turns or _DEFAULT_MAX_TURNS
        system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
        conversation.start([*system, {"role": "user", "content": observation}])
        if conversation.num_tokens >= config.max_tokens_per_episode:
            raise EnvError(
                f"the first prompt of task seed {task_seed} has {conversation.num_tokens} tokens, "
                f"max_tokens_per_episode is {config.max_tokens_per_episode}"
            )
        while True:
            before = loop.time()
            room = config.max_tokens_per_episode - conversation.num_tokens
            request = GenerationRequest(
                request_id=f"{episode_id}/{episode.turns}",
                prompt_ids=conversation.prompt_ids,
                sampling=self._turn_sampling(room),
                episode_id=episode_id,
                deadline=until("generate", config.generate_timeout_s),
                seed=_mix(sampling_seed, episode.turns),
            )
            generation = await self._proxy.generate(request)
            episode.seconds["generate"] += loop.time() - before
            action = conversation.add_action(
                generation.token_ids, generation.logprobs, generation.policy_versions
            )
            if generation.finish_reason == "abort":
                raise EnvError(f"turn {episode.turns} of episode {episode_id!r} was aborted from outside")
            episode.turns += 1
            before = loop.time()
            observation, reward, terminated, truncated, info = await self._worker.step(
                action, until("step", config.step_timeout_s)
            )
            episode.seconds["step"] += loop.time() - before
            episode.rewards.append(reward)
            episode.info.update(_json_able(info))
            if terminated:
                return True, truncated, "terminated"
            if truncated:
                return False, True, "truncated"
            if episode.turns >= max_turns:
                return False, True, "max_turns"
            if (
                conversation.num_tokens + conversation.delta_length(observation)
                >= config.max_tokens_per_episode
            ):
                return False, True, "max_tokens"
            conversation.add_observation(observation)
            if conversation.num_tokens >= config.max_tokens_per_episode:
                # A fork encodes the episode's text anew, which may take more tokens than were sampled.
                return False, True, "max_tokens"
            if loop.time() >= deadline:
                raise EpisodeTimeoutError(
                    "episode", f"episode {episode_id!r} ran past {config.episode_timeout_s} s"
                )

    def _turn_sampling(self, room: int) -> SamplingParams:
        sampling = self._sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=min(sampling.max_tokens, room),
            stop_token_ids=self._stop_ids,
        )

    def _new_worker(self) -> EnvWorker:
        self._workers += 1
        return make_worker(self._kind, self._env_fn, f"agentenv-{self.name}-{self._workers}")

    def _rebuild(self) -> None:
        self._worker.end()
        self._left = [worker for worker in self._left if worker.is_running]
        if self._worker.is_running:
            self._left.append(self._worker)
        self._worker = self._new_worker()


def _mix(seed: int, turn: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _json_able(value: Any) -> Any:
    """A copy in JSON's types; what JSON lacks becomes its repr (an info is for people, not a channel for objects)."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {str(key): _json_able(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_able(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _json_able(value.item())
    return repr(value)
