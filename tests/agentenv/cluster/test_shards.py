"""Slots in actors: the same episodes as in one loop, whatever is lost or cancelled, and prompts past the controller."""

from __future__ import annotations

import functools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentenv import BaseEnv
from agentenv.errors import UsageError
from agentenv.inference import GenerationRequest, LLMProxy
from agentenv.inference.vllm.server import ServerBackend
from agentenv.rollout import AsyncController
from agentenv.testing import EchoEnv, FaultyEnv, ScriptedModel

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class DiceEnv(BaseEnv):
    """Observations and rewards are the task's: they follow from the seed and the actions."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.random, self.turn = random.Random(seed), 0
        return f"rolled {self.random.randrange(6)}", {"process": os.getpid()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        reward = self.random.random() + len(action)
        return f"rolled {self.random.randrange(6)}", reward, self.turn == 3, False, {}


class SlowEnv(DiceEnv):
    """Some tasks take longer than others."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(0.3 * self.random.random())
        return super().step(action)


@pytest.fixture
def over_shards(open_controller: Any) -> Callable[..., AbstractContextManager[AsyncController]]:
    """Opens a controller with two shards."""
    return functools.partial(open_controller, ray_shards=2)


def test_shards_play_the_same_episodes_as_processes(
    nodes: Any, over_shards: Any, train: Any, reply: Any
) -> None:
    def played(**settings: Any) -> dict[str, Any]:
        with over_shards(
            nodes, DiceEnv, LLMProxy([ScriptedModel(reply)]), mode="sync", **settings
        ) as controller:
            batches = train(controller, 3)
        assert len({trajectory.info.pop("process") for trajectory in batches}) > 1
        for trajectory in batches:
            trajectory.duration_s = 0.0
            trajectory.info["timing_s"] = {}
        return {trajectory.episode_id: trajectory.to_dict() for trajectory in batches}

    in_processes = played(worker="process", ray_shards=0)
    assert played() == in_processes
    assert len(in_processes) == 24


def test_faults_end_their_episodes_and_nothing_else(nodes: Any, over_shards: Any, train: Any) -> None:
    env_fn = functools.partial(FaultyEnv, EchoEnv, error=0.1, exit=0.05, malformed=0.05, seed=2)
    with over_shards(
        nodes, env_fn, LLMProxy([ScriptedModel(["a"], repeat=True)]), group_size=2, max_retries=20
    ) as controller:
        train(controller, 8)
        discarded = controller.counts()["discarded"]
        assert controller.metrics()["workers_replaced"] > 0
    assert {"step_RuntimeError", "step_WorkerDied"} <= discarded.keys()


def test_surplus_episodes_are_cancelled_with_their_tokens_counted_and_their_slots_play_on(
    nodes: Any, over_shards: Any, train: Any
) -> None:
    with over_shards(
        nodes, SlowEnv, LLMProxy([ScriptedModel(["abc"] * 3, token_s=0.01)]), redundant_groups=4, num_envs=12
    ) as controller:
        batches = train(controller, 5)
        counts = controller.counts()
    assert counts["discarded"]["surplus"] > 0
    assert set(counts["discarded"]) <= {"surplus", "stale"}
    assert all(trajectory.turns == 3 for trajectory in batches)
    assert controller.state_dict()["buffer"]["discarded_tokens"]["surplus"] > 0


def test_an_evaluation_is_played_in_the_shards_beside_training(
    nodes: Any, over_shards: Any, train: Any
) -> None:
    proxy = LLMProxy([ScriptedModel(["a"] * 3)])
    with over_shards(nodes, SlowEnv, proxy) as controller:
        controller.start()
        results = controller.evaluate(DiceEnv, list(range(6)), greedy=True)
        train(controller, 1)
    assert [trajectory.seed for trajectory in results] == list(range(6))
    assert all(trajectory.terminated and trajectory.turns == 3 for trajectory in results)
    assert os.getpid() not in {trajectory.info["process"] for trajectory in results}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "batch"}, "mode is 'batch' with ray_shards 2"),
        ({"worker": "process"}, "ray_shards is 2 with worker 'process'"),
        ({"num_envs": 1, "batch_size": 1}, "ray_shards is 2, num_envs 1"),
        (
            {"ray_resources": "CPU=64"},
            r"needs CPU=64 on one node, which no node of the Ray cluster has: .*CPU=4",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_before_an_episode(
    nodes: Any, settings: dict[str, Any], message: str, over_shards: Any
) -> None:
    with (
        pytest.raises(ValueError, match=message),
        over_shards(nodes, DiceEnv, LLMProxy([ScriptedModel(["a"])]), **settings),
    ):
        pass


def test_an_environment_that_cannot_be_pickled_is_named_with_what_to_do(nodes: Any, over_shards: Any) -> None:
    with (
        pytest.raises(UsageError, match=r"lambda.*can't be pickled.*register the environment"),
        over_shards(nodes, lambda: DiceEnv(), LLMProxy([ScriptedModel(["a"])])),
    ):
        pass


@pytest.fixture(scope="module")
def fakes(load_program: Callable[[str], ModuleType]) -> ModuleType:
    return load_program("tests/agentenv/inference/conftest.py")


def test_prompts_go_to_servers_from_the_shards_and_each_token_is_of_its_version(
    nodes: Any,
    fakes: ModuleType,
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    over_shards: Any,
) -> None:
    small = fakes.make_small_model(repository, tmp_path)
    servers = [fakes.FakeVLLM(small) for _ in range(2)]
    asked = Counter[str]()
    complete = ServerBackend._completion

    async def counted(backend: ServerBackend, body: Any) -> Any:
        asked["probe" if "prompt_logprobs" in body else "prompt"] += 1
        return await complete(backend, body)

    monkeypatch.setattr(ServerBackend, "_completion", counted)  # in this process, not in the shards
    versions = [small.weights, small.other_weights(1), small.other_weights(2)]
    proxy = LLMProxy([fakes.connect_engine(small, server.url) for server in servers])
    asked.clear()  # connecting asks for a few tokens
    try:
        with over_shards(
            nodes,
            DiceEnv,
            proxy,
            tokenizer=small.policy.tokenizer,
            max_tokens_per_turn=6,
            max_tokens_per_episode=400,
        ) as controller:
            batches = []
            for step in range(3):
                batches += controller.get_batch(step)
                if step < 2:
                    controller.sync_weights(versions[step + 1], step + 1)
    finally:
        for server in servers:
            server.close()
    assert asked["probe"] > 0 and not asked["prompt"]
    assert all(server.calls.count("/v1/completions") > 10 for server in servers)
    assert {version for item in batches for version in item.policy_versions} >= {-1, 0, 1}
    for trajectory in batches:
        expected = [
            small.logprobs(weights, trajectory.prompt_ids, trajectory.completion_ids) for weights in versions
        ]
        for at, acted in enumerate(trajectory.action_mask):
            if acted:
                wanted = expected[trajectory.policy_versions[at]][at]
                assert trajectory.rollout_logprobs[at] == pytest.approx(wanted, abs=1e-4)


class _Elsewhere(LLMProxy):
    @property
    def servers(self) -> list[str]:
        return ["http://127.0.0.1:9"]


def test_prompts_take_the_way_over_the_controller_where_a_server_is_not_reached(
    nodes: Any, over_shards: Any, train: Any
) -> None:
    lengths: set[int] = set()

    def measured(request: GenerationRequest) -> str:
        lengths.add(len(list(request.prompt_ids)))  # raises where the ids are elsewhere
        return "a"

    with over_shards(nodes, DiceEnv, _Elsewhere([ScriptedModel(measured)])) as controller:
        train(controller, 1)
    assert min(lengths) > 0


def test_a_lost_node_costs_the_episodes_that_it_played(nodes: Any, over_shards: Any, train: Any) -> None:
    with over_shards(
        nodes, SlowEnv, LLMProxy([ScriptedModel(["a"] * 3)]), num_envs=16, batch_size=16
    ) as controller:
        controller.start()
        delivered = train(controller, 1)
        held = json.dumps([trajectory.to_dict() for trajectory in delivered])
        before = controller.counts()
        nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
        step, deadline = 1, time.monotonic() + 120.0
        # Its actors outlive the node by a second or two.
        while not controller.counts()["discarded"] and time.monotonic() < deadline:
            train(controller, 1, start=step)
            step += 1
        train(controller, 3, start=step)
        after = controller.counts()
    assert 1 <= after["discarded"]["episode_NodeLost"] <= 8
    assert after["consumed"] == (step + 3) * 16 and before["consumed"] == 16
    assert held == json.dumps([trajectory.to_dict() for trajectory in delivered])
