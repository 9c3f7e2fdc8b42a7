"""One environment in an actor of Ray: what a worker promises, as one in a process does."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest

from agentenv import AsyncEnv, BaseEnv
from agentenv.cluster.host_pool import end_all
from agentenv.cluster.placement import Placement
from agentenv.errors import EnvError, EpisodeTimeoutError, SandboxError, UsageError
from agentenv.rollout.workers import EnvWorker, make_worker

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class Env(BaseEnv):
    """Does what an action says."""

    worker = "process"
    max_turns = 7

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        if seed == 13:
            raise UsageError("seed 13")
        return "hello", {"pid": os.getpid(), "seed": seed}

    def step(self, action: str) -> Any:
        if action == "raise":
            raise ZeroDivisionError("1/0")
        if action == "typed":
            raise SandboxError("no disk")
        if action == "hang":
            time.sleep(1000.0)
        if action == "slow":
            time.sleep(0.3)
        if action == "die":
            os._exit(3)
        if action == "malformed":
            return "no tuple"
        return f"did {action}", 1.0, False, False, {"pid": os.getpid()}


class InlineEnv(AsyncEnv):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        return "hello", {"pid": os.getpid(), "odd": {1, 2}}

    async def step(self, action: str) -> Any:  # type: ignore[override]
        await asyncio.sleep(0.0)
        return "seen", 0.5, True, False, {}


def _placement(nodes: Any, **changes: Any) -> Placement:
    return replace(Placement(nodes.address, 8, 4, (("CPU", 1.0),)), **changes)


@pytest.fixture(params=["process", "ray"])
def with_worker(request: pytest.FixtureRequest, two_nodes: Any) -> Callable[..., None]:
    """Runs a scenario with a worker of each kind, and ends it."""

    def run(scenario: Callable[[EnvWorker], Awaitable[None]], env_fn: Any = Env) -> None:
        async def work() -> None:
            worker = make_worker(request.param, env_fn, "worker", _placement(two_nodes))
            try:
                await scenario(worker)
            finally:
                worker.end()
                assert await worker.join(_in(60.0))
                assert not worker.is_running
                end_all()

        asyncio.run(work())

    return run


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def test_an_environment_is_made_at_the_first_reset_and_used_elsewhere(with_worker: Any) -> None:
    async def scenario(worker: EnvWorker) -> None:
        assert worker.max_turns is None
        observation, info = await worker.reset(5, _in(120.0))
        assert (observation, info["seed"], worker.max_turns) == ("hello", 5, 7)
        assert info["pid"] != os.getpid()
        assert await worker.step("go", _in(60.0)) == ("did go", 1.0, False, False, {"pid": info["pid"]})
        assert (await worker.reset(6, _in(60.0)))[1] == {"pid": info["pid"], "seed": 6}

    with_worker(scenario)


@pytest.mark.parametrize(
    ("action", "error", "origin", "message"),
    [
        ("raise", EnvError, "ZeroDivisionError", "Env.step raised ZeroDivisionError: 1/0"),
        ("typed", SandboxError, None, "no disk"),
        ("malformed", EnvError, None, "returned 'no tuple'"),
        ("die", EnvError, "WorkerDied", "died: exit code 3"),
    ],
)
def test_what_goes_wrong_in_a_step_arrives_as_what_it_is(
    with_worker: Any, action: str, error: type[Exception], origin: str | None, message: str
) -> None:
    async def scenario(worker: EnvWorker) -> None:
        await worker.reset(0, _in(120.0))
        with pytest.raises(error, match=message) as caught:
            await worker.step(action, _in(60.0))
        assert getattr(caught.value, "origin", None) == origin

    with_worker(scenario)


def test_a_hanging_step_ends_at_its_deadline_and_its_process_is_killed(with_worker: Any) -> None:
    async def scenario(worker: EnvWorker) -> None:
        _, info = await worker.reset(0, _in(120.0))
        began = time.monotonic()
        with pytest.raises(EpisodeTimeoutError, match=r"step of .*worker.* did not return"):
            await worker.step("hang", _in(0.5))
        assert 0.4 < time.monotonic() - began < 60.0
        with pytest.raises((EpisodeTimeoutError, EnvError)):
            await worker.step("go", _in(1.0))
        worker.end()
        assert await worker.join(_in(60.0))
        assert not psutil.pid_exists(info["pid"])

    with_worker(scenario)


def test_a_call_after_a_cancelled_one_waits_for_it(with_worker: Any) -> None:
    async def scenario(worker: EnvWorker) -> None:
        await worker.reset(0, _in(120.0))
        began = time.monotonic()
        slow = asyncio.create_task(worker.step("slow", _in(60.0)))
        await asyncio.sleep(0.05)
        slow.cancel()
        await worker.settle()
        assert (await worker.step("go", _in(60.0)))[0] == "did go"
        assert time.monotonic() - began > 0.29  # the slow step takes 0.3 s

    with_worker(scenario)


def test_a_step_needs_a_reset_and_an_ended_worker_refuses(with_worker: Any) -> None:
    async def scenario(worker: EnvWorker) -> None:
        with pytest.raises(EnvError, match="step before reset"):
            await worker.step("go", _in(1.0))
        await worker.reset(0, _in(120.0))
        worker.end()
        worker.end()
        with pytest.raises(EnvError, match="has ended"):
            await worker.reset(0, _in(1.0))

    with_worker(scenario)


def test_coroutines_run_in_the_actor_and_their_results_become_plain_data(two_nodes: Any) -> None:
    async def scenario() -> None:
        worker = make_worker("ray", InlineEnv, "inline", _placement(two_nodes))
        _, info = await worker.reset(0, _in(120.0))
        assert info["pid"] != os.getpid() and info["odd"] == "{1, 2}"
        assert await worker.step("go", _in(60.0)) == ("seen", 0.5, True, False, {})
        worker.end()
        assert await worker.join(_in(60.0))
        end_all()

    asyncio.run(scenario())
