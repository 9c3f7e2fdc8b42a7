"""Playing the episodes of an evaluation through the rollout, whatever the policy is.

Invariants:

* Every episode that ends is kept at once; one that is kept is not played again.
* The tasks are those of the recipes' evaluations: seeds that training never draws, the same for every policy.
* A policy that cannot act any more (its server is gone, bad input to its baseline) ends the evaluation with one error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from agentenv.conversation import Tokenizer
from agentenv.environment_source import EnvFactory
from agentenv.errors import RolloutError, UsageError
from agentenv.evaluation.baseline_play import BaselineEngine, with_baseline, without_actions
from agentenv.evaluation.records import EpisodeLog, EpisodeRecord
from agentenv.inference import Engine, LLMProxy
from agentenv.inference.chat_engine import ChatEngine
from agentenv.inference.chat_server import ChatServer
from agentenv.inference.text_turns import TextTokenizer
from agentenv.report import Progress
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.rollout.workers import worker_kind
from agentenv.trajectory import Segment, Trajectory

__all__ = ["FIRST_SEED", "Player", "baseline_player", "model_player", "play_episodes", "server_player"]

FIRST_SEED: Final = 2**31
"""Of the tasks, as in the recipes' evaluations; training draws seeds below it."""
_SEEDS_APART: Final = 1_000_000
_NO_TOKEN_LIMIT: Final = 10**9
_FAILURES_TO_STOP: Final = 8
_CONTEXT_REASON: Final = "generate_ContextLengthError"


@dataclass
class Player:
    """What acts: an engine, and how its episodes are read."""

    env_fn: EnvFactory
    engine: Engine
    tokenizer: Tokenizer
    config: RolloutConfig
    complete: Callable[[EpisodeRecord, Trajectory], None]
    """Adds to a record what the trajectory alone does not tell."""


class _Sized(Protocol):
    """What a player needs of the command's options."""

    num_envs: int
    temperature: float
    max_tokens: int
    max_turns: int | None
    max_context: int
    dtype: str | None
    episode_timeout: float
    system_prompt: str | None


def rollout_config(options: _Sized, env_fn: EnvFactory, *, max_context: int) -> RolloutConfig:
    """The rollout's settings; time-outs are long, since a first reset may build an image and a last step run tests."""
    return RolloutConfig(
        num_envs=options.num_envs,
        worker=worker_kind(env_fn),
        max_turns=options.max_turns,
        max_tokens_per_turn=min(options.max_tokens, max_context),
        max_tokens_per_episode=max_context,
        temperature=options.temperature,
        system_prompt=options.system_prompt,
        reset_timeout_s=min(1800.0, options.episode_timeout),
        step_timeout_s=min(2400.0, options.episode_timeout),
        episode_timeout_s=options.episode_timeout,
        generate_timeout_s=options.episode_timeout,
    )


def baseline_player(env_fn: EnvFactory, policy: str, seed: int, options: _Sized) -> Player:
    """Plays a baseline of the environment."""

    def complete(record: EpisodeRecord, trajectory: Trajectory) -> None:
        record.messages = without_actions(record.messages)

    return Player(
        partial(with_baseline, env_fn, policy, seed),
        BaselineEngine(),
        TextTokenizer(),
        rollout_config(options, env_fn, max_context=_NO_TOKEN_LIMIT),
        complete,
    )


def server_player(env_fn: EnvFactory, server: ChatServer, options: _Sized) -> Player:
    """Plays the model of a chat server."""
    engine = ChatEngine(server)

    def complete(record: EpisodeRecord, trajectory: Trajectory) -> None:
        usage = engine.take_usage(trajectory.episode_id)
        if usage.turns:
            record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        if record.end_reason == _CONTEXT_REASON and usage.turns:
            # The conversation outgrew the model: that is the policy's limit and no failure of the infrastructure.
            record.failed, record.error, record.end_reason = False, "", "max_tokens"
            record.steps, record.success = usage.turns, False

    return Player(
        env_fn,
        engine,
        TextTokenizer(),
        rollout_config(options, env_fn, max_context=_NO_TOKEN_LIMIT),
        complete,
    )


def model_player(env_fn: EnvFactory, name: str, options: _Sized) -> Player:
    """Plays a model in this process; needs torch and transformers.

    Raises:
        UsageError: it cannot be loaded.
    """
    from agentenv.inference.policy import default_dtype, hide_progress_bars, load_policy, open_engine

    hide_progress_bars()
    policy = load_policy(name, model_options={"dtype": options.dtype or default_dtype()})
    positions = getattr(policy.model.config, "max_position_embeddings", None)
    length = min(options.max_context, positions) if positions else options.max_context
    config = rollout_config(options, env_fn, max_context=length)
    engine = open_engine(policy, max_batch=options.num_envs, max_length=length)

    def complete(record: EpisodeRecord, trajectory: Trajectory) -> None:
        record.completion_tokens = trajectory.num_action_tokens
        record.prompt_tokens = _tokens_read(trajectory)

    return Player(env_fn, engine, policy.tokenizer, config, complete)


def _tokens_read(trajectory: Trajectory) -> int:
    """Prompt tokens summed over turns, as a server counts them: all that stood before each turn's first token."""
    total = 0
    parts: list[Segment | Trajectory] = [*trajectory.earlier_segments, trajectory]
    for part in parts:
        before = False
        for position, is_action in enumerate(part.action_mask):
            if is_action and not before:
                total += len(part.prompt_ids) + position
            before = is_action
    return total


def play_episodes(player: Player, log: EpisodeLog, episodes: int, seed: int) -> None:
    """Play what the log does not have yet.

    Args:
        player: acts.
        log: gets the records.
        episodes: in all.
        seed: chooses tasks, and the sampling of a model in this process.

    Raises:
        UsageError: the environment cannot be made, or the baseline refuses the task.
        RolloutError: the policy cannot act any more, or every episode failed from the start.
    """
    first = FIRST_SEED + seed * _SEEDS_APART
    index_of = {first + index: index for index in range(episodes) if index not in log.records}
    before = len(log.records)
    began = time.monotonic()

    def ended(trajectory: Trajectory) -> None:
        record = EpisodeRecord.of(index_of[trajectory.seed], trajectory)
        player.complete(record, trajectory)
        if record.failed and record.end_reason.endswith("_UsageError"):
            raise UsageError(record.error)
        log.add(record)
        progress.update(len(log.records), _shown(log, before, time.monotonic() - began))
        _check_failures(log, player.config.num_envs)

    with Progress() as progress:
        progress.stage("evaluation", unit="episode", total=episodes, done=before)
        if before:
            progress.note(f"{before} of {episodes} episodes were played already")
        if not index_of:
            return
        config = player.config
        proxy = LLMProxy([player.engine])
        with AsyncController(player.env_fn, proxy, player.tokenizer, config, seed=seed) as controller:
            controller.evaluate(
                None,
                list(index_of),
                num_envs=min(config.num_envs, len(index_of)),
                on_result=ended,
                sampling_seed=seed,
            )


def _shown(log: EpisodeLog, before: int, seconds: float) -> dict[str, str]:
    valid = [record for record in log.records.values() if not record.failed]
    failed = len(log.records) - len(valid)
    values: dict[str, Any] = {
        "success": f"{sum(record.success for record in valid) / max(1, len(valid)):.2f}",
        "episodes/s": f"{(len(log.records) - before) / max(1e-9, seconds):.2f}",
    }
    return values | ({"failed": str(failed)} if failed else {})


def _check_failures(log: EpisodeLog, num_envs: int) -> None:
    """Stop where infrastructure has ended every episode so far: the rest would go the same way."""
    records = list(log.records.values())
    if len(records) < max(_FAILURES_TO_STOP, 2 * num_envs) or not all(record.failed for record in records):
        return
    (reason, times), *_ = Counter(record.end_reason for record in records).most_common(1)
    example = next(record.error for record in records if record.end_reason == reason)
    raise RolloutError(
        f"infrastructure ended all of the first {len(records)} episodes, {times} of them with {reason}, for example: "
        f"{example}"
    )
