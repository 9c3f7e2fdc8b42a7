"""Workloads, their environments and their tokenizer."""

import asyncio
import math
import random
import statistics
from dataclasses import replace

import pytest

from agentenv.conversation import Conversation
from agentenv.inference.protocol import GenerationRequest
from agentenv.simulation.clock import VirtualLoop
from agentenv.simulation.environment import (
    CrashError,
    SimulatedEnv,
    SimulatedTasks,
    SimulatedTokenizer,
    reply_tokens,
)
from agentenv.simulation.workload import Beta, Constant, Gaussian, LogNormal, Workload


def correlation(xs, ys):
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    covariance = statistics.fmean((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / (statistics.pstdev(xs) * statistics.pstdev(ys))


def test_an_episode_is_a_function_of_seed_task_and_member():
    workload = Workload(
        turns=3, step_s=Gaussian(10, 5), tokens=LogNormal(100, 1), pass_rate=Beta(1, 1), seed=1
    )
    plan = workload.episode(7, 2)
    assert plan == workload.episode(7, 2)
    assert len({plan, workload.episode(7, 3), workload.episode(8, 2)}) == 3
    assert plan != Workload(
        turns=3, step_s=Gaussian(10, 5), tokens=LogNormal(100, 1), pass_rate=Beta(1, 1), seed=2
    ).episode(7, 2)


def test_fail_slow_changes_nothing_but_one_step():
    quick = Workload(turns=4, step_s=Gaussian(10, 5))
    slow = Workload(turns=4, step_s=Gaussian(10, 5), slow_share=1.0, slow_s=180.0)
    for task in range(20):
        pairs = zip(quick.episode(task, 0).step_s, slow.episode(task, 0).step_s, strict=True)
        assert sorted(round(b - a, 6) for a, b in pairs) == [0.0, 0.0, 0.0, 180.0]


def test_latencies_are_never_below_0_and_have_the_mean_of_the_cut_gaussian():
    rng = random.Random(0)
    values = [Gaussian(10, 10).draw(rng) for _ in range(20_000)]
    assert min(values) == 0.0
    # 10 Phi(1) + 10 phi(1)
    assert statistics.fmean(values) == pytest.approx(8.413 + 2.420, rel=0.02)


def test_a_task_difficulty_is_shared_by_its_members_and_the_limit_holds():
    workload = Workload(tokens=Constant(1000), difficulty=LogNormal(1.0, 1.0), most_tokens=1500)
    lengths = [[workload.episode(task, member).tokens[0] for member in range(4)] for task in range(50)]
    assert all(len(set(group)) == 1 for group in lengths)
    assert len({group[0] for group in lengths}) > 20
    assert max(group[0] for group in lengths) == 1500


@pytest.mark.parametrize("wanted", [0.0, 0.5, 1.0])
def test_two_members_fail_slow_with_the_correlation_asked_for(wanted):
    workload = Workload(slow_share=0.2, slow_s=100.0, slow_correlation=wanted)
    slow = [[workload.episode(task, member).latency_s > 0 for member in (0, 1)] for task in range(8000)]
    firsts, seconds = zip(*slow, strict=True)
    assert statistics.fmean(firsts) == pytest.approx(0.2, abs=0.02)
    assert correlation(firsts, seconds) == pytest.approx(wanted, abs=0.05)


def test_the_pass_rate_of_a_task_is_shared_by_its_members():
    workload = Workload(pass_rate=Beta(0.2, 0.2))
    rewards = [[workload.episode(task, member).reward for member in (0, 1)] for task in range(4000)]
    firsts, seconds = zip(*rewards, strict=True)
    # Beta(a, a) gives two members the correlation 1 / (2 a + 1).
    assert correlation(firsts, seconds) == pytest.approx(1 / 1.4, abs=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"turns": 0}, "turns is 0"),
        ({"slow_share": 1.5}, "slow_share is 1.5"),
        ({"slow_correlation": -0.1}, "slow_correlation is -0.1"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Workload(**settings)


def test_an_environment_takes_the_planned_time_and_gives_the_reward_at_the_end():
    workload = Workload(turns=3, step_s=Gaussian(10, 5), tokens=LogNormal(100, 1))
    plan = workload.episode(5, 0)
    runner = VirtualLoop()

    async def play():
        env = SimulatedEnv(SimulatedTasks(workload))
        observation, info = await env.reset(seed=5)
        observations, ends = [observation], []
        while not ends or not ends[-1][1]:
            observation, reward, terminated, truncated, _ = await env.step("-")
            assert not truncated
            observations.append(observation)
            ends.append((reward, terminated))
        return observations, ends, info

    observations, ends, info = runner.call(play())
    assert observations == [*map(str, plan.tokens), ""]
    assert ends == [(0.0, False), (0.0, False), (1.0, True)]
    assert runner.now == pytest.approx(plan.latency_s) == pytest.approx(math.fsum(plan.step_s))
    assert info == {"latency_s": plan.latency_s, "tokens": sum(plan.tokens)}
    runner.stop()


def test_environments_of_a_run_play_the_members_of_a_task_in_the_order_of_their_resets():
    workload = Workload(tokens=LogNormal(100, 1))
    tasks = SimulatedTasks(workload)
    runner = VirtualLoop()

    async def reset(env):
        return (await env.reset(seed=3))[0]

    first, second = SimulatedEnv(tasks), SimulatedEnv(tasks)
    played = [runner.call(reset(env)) for env in (second, first, second)]
    assert played == [str(workload.episode(3, member).tokens[0]) for member in range(3)]
    runner.stop()


def test_a_conversation_hands_the_length_of_every_reply_to_the_engine():
    conversation = Conversation(SimulatedTokenizer(), history="append")
    conversation.start([{"role": "system", "content": "be brief"}, {"role": "user", "content": "120"}])
    assert reply_tokens(GenerationRequest("r", conversation.prompt_ids)) == 120
    conversation.add_action([1, 1], [-0.7, -0.7], [0, 0])
    conversation.add_observation("77")
    assert reply_tokens(GenerationRequest("r", conversation.prompt_ids)) == 77
    assert conversation.prompt_ids == [0, 120, 1, 1, 77]


def test_failures_have_their_shares_and_change_nothing_else_of_an_episode():
    sound = Workload(turns=4, step_s=Gaussian(10, 5), tokens=LogNormal(100, 1), pass_rate=Beta(1, 1))
    failing = replace(sound, bad_reset_share=0.1, crash_share=0.2, hang_share=0.05)
    plans = [failing.episode(task, 0) for task in range(4000)]
    assert [replace(plan, failure=None) for plan in plans] == [sound.episode(task, 0) for task in range(4000)]
    failures = [plan.failure for plan in plans if plan.failure is not None]
    # The standard error of the largest share is 0.0063.
    assert sum(failure.turn < 0 for failure in failures) / 4000 == pytest.approx(0.1, abs=0.02)
    in_steps = [failure for failure in failures if failure.turn >= 0]
    assert sum(failure.hangs for failure in in_steps) / 4000 == pytest.approx(0.05, abs=0.015)
    assert sum(not failure.hangs for failure in in_steps) / 4000 == pytest.approx(0.2, abs=0.025)
    assert {failure.turn for failure in in_steps} == {0, 1, 2, 3}


def test_failures_of_more_than_all_episodes_are_refused():
    with pytest.raises(ValueError, match=r"bad_reset_share, crash_share and hang_share are 1\.2 together"):
        Workload(bad_reset_share=0.4, crash_share=0.4, hang_share=0.4)
    with pytest.raises(ValueError, match=r"Workload\.hang_share is -0\.1"):
        Workload(hang_share=-0.1)


def play_one(workload, *, timeout_s=1000.0):
    """(time, what ended it) of one episode."""
    runner = VirtualLoop()

    async def episode():
        env = SimulatedEnv(SimulatedTasks(workload))
        async with asyncio.timeout(timeout_s):
            await env.reset(seed=1)
            while not (await env.step("-"))[2]:
                pass

    try:
        runner.call(episode())
    except (CrashError, TimeoutError) as error:
        return runner.now, type(error)
    finally:
        runner.stop()
    return runner.now, None


def test_an_environment_fails_as_planned():
    sound = Workload(turns=3, step_s=Constant(10.0))
    assert play_one(sound) == (30.0, None)
    assert play_one(replace(sound, bad_reset_share=1.0)) == (0.0, CrashError)
    turn = replace(sound, crash_share=1.0).episode(1, 0).failure.turn
    assert play_one(replace(sound, crash_share=1.0)) == (10.0 * (turn + 1), CrashError)
    assert play_one(replace(sound, hang_share=1.0)) == (1000.0, TimeoutError)
