"""Environments on the nodes of a Ray cluster: the contract of workers, the invariants of rollouts, lost nodes."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentenv
from agentenv import AsyncEnv, BaseEnv
from agentenv.cluster import connection, host_pool
from agentenv.cluster.connection import NodeFacts, check_facts, node_facts
from agentenv.cluster.host_pool import end_all
from agentenv.cluster.placement import Placement, parse_resources
from agentenv.errors import EnvError, EpisodeTimeoutError, MissingExtraError, SandboxError, UsageError
from agentenv.inference import GenerationRequest, LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.rollout.workers import EnvWorker, make_worker
from agentenv.testing import ByteTokenizer, EchoEnv, FaultyEnv, ScriptedModel
from agentenv.trajectory import Trajectory

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


class DiceEnv(BaseEnv):
    """Observations and rewards follow from the seed and the actions."""

    worker = "process"

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.random, self.turn = random.Random(seed), 0
        where = {"pid": os.getpid(), "parent": os.getppid(), "raylet": os.environ.get("RAY_RAYLET_PID", "")}
        return f"rolled {self.random.randrange(6)}", where

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        time.sleep(0.1 * self.random.random())
        reward = self.random.random() + len(action)
        return f"rolled {self.random.randrange(6)}", reward, self.turn == 3, False, {}


def _placement(nodes: Any, **changes: Any) -> Placement:
    return replace(Placement(nodes.address, 8, 4, (("CPU", 1.0),)), **changes)


# -- one worker ------------------------------------------------------------------------------------------------------


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
                assert await worker.join(_in(20.0))
                assert not worker.is_running
                end_all()

        asyncio.run(work())

    return run


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def test_an_environment_is_made_at_the_first_reset_and_used_elsewhere(with_worker: Any) -> None:
    async def scenario(worker: EnvWorker) -> None:
        assert worker.max_turns is None
        observation, info = await worker.reset(5, _in(30.0))
        assert (observation, info["seed"], worker.max_turns) == ("hello", 5, 7)
        assert info["pid"] != os.getpid()
        assert await worker.step("go", _in(5.0)) == ("did go", 1.0, False, False, {"pid": info["pid"]})
        assert (await worker.reset(6, _in(5.0)))[1] == {"pid": info["pid"], "seed": 6}

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
        await worker.reset(0, _in(30.0))
        with pytest.raises(error, match=message) as caught:
            await worker.step(action, _in(10.0))
        assert getattr(caught.value, "origin", None) == origin

    with_worker(scenario)


def test_a_hanging_step_ends_at_its_deadline_and_its_process_is_killed(with_worker: Any) -> None:
    async def scenario(worker: EnvWorker) -> None:
        _, info = await worker.reset(0, _in(30.0))
        began = time.monotonic()
        with pytest.raises(EpisodeTimeoutError, match=r"step of .*worker.* did not return"):
            await worker.step("hang", _in(0.5))
        assert 0.4 < time.monotonic() - began < 2.0
        with pytest.raises((EpisodeTimeoutError, EnvError)):
            await worker.step("go", _in(1.0))
        worker.end()
        assert await worker.join(_in(20.0))
        assert not psutil.pid_exists(info["pid"])

    with_worker(scenario)


def test_a_call_after_a_cancelled_one_waits_for_it(with_worker: Any) -> None:
    async def scenario(worker: EnvWorker) -> None:
        await worker.reset(0, _in(30.0))
        slow = asyncio.create_task(worker.step("slow", _in(10.0)))
        await asyncio.sleep(0.05)
        slow.cancel()
        began = time.monotonic()
        await worker.settle()
        assert (await worker.step("go", _in(10.0)))[0] == "did go"
        assert time.monotonic() - began > 0.1

    with_worker(scenario)


def test_a_step_needs_a_reset_and_an_ended_worker_refuses(with_worker: Any) -> None:
    async def scenario(worker: EnvWorker) -> None:
        with pytest.raises(EnvError, match="step before reset"):
            await worker.step("go", _in(1.0))
        await worker.reset(0, _in(30.0))
        worker.end()
        worker.end()
        with pytest.raises(EnvError, match="has ended"):
            await worker.reset(0, _in(1.0))

    with_worker(scenario)


def test_coroutines_run_in_the_actor_and_their_results_become_plain_data(two_nodes: Any) -> None:
    async def scenario() -> None:
        worker = make_worker("ray", InlineEnv, "inline", _placement(two_nodes))
        _, info = await worker.reset(0, _in(30.0))
        assert info["pid"] != os.getpid() and info["odd"] == "{1, 2}"
        assert await worker.step("go", _in(5.0)) == ("seen", 0.5, True, False, {})
        worker.end()
        assert await worker.join(_in(10.0))
        end_all()

    asyncio.run(scenario())


# -- runs ------------------------------------------------------------------------------------------------------------


@contextmanager
def _controller(
    nodes: Any, env_fn: Callable[[], BaseEnv], model: Any = None, **changes: Any
) -> Iterator[AsyncController]:
    options: dict[str, Any] = {
        "batch_size": 8,
        "num_envs": 8,
        "worker": "ray",
        "ray_address": nodes.address,
        "ray_envs_per_actor": 4,
        "reset_timeout_s": 60.0,
        "step_timeout_s": 20.0,
        "batch_timeout_s": 90.0,
        "shutdown_timeout_s": 20.0,
        "max_tokens_per_turn": 8,
        "max_tokens_per_episode": 512,
        **changes,
    }
    proxy = LLMProxy([model or ScriptedModel(["a"], repeat=True)])
    with AsyncController(env_fn, proxy, ByteTokenizer(), RolloutConfig(**options), seed=3) as controller:
        yield controller
    counts = controller.counts()
    assert counts["running"] == 0
    assert counts["produced"] == counts["consumed"] + counts["buffered"] + sum(counts["discarded"].values())


def _train(controller: AsyncController, steps: int, *, start: int = 0) -> list[Trajectory]:
    batches = []
    for step in range(start, start + steps):
        batch = controller.get_batch(step)
        assert len(batch) == controller.config.batch_size
        assert all(trajectory.start_version >= step - controller.config.alpha for trajectory in batch)
        batches += batch
        controller.sync_weights({}, step + 1)
    return batches


def _reply(request: GenerationRequest) -> str:
    return chr(ord("a") + (request.seed or 0) % 26) * (1 + (request.seed or 0) % 5)


def test_episodes_are_those_of_process_workers(two_nodes: Any) -> None:
    """Every episode of the same controller's seed: observations, sampled tokens, rewards, ends."""

    def played(worker: str) -> dict[str, Any]:
        with _controller(two_nodes, DiceEnv, ScriptedModel(_reply), mode="sync", worker=worker) as controller:
            batches = _train(controller, 3)
        assert len({item.info.pop("pid") for item in batches}) > 1
        # The processes' parents are fork servers: one of each actor.
        assert len({item.info.pop("parent") for item in batches}) == (2 if worker == "ray" else 1)
        for item in batches:
            item.duration_s, item.info["timing_s"], item.info["raylet"] = 0.0, {}, ""
        return {item.episode_id: item.to_dict() for item in batches}

    assert played("ray") == played("process")


def test_faults_are_counted_and_batches_are_full_and_fresh(two_nodes: Any) -> None:
    env_fn = functools.partial(
        FaultyEnv, EchoEnv, error=0.05, hang=0.03, exit=0.05, malformed=0.05, slow=0.05, slow_s=0.2, seed=2
    )
    with _controller(
        two_nodes,
        env_fn,
        group_size=2,
        max_retries=20,
        step_timeout_s=1.0,
        reset_timeout_s=10.0,
        redundant_groups=1,
        num_envs=12,
        max_failure_rate=1.0,
    ) as controller:
        _train(controller, 10)
        discarded = controller.counts()["discarded"]
    assert {"step_RuntimeError", "step_WorkerDied"} <= discarded.keys()
    assert "step_timeout" in discarded or controller.metrics()["workers_replaced"] > 0


class BrokenTaskEnv(DiceEnv):
    """One task in four can't be played."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.broken:
            raise RuntimeError("this task is broken")
        return super().step(action)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.broken = (seed or 0) % 4 == 0
        return super().reset(seed=seed)


def test_groups_end_short_where_their_task_fails_and_the_end_leaves_no_process(two_nodes: Any) -> None:
    with _controller(
        two_nodes, BrokenTaskEnv, group_size=2, max_retries=1, max_failure_rate=1.0
    ) as controller:
        batches = _train(controller, 3)
        assert controller.counts()["discarded"]["step_RuntimeError"] >= 2
    assert all(item.seed % 4 for item in batches)
    deadline = time.monotonic() + 10.0
    pids = {item.info[name] for item in batches for name in ("pid", "parent")}
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))


def test_a_run_goes_on_from_its_state(two_nodes: Any) -> None:
    with _controller(two_nodes, DiceEnv, ScriptedModel(_reply)) as controller:
        first = _train(controller, 2)
        state = json.loads(json.dumps(controller.state_dict()))
    with _controller(two_nodes, DiceEnv, ScriptedModel(_reply)) as controller:
        controller.load_state_dict(state)
        controller.sync_weights({}, 2)
        later = _train(controller, 2, start=2)
    names = [item.episode_id for item in [*first, *later]]
    assert len(names) == len(set(names)) == 32


def test_a_lost_node_costs_its_running_episodes_and_one_that_joins_is_used(
    two_nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "LOOK_S", 0.5)
    with _controller(two_nodes, DiceEnv, ScriptedModel(_reply), num_envs=16, batch_size=16) as controller:
        first = _train(controller, 1)
        held = json.dumps([item.to_dict() for item in first])
        before = {item.info["raylet"] for item in first}
        assert len(before) == 2
        two_nodes.remove_node(next(iter(two_nodes.worker_nodes)), allow_graceful=False)
        step, deadline = 1, time.monotonic() + 60.0
        # Its actors outlive the node by a second or two.
        while not controller.counts()["discarded"] and time.monotonic() < deadline:
            _train(controller, 1, start=step)
            step += 1
        (left,) = {item.info["raylet"] for item in _train(controller, 3, start=step)[32:]}
        step += 3
        lost = controller.counts()["discarded"]
        assert set(lost) <= {"step_NodeLost", "reset_NodeLost"} and 1 <= sum(lost.values()) <= 16
        assert left in before
        two_nodes.add_node(num_cpus=4, object_store_memory=80 * 2**20)
        found = {left}
        deadline = time.monotonic() + 60.0
        while len(found) < 2 and time.monotonic() < deadline:
            found |= {item.info["raylet"] for item in _train(controller, 1, start=step)}
            step += 1
        assert len(found - before) == 1
        assert controller.counts()["discarded"] == lost
    assert held == json.dumps([item.to_dict() for item in first])


def test_a_run_that_lost_every_node_goes_on_with_the_next_one(two_nodes: Any) -> None:
    with _controller(two_nodes, DiceEnv, ScriptedModel(_reply)) as controller:
        _train(controller, 1)
        for node in list(two_nodes.worker_nodes):
            two_nodes.remove_node(node, allow_graceful=False)
        controller.start()
        time.sleep(1.0)
        two_nodes.add_node(num_cpus=4, object_store_memory=80 * 2**20)
        _train(controller, 3, start=1)
        counts = controller.counts()
    assert counts["consumed"] == 32
    assert sum(counts["discarded"].values()) <= 8


def test_nothing_outlives_a_killed_trainer(two_nodes: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        from agentenv import BaseEnv
        from agentenv.inference import LLMProxy
        from agentenv.rollout import AsyncController, RolloutConfig
        from agentenv.testing import ByteTokenizer, ScriptedModel

        class Env(BaseEnv):
            worker = "process"
            def reset(self, *, seed=None, options=None):
                return "hello", {"pid": os.getpid(), "parent": os.getppid()}
            def step(self, action):
                return "", 1.0, True, False, {}

        if __name__ == "__main__":
            config = RolloutConfig(batch_size=4, num_envs=4, worker="ray", ray_address=sys.argv[1])
            proxy = LLMProxy([ScriptedModel(["a"], repeat=True)])
            with AsyncController(Env, proxy, ByteTokenizer(), config) as controller:
                for step in range(10**6):
                    batch = controller.get_batch(step)
                    controller.sync_weights({}, step + 1)
                    if step == 3:
                        pids = {item.info[name] for item in batch for name in ("pid", "parent")}
                        with open(sys.argv[2] + ".part", "w") as file:
                            file.write(" ".join(map(str, pids)))
                        os.rename(sys.argv[2] + ".part", sys.argv[2])
        """)
    )
    for _ in range(2):  # the second time after the first one's death
        told = tmp_path / "pids"
        with subprocess.Popen([sys.executable, str(script), two_nodes.address, str(told)]) as trainer:
            try:
                deadline = time.monotonic() + 120.0
                while not told.exists() and time.monotonic() < deadline:
                    time.sleep(0.1)
                pids = [int(pid) for pid in told.read_text().split()]
                # Not all: environments move to the actor that came up last.
                assert any(map(psutil.pid_exists, pids))
            finally:
                trainer.send_signal(signal.SIGKILL)
        told.unlink()
        deadline = time.monotonic() + 20.0
        while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(psutil.pid_exists(pid) for pid in pids)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ray_resources": "CPU=1,unicorn=1"}, r"needs CPU=1, unicorn=1 on one node, .*has CPU=4"),
        ({"ray_resources": "CPU=9"}, r"needs CPU=9 on one node"),
        ({"ray_resources": "docker"}, r"ray_resources='docker': 'docker' must be like docker=1"),
        ({"ray_resources": "docker=-1"}, r"'docker=-1' must be like docker=1"),
        ({"ray_envs_per_actor": 0}, r"ray_envs_per_actor is 0, must be positive"),
    ],
)
def test_what_no_node_can_do_is_refused(two_nodes: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), _controller(two_nodes, DiceEnv, **changes):
        pass


def test_an_environment_that_cannot_be_pickled_is_named(two_nodes: Any) -> None:
    with (
        pytest.raises(UsageError, match=r"lambda.*can't be pickled.*register the environment"),
        _controller(two_nodes, lambda: DiceEnv()),
    ):
        pass


def test_bad_input_of_an_environment_on_another_node_stops_the_run(two_nodes: Any) -> None:
    env_fn = functools.partial(agentenv.make, "NoSuch-v0")
    with pytest.raises(UsageError, match="NoSuch-v0"), _controller(two_nodes, env_fn) as controller:
        controller.get_batch(0)


def test_a_node_that_cannot_import_agentenv_is_named_with_what_to_install(
    two_nodes: Any, tmp_path: Path
) -> None:
    """Another agentenv comes first on that node's path; the run's script and folder are elsewhere."""
    (tmp_path / "other" / "agentenv").mkdir(parents=True)
    (tmp_path / "other" / "agentenv" / "__init__.py").touch()
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from agentenv.errors import UsageError
        from agentenv.inference import LLMProxy
        from agentenv.rollout import AsyncController, RolloutConfig
        from agentenv.testing import ByteTokenizer, EchoEnv, ScriptedModel

        config = RolloutConfig(
            batch_size=1, num_envs=1, worker="ray", ray_address=sys.argv[1], ray_resources="bare=1"
        )
        proxy = LLMProxy([ScriptedModel(["a"], repeat=True)])
        with AsyncController(EchoEnv, proxy, ByteTokenizer(), config) as controller:
            try:
                controller.get_batch(0)
            except UsageError as error:
                sys.stdout.write(str(error))
        """)
    )
    node = two_nodes.add_node(
        num_cpus=1,
        object_store_memory=80 * 2**20,
        resources={"bare": 1},
        env_vars={"PYTHONPATH": str(tmp_path / "other")},
    )
    try:
        done = subprocess.run(
            [sys.executable, str(script), two_nodes.address],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=120.0,
            check=True,
        )
    finally:
        two_nodes.remove_node(node, allow_graceful=False)
    named = f"node {node.node_ip_address} of the Ray cluster can't import what an actor needs"
    assert f"{named}: No module named 'agentenv" in done.stdout
    assert "pip install 'agentenv-rl[ray]'" in done.stdout


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:9", "ray_address='127.0.0.1:9': nothing answers there"),
        ("nowhere.invalid:6379", "nothing answers there"),
        ("127.0.0.1:port", "must be HOST:PORT"),
        (":6379", "must be HOST:PORT"),
    ],
)
def test_a_cluster_that_is_not_there_is_said_at_once(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    began = time.monotonic()
    with pytest.raises(UsageError, match=message):
        connection.connect(address)
    assert time.monotonic() - began < 6.0


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"agentenv-rl\[ray\]"):
        connection.connect("auto")


def _facts(**changes: Any) -> NodeFacts:
    now = time.time()
    facts = NodeFacts("a1b2", "node-7", sys.version.split()[0], connection._version(), now)
    return replace(facts, **changes)


@pytest.mark.parametrize("changes", [{"python": "3.9.1"}, {"agentenv": "0.0.1"}])
def test_another_version_on_a_node_is_named_with_both(changes: dict[str, str]) -> None:
    with pytest.raises(
        UsageError, match=r"node node-7 .* has Python .* and agentenv .*: they must be the same"
    ) as error:
        check_facts(_facts(**changes), asked_s=time.time(), answered_s=time.time())
    assert next(iter(changes.values())) in str(error.value)


def test_a_clock_that_differs_is_warned_of_and_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    now = time.time()
    check_facts(_facts(time_s=now + 1.0), asked_s=now - 5.0, answered_s=now)
    assert not caplog.records
    check_facts(_facts(time_s=now - 60.0), asked_s=now - 1.0, answered_s=now)
    assert "the clock of node node-7 differs from this machine's by at least 59.0 s" in caplog.text


def test_facts_are_those_of_the_node(two_nodes: Any) -> None:
    import ray

    connection.connect(two_nodes.address)
    facts = ray.get(ray.remote(node_facts).options(num_cpus=1).remote())
    check_facts(facts, asked_s=time.time() - 60.0, answered_s=time.time())
    assert facts.node_id in {node["NodeID"] for node in ray.nodes()}


def test_resources_are_read_from_their_text() -> None:
    assert parse_resources("CPU=2, docker=0.5") == {"CPU": 2.0, "docker": 0.5}
    assert parse_resources("") == {}
