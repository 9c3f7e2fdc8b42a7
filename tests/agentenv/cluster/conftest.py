"""A Ray cluster for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

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
