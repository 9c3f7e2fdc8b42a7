"""What `agentenv simulate scale` measures: kinds of runs and their sizes.

Invariant: a case's name tells all that its measurement needs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from agentenv.simulation import scale_runs, server_cost
from agentenv.simulation.figure import Measurement
from agentenv.simulation.scale_runs import Cost
from agentenv.simulation.shard_slots import EpisodeSlots, TurnSlots

ONE, TURNS, EPISODES, MODELS, SERVER = (
    "one loop",
    "shards that ask for turns",
    "shards that deliver episodes",
    "the models alone",
    "a server's client",
)
EVERY_TOKEN, COLLECTING = ", every token", ", Python's collector on"
_SLOTS = {ONE: None, TURNS: TurnSlots, EPISODES: EpisodeSlots}


def case_name(kind: str, num_envs: int) -> str:
    """How a case is called."""
    return f"{kind}: {num_envs}"


def cases(num_envs: int) -> tuple[str, ...]:
    """All that is measured for so many environments; the longest first, so that two processes end together."""
    small, middle = num_envs // 100, num_envs // 20
    sizes = {
        ONE: (num_envs, middle, small),
        ONE + EVERY_TOKEN: (small,),
        ONE + COLLECTING: (middle,),
        TURNS: (small, middle),
        TURNS + EVERY_TOKEN: (small,),
        EPISODES: (small, middle),
        EPISODES + EVERY_TOKEN: (small,),
        MODELS: (middle,),
        SERVER: (min(small, 100),),
    }
    return tuple(case_name(kind, size) for kind, of_kind in sizes.items() for size in of_kind)


def measure(case: str, seed: int) -> Measurement:
    """One run's cost and account."""
    began_s = time.time()
    return {**_measure(case, seed), "began_s": began_s, "ended_s": time.time()}


def _measure(case: str, seed: int) -> Measurement:
    kind, _, size = case.partition(": ")
    num_envs = int(size)
    if kind == SERVER:
        found = server_cost.measure(episodes=num_envs, turns=scale_runs.TURNS, seed=seed)
        return {"turn_us": found.turn_s * 1e6, "look_us": found.look_s * 1e6, "wall_s": found.wall_s}
    if kind == MODELS:
        return _as_measurement(scale_runs.play_models(num_envs, seed=seed))
    with _no_lines_of_failures():
        cost = scale_runs.play(
            num_envs,
            seed=seed,
            slots=_SLOTS[kind.partition(",")[0]],
            tokens_per_id=1 if kind.endswith(EVERY_TOKEN) else 1024,
            collects=kind.endswith(COLLECTING),
        )
        return _as_measurement(cost)


def _as_measurement(cost: Cost) -> Measurement:
    counts = cost.counts
    discarded: Mapping[str, int] = counts.get("discarded", {})
    found = {
        "turn_us": cost.cpu_s / cost.turns * 1e6,
        "cpu_s": cost.cpu_s,
        "wall_s": cost.wall_s,
        "turn_s": cost.turn_s,
        "grown_mb": cost.grown_mb,
        "collecting_s": cost.collecting_s,
        "longest_collection_s": cost.longest_collection_s,
        "turns": float(cost.turns),
        "resets": float(cost.resets),
        "engine_crashes": float(cost.engine_crashes),
        "moved_turns": float(cost.moved_turns),
    }
    if counts:
        ended = counts["consumed"] + counts["buffered"] + sum(discarded.values())
        found |= {
            "episodes": float(counts["produced"]),
            "consumed": float(counts["consumed"]),
            "missing": float(abs(counts["produced"] - ended) + counts["running"]),
            "crashed": float(discarded.get("step_CrashError", 0)),
            "hung": float(discarded.get("step_timeout", 0)),
        }
    return found


@contextmanager
def _no_lines_of_failures() -> Iterator[None]:
    """There are thousands of them, all as planned."""
    ours = logging.getLogger("agentenv")
    level = ours.level
    ours.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ours.setLevel(level)
