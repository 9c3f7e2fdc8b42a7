"""A Ray cluster for the tests of a module, and rollouts over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from agentenv.inference import Engine, GenerationRequest, LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.testing import ByteTokenizer, ScriptedModel
from agentenv.trajectory import Trajectory

NODE = {"num_cpus": 4, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of three nodes in processes of their own, the first of which takes no actors."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
    try:
        for _ in range(2):
            cluster.add_node(**NODE)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def two_nodes(nodes: Any) -> Any:
    """The cluster, with two nodes that take actors, whatever a test before did to it."""
    while len(nodes.worker_nodes) < 2:
        nodes.add_node(**NODE)
    return nodes


@contextmanager
def _controller(
    nodes: Any,
    env_fn: Any,
    model: Engine | LLMProxy | None = None,
    *,
    tokenizer: Any = None,
    **settings: Any,
) -> Iterator[AsyncController]:
    options: dict[str, Any] = {
        "batch_size": 8,
        "num_envs": 8,
        "worker": "ray",
        "ray_address": nodes.address,
        "reset_timeout_s": 120.0,
        "step_timeout_s": 60.0,
        "batch_timeout_s": 300.0,
        "shutdown_timeout_s": 60.0,
        "max_tokens_per_turn": 8,
        "max_tokens_per_episode": 512,
        **settings,
    }
    if not options.get("ray_shards"):
        options.setdefault("ray_envs_per_actor", 4)
    proxy = model if isinstance(model, LLMProxy) else LLMProxy([model or ScriptedModel(["a"], repeat=True)])
    config = RolloutConfig(**options)
    with AsyncController(env_fn, proxy, tokenizer or ByteTokenizer(), config, seed=3) as controller:
        yield controller
    counts = controller.counts()
    assert counts["running"] == 0
    assert counts["produced"] == counts["consumed"] + counts["buffered"] + sum(counts["discarded"].values())


@pytest.fixture
def open_controller() -> Callable[..., AbstractContextManager[AsyncController]]:
    """Opens a controller whose environments are on the cluster; every episode is accounted for as it ends."""
    return _controller


@pytest.fixture
def train() -> Callable[..., list[Trajectory]]:
    """Takes full batches that are fresh enough, an update after each."""

    def run(controller: AsyncController, steps: int, *, start: int = 0) -> list[Trajectory]:
        batches = []
        for step in range(start, start + steps):
            batch = controller.get_batch(step)
            assert len(batch) == controller.config.batch_size
            assert all(trajectory.start_version >= step - controller.config.alpha for trajectory in batch)
            batches += batch
            controller.sync_weights({}, step + 1)
        return batches

    return run


@pytest.fixture
def reply() -> Callable[[GenerationRequest], str]:
    """Another one for every episode and turn, the same wherever they are played."""

    def of(request: GenerationRequest) -> str:
        return chr(ord("a") + (request.seed or 0) % 26) * (1 + (request.seed or 0) % 5)

    return of
