"""What no cluster or node can do, and how it is said: resources, imports, addresses, versions, clocks."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentenv
from agentenv.cluster import connection
from agentenv.cluster.connection import NodeFacts, check_facts, node_facts
from agentenv.cluster.placement import parse_resources
from agentenv.errors import MissingExtraError, UsageError
from agentenv.testing import EchoEnv

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ray_resources": "CPU=1,unicorn=1"}, r"needs CPU=1, unicorn=1 on one node, .*has CPU=4"),
        ({"ray_resources": "CPU=9"}, r"needs CPU=9 on one node"),
        ({"ray_resources": "docker"}, r"Ray's resources 'docker': 'docker' must be like docker=1"),
        ({"ray_resources": "docker=-1"}, r"'docker=-1' must be like docker=1"),
        ({"ray_envs_per_actor": 0}, r"ray_envs_per_actor is 0, must be positive"),
    ],
)
def test_what_no_node_can_do_is_refused(
    two_nodes: Any, changes: dict[str, Any], message: str, open_controller: Any
) -> None:
    with pytest.raises(ValueError, match=message), open_controller(two_nodes, EchoEnv, **changes):
        pass


def test_an_environment_that_cannot_be_pickled_is_named(two_nodes: Any, open_controller: Any) -> None:
    with (
        pytest.raises(UsageError, match=r"lambda.*can't be pickled.*register the environment"),
        open_controller(two_nodes, lambda: EchoEnv()),
    ):
        pass


def test_bad_input_of_an_environment_on_another_node_stops_the_run(
    two_nodes: Any, open_controller: Any
) -> None:
    env_fn = functools.partial(agentenv.make, "NoSuch-v0")
    with pytest.raises(UsageError, match="NoSuch-v0"), open_controller(two_nodes, env_fn) as controller:
        controller.get_batch(0)


def test_a_node_that_cannot_import_agentenv_is_named_with_what_to_install(
    two_nodes: Any, tmp_path: Path, train: Any
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
        ("127.0.0.1:9", "Ray's address '127.0.0.1:9': nothing answers there"),
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
    assert time.monotonic() - began < 30.0


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
