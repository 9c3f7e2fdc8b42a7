"""Rollouts over actors of Ray: the episodes of process workers, faults, lost nodes, a killed trainer."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentenv import BaseEnv
from agentenv.cluster import host_pool
from agentenv.cluster.connection import connect
from agentenv.testing import EchoEnv, FaultyEnv, ScriptedModel

pytestmark = [pytest.mark.ray, pytest.mark.slow]


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


def test_episodes_are_those_of_process_workers(
    two_nodes: Any, open_controller: Any, train: Any, reply: Any
) -> None:
    """Every episode of the same controller's seed: observations, sampled tokens, rewards, ends."""

    def played(worker: str) -> dict[str, Any]:
        with open_controller(
            two_nodes, DiceEnv, ScriptedModel(reply), mode="sync", worker=worker
        ) as controller:
            batches = train(controller, 3)
        assert len({item.info.pop("pid") for item in batches}) > 1
        # The processes' parents are fork servers: one of each actor.
        assert len({item.info.pop("parent") for item in batches}) == (2 if worker == "ray" else 1)
        for item in batches:
            item.duration_s, item.info["timing_s"], item.info["raylet"] = 0.0, {}, ""
        return {item.episode_id: item.to_dict() for item in batches}

    assert played("ray") == played("process")


def test_faults_are_counted_and_batches_are_full_and_fresh(
    two_nodes: Any, open_controller: Any, train: Any
) -> None:
    env_fn = functools.partial(
        FaultyEnv, EchoEnv, error=0.05, hang=0.03, exit=0.05, malformed=0.05, slow=0.05, slow_s=0.2, seed=2
    )
    with open_controller(
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
        train(controller, 10)
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


def test_groups_end_short_where_their_task_fails_and_the_end_leaves_no_process(
    two_nodes: Any, open_controller: Any, train: Any
) -> None:
    with open_controller(
        two_nodes, BrokenTaskEnv, group_size=2, max_retries=1, max_failure_rate=1.0
    ) as controller:
        batches = train(controller, 3)
        assert controller.counts()["discarded"]["step_RuntimeError"] >= 2
    assert all(item.seed % 4 for item in batches)
    deadline = time.monotonic() + 60.0
    pids = {item.info[name] for item in batches for name in ("pid", "parent")}
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids))


def test_a_run_goes_on_from_its_state(two_nodes: Any, open_controller: Any, train: Any, reply: Any) -> None:
    with open_controller(two_nodes, DiceEnv, ScriptedModel(reply)) as controller:
        first = train(controller, 2)
        state = json.loads(json.dumps(controller.state_dict()))
    with open_controller(two_nodes, DiceEnv, ScriptedModel(reply)) as controller:
        controller.load_state_dict(state)
        controller.sync_weights({}, 2)
        later = train(controller, 2, start=2)
    names = [item.episode_id for item in [*first, *later]]
    assert len(names) == len(set(names)) == 32


def test_a_lost_node_costs_its_running_episodes_and_one_that_joins_is_used(
    two_nodes: Any, monkeypatch: pytest.MonkeyPatch, open_controller: Any, train: Any, reply: Any
) -> None:
    monkeypatch.setattr(host_pool, "LOOK_S", 0.5)
    with open_controller(two_nodes, DiceEnv, ScriptedModel(reply), num_envs=16, batch_size=16) as controller:
        first = train(controller, 1)
        held = json.dumps([item.to_dict() for item in first])
        before = {item.info["raylet"] for item in first}
        assert len(before) == 2
        two_nodes.remove_node(next(iter(two_nodes.worker_nodes)), allow_graceful=False)
        step, deadline = 1, time.monotonic() + 60.0
        # Its actors outlive the node by a second or two.
        while not controller.counts()["discarded"] and time.monotonic() < deadline:
            train(controller, 1, start=step)
            step += 1
        (left,) = {item.info["raylet"] for item in train(controller, 3, start=step)[32:]}
        step += 3
        lost = controller.counts()["discarded"]
        assert set(lost) <= {"step_NodeLost", "reset_NodeLost"} and 1 <= sum(lost.values()) <= 16
        assert left in before
        two_nodes.add_node(num_cpus=4, object_store_memory=80 * 2**20)
        found = {left}
        deadline = time.monotonic() + 60.0
        while len(found) < 2 and time.monotonic() < deadline:
            found |= {item.info["raylet"] for item in train(controller, 1, start=step)}
            step += 1
        assert len(found - before) == 1
        assert controller.counts()["discarded"] == lost
    assert held == json.dumps([item.to_dict() for item in first])


def test_a_cluster_whose_room_is_taken_is_told_of_and_used_when_there_is_some(
    two_nodes: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    open_controller: Any,
    train: Any,
) -> None:
    import ray

    class Holder:
        def hold(self) -> None: ...

    monkeypatch.setattr(host_pool, "LOOK_S", 0.2)
    connect(two_nodes.address)
    holders = [ray.remote(Holder).options(num_cpus=4).remote() for _ in range(2)]
    ray.get([holder.hold.remote() for holder in holders])
    with open_controller(two_nodes, DiceEnv, ray_resources="CPU=2") as controller:
        controller.start()
        deadline = time.monotonic() + 30.0
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "no node of the Ray cluster has room so far for an actor with CPU=2" in caplog.text
        for holder in holders:
            ray.kill(holder)
        train(controller, 1)
    assert caplog.text.count("has room so far") == 1


def test_a_run_that_lost_every_node_goes_on_with_the_next_one(
    two_nodes: Any, open_controller: Any, train: Any, reply: Any
) -> None:
    with open_controller(two_nodes, DiceEnv, ScriptedModel(reply)) as controller:
        train(controller, 1)
        for node in list(two_nodes.worker_nodes):
            two_nodes.remove_node(node, allow_graceful=False)
        controller.start()
        time.sleep(1.0)
        two_nodes.add_node(num_cpus=4, object_store_memory=80 * 2**20)
        train(controller, 3, start=1)
        counts = controller.counts()
    assert counts["consumed"] == 32
    assert sum(counts["discarded"].values()) <= 8


def test_nothing_outlives_a_killed_trainer(two_nodes: Any, tmp_path: Path, train: Any) -> None:
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
        deadline = time.monotonic() + 60.0
        while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(psutil.pid_exists(pid) for pid in pids)
