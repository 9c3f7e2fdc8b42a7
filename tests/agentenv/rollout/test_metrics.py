"""The metrics in worked numbers: a token takes one second, everything else is in the tasks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentenv.simulation.engine import DecodeModel, SimulatedEngine
from agentenv.trajectory import Trajectory


def _engine() -> SimulatedEngine:
    return SimulatedEngine(DecodeModel(1.0), tokens_per_id=1)


def test_staleness_is_counted_by_age(virtual_run: Any, tasks: Any) -> None:
    # Eight slots at alpha 1: tasks 0 to 7 start with version 0, and 6 and 7 end last, at 10 s. Batch 1 waits for them,
    # as no later one could take them; batch 2 is of what started with version 1.
    played = tasks(step_s=lambda seed, *_: 9.0 if seed in (6, 7) else 2.0)
    run = virtual_run(played, num_envs=8)
    ages = []
    for step in range(3):
        batch = run.controller.get_batch(step)
        metrics = run.controller.metrics()
        ages.append({name: value for name, value in metrics.items() if name.startswith("staleness/")})
        stale = [step - trajectory.start_version for trajectory in batch]
        assert metrics["staleness_mean"] == sum(stale) / 4 and metrics["staleness_max"] == max(stale)
        run.controller.sync_weights({}, step + 1)
    assert ages == [{"staleness/0": 4.0}, {"staleness/1": 4.0}, {"staleness/1": 4.0}]


def test_staleness_of_a_mixed_batch(virtual_run: Any, tasks: Any) -> None:
    # Two of six groups are replaced once version 1 is there, so that batch 1 is of both ages.
    async def reward(trajectory: Trajectory) -> float:
        return 1.0

    def keep(group: list[Trajectory]) -> bool:
        return group[0].seed not in (6, 7)

    played = tasks(step_s=lambda seed, *_: 9.0 if seed in (6, 7) else 2.0)
    run = virtual_run(played, num_envs=8, keep_group=keep, reward_fn=reward)
    run.train(1)
    batch = run.controller.get_batch(1)
    metrics = run.controller.metrics()
    ages = [1 - trajectory.start_version for trajectory in batch]
    assert sorted(ages) == [0, 0, 1, 1]
    assert (metrics["staleness/0"], metrics["staleness/1"], metrics["staleness_mean"]) == (2.0, 2.0, 0.5)


def test_idle_shares_and_the_times_of_the_stages(virtual_run: Any, tasks: Any) -> None:
    async def reward(trajectory: Trajectory) -> float:
        await asyncio.sleep(5.0)
        return 1.0

    # Reset 1 s, then twice 2 s in the engine and 3 s in the environment; then 5 s for the reward.
    played = tasks(turns=2, reset_s=lambda *_: 1.0, tokens=lambda *_: 2, step_s=lambda *_: 3.0)
    run = virtual_run(played, num_envs=8, asynchrony=0.0, reward_fn=reward, engines=[_engine(), _engine()])
    run.controller.get_batch(0)
    assert run.now == 16.0
    metrics = run.controller.metrics()
    assert metrics["reset_s"] == 1.0 and metrics["generate_s"] == 4.0
    assert metrics["step_s"] == 6.0 and metrics["reward_s"] == 5.0
    assert metrics["environment_wait_s"] == 7.0
    assert metrics["batch_wait_s"] == 16.0
    assert metrics["episode_s"] == metrics["offered_episode_s"] == 11.0
    assert metrics["first_finisher_bias"] == 1.0
    assert metrics["group_s"] == 16.0
    # Both engines have requests for 4 of 16 s; half of the slots play for 11 of 16 s.
    assert metrics["engine_idle_share"] == 0.75
    assert metrics["slot_idle_share"] == pytest.approx(1.0 - 4 * 11 / (8 * 16))
    assert metrics["episodes_per_s"] == 4 / 16 and metrics["sampled_tokens_per_s"] == 4 * 4 / 16


def test_an_engine_without_requests_is_idle_while_the_other_is_not(virtual_run: Any, tasks: Any) -> None:
    played = tasks(tokens=lambda *_: 10)
    run = virtual_run(played, batch_size=1, num_envs=1, asynchrony=0.0, engines=[_engine(), _engine()])
    run.train(1, train_s=10.0)
    assert run.controller.metrics()["engine_idle_share"] == 0.5
    run.controller.get_batch(1)
    # One of two engines, for 10 of the 20 s since the last batch.
    assert run.controller.metrics()["engine_idle_share"] == 0.75
    assert run.controller.metrics()["slot_idle_share"] == 0.5


def test_buffer_occupancy_is_the_mean_over_time(virtual_run: Any, tasks: Any) -> None:
    # At most four are outstanding; they end 1, 2, 3 and 4 s after their token: 0, 0, 1, 2, 3 of 4 in the seconds.
    run = virtual_run(tasks(step_s=lambda seed, *_: 1.0 + seed), asynchrony=0.0)
    run.controller.get_batch(0)
    assert run.now == 5.0
    assert run.controller.metrics()["buffer_occupancy"] == pytest.approx((0 + 0 + 1 + 2 + 3) / (4 * 5))
    assert run.controller.metrics()["buffered"] == 0.0


def test_sync_time_is_that_since_the_last_batch(virtual_run: Any, tasks: Any) -> None:
    class Slow(SimulatedEngine):
        async def update_weights(self, weights: Any, version: int) -> None:
            await asyncio.sleep(6.0)
            await super().update_weights(weights, version)

    run = virtual_run(tasks(), engines=[Slow(DecodeModel(1.0), tokens_per_id=1)], asynchrony=0.0)
    run.train(1)
    assert run.controller.metrics()["sync_s"] == 0.0
    run.train(1, start=1)
    assert run.controller.metrics()["sync_s"] == 6.0
    run.controller.get_batch(2)
    assert run.controller.metrics()["sync_s"] == 6.0


def test_a_group_takes_from_its_first_start_to_its_completion(virtual_run: Any, tasks: Any) -> None:
    # One slot: the members of a group come one after another, 3 s each.
    run = virtual_run(tasks(step_s=lambda *_: 2.0), batch_size=4, group_size=2, num_envs=1, asynchrony=0.0)
    run.controller.get_batch(0)
    metrics = run.controller.metrics()
    assert run.now == 12.0 and metrics["group_s"] == 6.0 and metrics["episode_s"] == 3.0


def test_first_finishers_are_told_by_what_was_offered(virtual_run: Any, tasks: Any) -> None:
    # Four of 2 s make the batch; one of 101 s is cut at 2 s, another one too.
    played = tasks(step_s=lambda seed, *_: 100.0 if seed in (1, 4) else 1.0 + seed)
    run = virtual_run(played, redundant_groups=2, num_envs=6, asynchrony=0.0)
    run.controller.get_batch(0)
    # Taken: 2, 4, 5 and 7 s. Cut at 7 s: two.
    assert run.now == 7.0
    run.counts()
    run.controller.sync_weights({}, 1)
    assert run.controller.metrics()["episode_s"] == 4.5
    run.controller.get_batch(1)
    metrics = run.controller.metrics()
    # What was cut after batch 0 was full is offered in the time of batch 1, with what batch 1 took itself.
    assert metrics["offered_episode_s"] == pytest.approx((7 + 7 + 4 * metrics["episode_s"]) / 6)
    assert metrics["first_finisher_bias"] == pytest.approx(
        metrics["episode_s"] / metrics["offered_episode_s"]
    )


def test_discarded_episodes_and_their_tokens_are_counted_by_reason(virtual_run: Any, tasks: Any) -> None:
    def step_s(seed: int, member: int, turn: int) -> float:
        if seed == 0 and turn == 1:
            raise OSError("broken")
        return 1000.0 if seed == 1 and turn == 1 else 1.0

    played = tasks(turns=2, step_s=step_s, tokens=lambda seed, member, turn: 3 + turn)
    run = virtual_run(
        played, asynchrony=0.0, step_timeout_s=10.0, max_retries=0, max_failure_rate=1.0, keep_group=_not_2
    )
    batch = run.controller.get_batch(0)
    assert sorted(trajectory.seed for trajectory in batch) == [3, 4, 5, 6]
    metrics = run.controller.metrics()
    assert {name: value for name, value in metrics.items() if name.startswith("discarded/")} == {
        "discarded/filtered": 1.0,
        "discarded/step_OSError": 1.0,
        "discarded/step_timeout": 1.0,
    }
    # Two turns of 3 and 4 tokens each.
    assert {name: value for name, value in metrics.items() if name.startswith("discarded_tokens/")} == {
        "discarded_tokens/filtered": 7.0,
        "discarded_tokens/step_OSError": 7.0,
        "discarded_tokens/step_timeout": 7.0,
    }
    assert metrics["wasted_tokens"] == 21.0 and metrics["discarded"] == 3.0
    # The environments that raised and hung; that of the filtered group did nothing wrong.
    assert metrics["workers_replaced"] == 2.0
    assert metrics["failure_rate"] == 2 / 7


def _not_2(group: list[Trajectory]) -> bool:
    return group[0].seed != 2


def test_an_environment_outlives_the_failure_of_a_turn(virtual_run: Any, tasks: Any) -> None:
    played = tasks(tokens=lambda seed, *_: 100 if seed == 0 else 2)
    run = virtual_run(played, asynchrony=0.0, generate_timeout_s=10.0, max_retries=0)
    run.controller.get_batch(0)
    metrics = run.controller.metrics()
    assert metrics["discarded/generate_timeout"] == 1.0
    assert metrics["workers_replaced"] == 0.0


def test_stale_episodes_are_counted_with_their_tokens(virtual_run: Any, tasks: Any) -> None:
    played = tasks(turns=1, tokens=lambda seed, member, turn: 1000 if seed == 7 and member == 0 else 2)
    run = virtual_run(played, num_envs=8, on_stale="abort", asynchrony=1.0)
    run.train(3, train_s=10.0)
    metrics = run.controller.metrics()
    assert metrics["discarded/stale"] == 1.0
    # Its turn was cut when batch 1 was full, at 14 s.
    assert metrics["discarded_tokens/stale"] == 14.0


def test_numbers_before_the_first_batch_are_the_counts_alone(virtual_run: Any, tasks: Any) -> None:
    metrics = virtual_run(tasks()).controller.metrics()
    assert metrics["discarded"] == metrics["buffered"] == metrics["running"] == metrics["failure_rate"] == 0.0
    assert "staleness_mean" not in metrics
    assert all(type(value) is float for value in metrics.values())


def test_every_metric_is_documented(virtual_run: Any, tasks: Any) -> None:
    from pathlib import Path

    documented = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    played = tasks(step_s=lambda seed, *_: 100.0 if seed == 1 else 1.0)
    run = virtual_run(played, redundant_groups=1, on_sync="restart")
    run.train(3)
    names = {name.partition("/")[0] for name in run.controller.metrics()}
    assert {
        name for name in names if f"`{name}`" not in documented and f"`{name}/" not in documented
    } == set()
