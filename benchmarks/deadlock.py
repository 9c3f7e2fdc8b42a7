"""One dead environment must not hold up a batch: the case that deadlocks a well-known system, in every variant.

    python benchmarks/deadlock.py --json deadlock.json --check
    python benchmarks/deadlock.py --stride 9

Batch 256 in groups of 8 over 288 environments, of which one never gets through its first step: it dies, or it hangs
past its deadline. Whatever replaces it in its slot is no better. The slot is at position p of 0..287 (in the order in
which slots make their first environments); alpha is 0, 0.5, 1 or 2; with 36 groups where 32 make a batch
(`redundant_groups` 4) and without. Each case is a few steps of training with the production AsyncController under the
virtual clock, so a deadline of minutes costs nothing and a wait without a deadline shows as a deadlock at once. The
variants are played a second time with episodes of 300 to 600 s, among which the failures of a dead environment, seconds
apart, are all that ends for a long time.

A case completes when every step has its batch of 32 groups, each full or short by failed members only, every sample is
fresh and the account holds. With 36 groups every position is played, without and with long episodes every 7th and
every 31st, beginning elsewhere in each variant; `--stride` thins out all three. The whole takes about 2,800 cases of
0.15 CPU seconds.
"""

import argparse
import asyncio
import functools
import itertools
import json
import logging
import multiprocessing
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentenv import AsyncEnv
from agentenv.errors import RolloutError
from agentenv.inference.proxy import LLMProxy
from agentenv.report.bars import Bar, print_bars
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.simulation.clock import VirtualLoop
from agentenv.simulation.engine import SimulatedEngine
from agentenv.simulation.environment import SimulatedTokenizer
from agentenv.trajectory import Trajectory

NUM_ENVS = 288
BATCH_SIZE = 256
GROUP_SIZE = 8
STEPS = 3
ALPHAS = (0.0, 0.5, 1.0, 2.0)
FAULTS = ("death", "hang")
REDUNDANT_GROUPS = (4, 0)
EPISODE_S = 10.0
"""An episode of a good environment takes between one and two times this."""
STEP_TIMEOUT_S = 60.0
LONG_EPISODE_S = 300.0
PLAIN_STRIDE = 7
"""Positions apart in the form without redundancy; it has no factor in common with the group size."""
LONG_STRIDE = 31
"""Positions apart with long episodes."""


@dataclass(frozen=True)
class Case:
    """One variant at one position."""

    position: int
    fault: str
    alpha: float
    redundant_groups: int
    episode_s: float = EPISODE_S

    @property
    def step_timeout_s(self) -> float:
        """Deadline of an environment's step."""
        return max(STEP_TIMEOUT_S, 3 * self.episode_s)

    @property
    def longest_step_s(self) -> float:
        """Redundant groups hide the fault: a step takes an episode, and a little for those that began late. Without
        them it is held up by the fault and by the episode after it; twice where the slot gets the replacement, too.
        """
        if self.redundant_groups:
            return 2.5 * self.episode_s
        return 4 * self.episode_s + (2 * self.step_timeout_s if self.fault == "hang" else 0.0)


@dataclass(frozen=True)
class Result:
    """How a case went."""

    case: Case
    error: str
    """Empty: it completed."""
    longest_step_s: float
    """Virtual seconds of the slowest step."""
    short_groups: int
    """Groups that a failed member is missing from, over all steps."""
    failures: int
    """Episodes that the fault ended."""


class SlotEnv(AsyncEnv):
    """Two turns, in the time that the task says; in the slot of the case's position the first step never comes back.

    Args:
        case: which slot, and what happens there.
    """

    max_turns = 2

    def __init__(self, case: Case) -> None:
        self._fault = case.fault if _slot() == case.position else ""
        self._episode_s = case.episode_s
        self._turn_s = 0.0

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The task says how long a turn takes."""
        self._turn_s = self._episode_s * (1.0 + (seed or 0) % 997 / 997) / self.max_turns
        return "1", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        """A turn, or the fault."""
        if self._fault == "death":
            raise ConnectionError("the environment is dead")
        await asyncio.sleep(1e9 if self._fault else self._turn_s)
        return "1", 0.5, False, False, {}


def _slot() -> int:
    """Number of the slot that an environment is being made for: the slots make their first ones in this order.

    An environment that replaces a failed one can't know its place by itself, and nothing else in the rollout needs it;
    the task that makes it is the slot's ``run_episode``.
    """
    task = asyncio.current_task()
    assert task is not None
    frame = task.get_coro().cr_frame  # type: ignore[union-attr]
    name: str = frame.f_locals["self"].name
    return int(name.removeprefix("slot-"))


def play(case: Case, *, steps: int = STEPS) -> Result:
    """One case."""
    runner = VirtualLoop()
    config = RolloutConfig(
        batch_size=BATCH_SIZE,
        group_size=GROUP_SIZE,
        num_envs=NUM_ENVS,
        asynchrony=case.alpha,
        redundant_groups=case.redundant_groups,
        step_timeout_s=case.step_timeout_s,
        num_steps=steps,
    )
    controller = AsyncController(
        functools.partial(SlotEnv, case),
        LLMProxy([SimulatedEngine()]),
        SimulatedTokenizer(),
        config,
        loop_factory=lambda: runner,
    )
    longest_s, short, error = 0.0, 0, ""
    with controller:
        try:
            for step in range(steps):
                began = runner.now
                batch = controller.get_batch(step)
                longest_s = max(longest_s, runner.now - began)
                short += _check(batch, step, case)
                controller.sync_weights({}, step + 1)
        except (RolloutError, AssertionError) as caught:
            error = str(caught)
        counts = controller.counts()
    ended = counts["consumed"] + counts["buffered"] + sum(counts["discarded"].values())
    if not error and counts["produced"] != ended:
        error = f"the account does not hold: {counts}"
    failures = sum(number for reason, number in counts["discarded"].items() if reason.startswith("step_"))
    return Result(case, error, longest_s, short, failures)


def _check(batch: Sequence[Trajectory], step: int, case: Case) -> int:
    """A batch is what it should be; returns how many groups are short."""
    sizes = Counter(trajectory.group_id for trajectory in batch)
    names = {trajectory.episode_id for trajectory in batch}
    assert len(names) == len(batch), f"step {step} has an episode twice"
    assert len(sizes) == BATCH_SIZE // GROUP_SIZE, f"step {step} has {len(sizes)} groups"
    assert max(sizes.values()) <= GROUP_SIZE, f"step {step} has a group of {max(sizes.values())}"
    assert all(t.start_version >= step - case.alpha for t in batch), f"step {step} has a stale sample"
    return sum(size < GROUP_SIZE for size in sizes.values())


def cases(stride: int = 1) -> list[Case]:
    """The cases of each variant, ``stride`` times as far apart; at least one of each."""
    variants = itertools.product((EPISODE_S, LONG_EPISODE_S), FAULTS, ALPHAS, REDUNDANT_GROUPS)
    found = []
    for number, (episode_s, fault, alpha, redundant) in enumerate(variants):
        apart = LONG_STRIDE if episode_s == LONG_EPISODE_S else 1 if redundant else PLAIN_STRIDE
        apart = min(stride * apart, NUM_ENVS)
        positions = range(number * 37 % apart, NUM_ENVS, apart)
        found += [Case(position, fault, alpha, redundant, episode_s) for position in positions]
    return found


def _by_form(results: Sequence[Result]) -> dict[tuple[float, str, int], list[Result]]:
    """Results by length of episodes, fault and redundancy."""
    forms: dict[tuple[float, str, int], list[Result]] = {}
    for result in sorted(results, key=lambda result: (result.case.episode_s, result.case.fault)):
        case = result.case
        forms.setdefault((case.episode_s, case.fault, case.redundant_groups), []).append(result)
    return forms


def main(argv: Sequence[str] | None = None) -> int:
    """Play all cases; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write figures and bars to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--stride", type=int, default=1, help="play every n-th of the cases")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="processes")
    options = parser.parse_args(argv)
    logging.disable(logging.ERROR)
    todo = cases(options.stride)
    results: list[Result] = []
    with multiprocessing.get_context("spawn").Pool(options.jobs, logging.disable, (logging.ERROR,)) as pool:
        for result in pool.imap_unordered(play, todo, chunksize=4):
            results.append(result)
            if sys.stderr.isatty() or len(results) % max(1, len(todo) // 20) == 0:
                end = "\r" if sys.stderr.isatty() else "\n"
                print(f"{len(results)} of {len(todo)} cases", end=end, file=sys.stderr, flush=True)
    broken = [result for result in results if result.error]
    for result in broken[:20]:
        print(f"{result.case}: {result.error}")
    bars = [
        Bar("cases that complete", len(results) - len(broken), "==", len(todo), "cases"),
        *(
            Bar(
                f"longest step, {fault}, {number} redundant groups, episodes of {episode_s:g} s and more",
                max(result.longest_step_s for result in played),
                "<=",
                played[0].case.longest_step_s,
                "s (virtual)",
            )
            for (episode_s, fault, number), played in _by_form(results).items()
        ),
    ]
    held = print_bars(bars)
    if options.json:
        figures = {"bars": [bar.as_dict() for bar in bars], "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(figures, indent=1))
    return int(options.check and not held)


if __name__ == "__main__":
    raise SystemExit(main())
