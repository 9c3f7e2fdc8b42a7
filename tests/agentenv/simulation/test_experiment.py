"""Whole runs of the production controller in virtual time, against numbers worked out by hand."""

import time

import pytest

from agentenv.errors import RolloutError
from agentenv.simulation.engine import DecodeModel
from agentenv.simulation.experiment import Run, rollout_config, simulate
from agentenv.simulation.workload import Constant, Gaussian, Workload

MINUTE = Workload(turns=3, step_s=Constant(20.0))
"""Episodes of 60 s."""


def test_one_wave_takes_an_episodes_time_and_two_take_twice_as_long():
    one = Run(rollout_config(batch_size=8, num_envs=8, mode="sync", num_steps=1), MINUTE)
    two = Run(rollout_config(batch_size=8, num_envs=4, mode="sync", num_steps=1), MINUTE)
    assert simulate(one).total_s == pytest.approx(60.0)
    assert simulate(two).total_s == pytest.approx(120.0)


def test_training_time_counts_and_in_sync_mode_nothing_runs_meanwhile():
    run = Run(
        rollout_config(batch_size=4, num_envs=4, mode="sync", num_steps=3), MINUTE, steps=3, train_s=25.0
    )
    outcome = simulate(run)
    assert outcome.wait_s == pytest.approx([60.0, 60.0, 60.0])
    assert outcome.step_s == pytest.approx([85.0, 85.0, 85.0])
    assert outcome.counts["consumed"] == 12


def test_asynchrony_hides_training_behind_rollout():
    run = Run(
        rollout_config(batch_size=4, num_envs=4, asynchrony=1.0, num_steps=6), MINUTE, steps=6, train_s=25.0
    )
    outcome = simulate(run)
    # Four slots are always busy: a batch a minute.
    assert outcome.step_s[1:5] == pytest.approx([60.0, 60.0, 60.0, 60.0], abs=25.0)
    assert outcome.total_s == pytest.approx(6 * 60.0 + 25.0)


def test_decoding_slows_down_with_the_load_of_the_engines():
    workload = Workload(tokens=Constant(100.0))
    config = rollout_config(batch_size=8, num_envs=8, mode="sync", num_steps=1)
    slow = DecodeModel(base_s=0.1, knee=1)
    assert simulate(Run(config, workload, engines=(slow,))).total_s == pytest.approx(80.0)
    assert simulate(Run(config, workload, engines=(slow,) * 4)).total_s == pytest.approx(20.0)


def test_rewards_overlap_with_episodes_in_sync_mode_and_wait_in_batch_mode():
    workload = Workload(step_s=Constant(10.0))
    for mode, expected in (("sync", 25.0), ("batch", 25.0)):
        config = rollout_config(batch_size=4, num_envs=4, mode=mode, num_steps=1)
        assert simulate(Run(config, workload, reward_s=15.0)).total_s == pytest.approx(expected)
    # Two waves over two slots, rewards two by two: sync computes those of 10 s until 25 s and those of 20 s until 40 s;
    # batch begins at 20 s and takes 30 s.
    for mode, expected in (("sync", 40.0), ("batch", 50.0)):
        config = rollout_config(batch_size=4, num_envs=2, mode=mode, num_steps=1, num_reward_workers=2)
        assert simulate(Run(config, workload, reward_s=15.0)).total_s == pytest.approx(expected)


def test_both_modes_play_the_same_episodes():
    workload = Workload(turns=4, step_s=Gaussian(10.0, 5.0))

    def played(mode):
        config = rollout_config(batch_size=16, num_envs=16, mode=mode, num_steps=1)
        (batch,) = simulate(Run(config, workload), seed=3, keep_batches=True).batches
        return sorted(trajectory.info["latency_s"] for trajectory in batch)

    assert played("sync") == played("batch")


def test_batch_mode_takes_the_slowest_of_every_turn_and_sync_the_slowest_sum():
    workload = Workload(turns=4, step_s=Gaussian(10.0, 5.0), seed=3)

    def played(mode):
        config = rollout_config(batch_size=16, num_envs=16, mode=mode, num_steps=1)
        return simulate(Run(config, workload), seed=3, keep_batches=True)

    plans = [workload.episode(trajectory.seed, 0).step_s for trajectory in played("batch").batches[0]]
    assert played("batch").total_s == pytest.approx(sum(map(max, zip(*plans, strict=True))))
    assert played("sync").total_s == pytest.approx(max(map(sum, plans)))


def test_a_run_repeats_exactly_and_another_seed_gives_another():
    run = Run(
        rollout_config(batch_size=16, group_size=4, num_envs=12, asynchrony=1.0, num_steps=4),
        Workload(turns=2, step_s=Gaussian(10.0, 5.0)),
        engines=(DecodeModel(0.1, knee=2),) * 2,
        steps=4,
        train_s=10.0,
    )
    assert simulate(run, seed=1).step_s == simulate(run, seed=1).step_s
    assert simulate(run, seed=1).step_s != simulate(run, seed=2).step_s


def test_a_run_without_an_end_in_sight_raises_instead_of_hanging():
    class Endless:
        def draw(self, rng):
            return 1e12

    run = Run(rollout_config(batch_size=2, num_envs=2, mode="sync", num_steps=1), Workload(step_s=Endless()))
    began = time.monotonic()
    with pytest.raises(RolloutError):
        simulate(run)
    assert time.monotonic() - began < 60.0


def test_512_environments_of_22_turns_take_seconds_of_cpu():
    run = Run(
        rollout_config(batch_size=512, num_envs=512, mode="sync", num_steps=1),
        Workload(turns=22, step_s=Gaussian(10.0, 10.0)),
    )
    began = time.process_time()
    outcome = simulate(run)
    # Under a second on an idle machine; the bar leaves room for slower ones.
    assert time.process_time() - began < 4.0
    assert outcome.counts["consumed"] == 512
