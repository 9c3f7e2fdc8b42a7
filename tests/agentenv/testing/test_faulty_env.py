"""Faults come as often as they are told to, where they are told to, and nowhere else."""

import asyncio
import collections
import functools
import os
import threading
import time
from typing import Any

import pytest

import agentenv
from agentenv.errors import EnvError, EpisodeTimeoutError, UsageError
from agentenv.rollout.workers import make_worker, worker_kind
from agentenv.rollout.workers.contract import checked_reset, checked_step
from agentenv.testing import EchoEnv, Fault, FaultyEnv, check_env


def _soon(seconds: float = 20.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def test_without_faults_it_keeps_the_contract_of_environments() -> None:
    check_env(FaultyEnv(EchoEnv()), actions=["wrong", "wrong again"])
    check_env(FaultyEnv(functools.partial(agentenv.make, "Echo-v0")))


def test_it_wants_a_process_and_hands_the_advised_turns_on() -> None:
    assert worker_kind(functools.partial(FaultyEnv, EchoEnv, error=0.5)) == "process"
    assert FaultyEnv(EchoEnv(max_turns=5)).max_turns == 5


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"error": 1.5}, "error must be between 0 and 1, got 1.5"),
        ({"hang": float("nan")}, "hang must be between"),
        ({"at_reset": -0.1}, "at_reset must be between"),
        ({"error": 0.6, "hang": 0.6}, "at most 1, got 1.2"),
        ({"slow_s": -1.0}, "slow_s must be 0 or more"),
        ({"max_turn": 0}, "max_turn must be 1 or more"),
        ({"exit": 0.1}, "exit is 0.1, which would end the whole rollout"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        FaultyEnv(EchoEnv(), **arguments)


def test_each_kind_comes_at_its_rate_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTENV_WORKER", "w")
    rates = {"slow": 0.1, "hang": 0.05, "error": 0.15, "exit": 0.02, "malformed": 0.08}
    env = FaultyEnv(EchoEnv(), **rates, at_reset=0.25, max_turn=3, seed=4)
    draws = [env._draw(seed) for seed in range(20_000)]
    kinds = collections.Counter(draw.kind for draw in draws if draw)
    for kind, rate in rates.items():
        # Five standard deviations of a binomial share.
        assert kinds[kind] / 20_000 == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 20_000) ** 0.5)
    turns = collections.Counter(draw.turn for draw in draws if draw)
    assert set(turns) == {0, 1, 2, 3}
    assert turns[0] / turns.total() == pytest.approx(0.25, abs=0.03)
    assert turns[3] / turns.total() == pytest.approx(0.25, abs=0.03)


def test_the_same_seeds_and_instance_give_the_same_faults_and_a_repeated_task_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def faults(worker: str, seed: int) -> list[Fault | None]:
        monkeypatch.setenv("AGENTENV_WORKER", worker)
        env = FaultyEnv(EchoEnv(), slow=0.5, slow_s=0.0, seed=seed)
        monkeypatch.setattr(env, "_instance", worker)
        drawn = []
        for _ in range(30):
            env.reset(seed=7)
            drawn.append(env.fault)
        return drawn

    first = faults("w1", 0)
    assert first == faults("w1", 0)
    assert first != faults("w1", 1) and first != faults("w2", 0)
    assert None in first and len(set(first)) > 1


def test_two_instances_in_one_process_differ() -> None:
    drawn = []
    for _ in range(2):
        env = FaultyEnv(EchoEnv(), error=0.5)
        drawn.append([env._draw(seed) is None for seed in range(50)])
    assert drawn[0] != drawn[1]


def test_an_error_comes_at_its_turn_and_not_before() -> None:
    env = FaultyEnv(EchoEnv(max_turns=9), error=1.0, at_reset=0.0, max_turn=3)
    for seed in range(20):
        env.reset(seed=seed)
        assert env.fault is not None
        for _ in range(env.fault.turn - 1):
            env.step("x")
        with pytest.raises(RuntimeError, match=f"at turn {env.fault.turn}$"):
            env.step("x")


def test_malformed_returns_are_all_found_by_the_check_of_rollouts() -> None:
    at_reset = FaultyEnv(EchoEnv(), malformed=1.0, at_reset=1.0)
    seen = set()
    for seed in range(50):
        result = at_reset.reset(seed=seed)
        seen.add(repr(result))
        with pytest.raises(EnvError):
            checked_reset(at_reset, result)
    assert len(seen) == 5
    at_step = FaultyEnv(EchoEnv(), malformed=1.0, at_reset=0.0)
    seen = set()
    for seed in range(50):
        at_step.reset(seed=seed)
        stepped = at_step.step("x")
        seen.add(repr(stepped))
        with pytest.raises(EnvError):
            checked_step(at_step, stepped)
    assert len(seen) == 7


def test_a_slow_call_is_late_and_right() -> None:
    env = FaultyEnv(EchoEnv(), slow=1.0, slow_s=0.05, at_reset=1.0)
    before = time.monotonic()
    assert env.reset(seed=1) == EchoEnv().reset(seed=1)
    assert time.monotonic() - before >= 0.05


def test_a_hang_does_not_return() -> None:
    env = FaultyEnv(EchoEnv(), hang=1.0, at_reset=1.0)
    thread = threading.Thread(target=env.reset, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()


@pytest.mark.parametrize(("kind", "match"), [("exit", "died: exit code 3"), ("hang", "before its deadline")])
def test_in_a_process_worker_exits_and_hangs_are_ended(kind: str, match: str) -> None:
    async def play() -> None:
        env_fn = functools.partial(FaultyEnv, EchoEnv, **{kind: 1.0}, at_reset=0.0)
        worker = make_worker("process", env_fn, "faulty")
        await worker.reset(1, _soon())
        with pytest.raises(EnvError, match=match) as caught:
            await worker.step("x", _soon(0.5 if kind == "hang" else 20.0))
        assert isinstance(caught.value, EpisodeTimeoutError) == (kind == "hang")
        worker.end()
        assert await worker.join(_soon())

    asyncio.run(play())
    assert "AGENTENV_WORKER" not in os.environ
