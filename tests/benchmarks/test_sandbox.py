"""The benchmarks of sandboxes at a small size: what they count and write, and when they fail."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentenv.errors import SandboxError
from agentenv_envs.swe.sandbox import SandboxSpec
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend

MODULES = ("sandbox", "sandbox_episodes", "sandbox_chaos")


@pytest.fixture(scope="module")
def modules(repository: Path) -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        yield {name: importlib.import_module(name) for name in MODULES}


@pytest.fixture(scope="module")
def chaos(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["sandbox_chaos"]


@pytest.fixture(scope="module")
def episodes(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["sandbox_episodes"]


def run(repository: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(repository / "benchmarks" / program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.docker
def test_a_small_run_measures_every_way_and_writes_its_figures(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures" / "sandbox.json"
    done = run(repository, "sandbox.py", "--smoke", "--json", str(file))
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    figures = results["figures"]
    assert (
        set(figures["alone"]) == {"channel", "docker exec, SDK", "docker exec, CLI"} == set(figures["busy"])
    )
    assert all(row["p50_ms"] > 0 and row["commands"] == 5 for row in figures["alone"].values())
    assert figures["containers"] == 4
    assert 0 < figures["ready"]["first_s"] <= figures["ready"]["all_s"]
    assert set(figures["peers"]) == {"swe-rex", "mini-swe-agent"}
    assert len(results["bars"]) == 4
    for words in ("p50 of a command, 4 busy", "assumed: ", "swe-rex", "mini-swe-agent"):
        assert words in done.stdout


@pytest.mark.docker
def test_a_small_run_of_faults_ends_every_episode_once_and_leaves_nothing(
    repository: Path, tmp_path: Path
) -> None:
    file = tmp_path / "chaos.json"
    done = run(repository, "sandbox_chaos.py", "--smoke", "--json", str(file))
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())["figures"]
    assert figures["wrong"] == {}, done.stdout
    assert (figures["containers_left"], figures["processes_left"]) == (0, 0)
    killed = figures["killed"]
    assert killed["abandoned"] >= 1
    assert (killed["containers"], killed["processes"]) == (0, 0)


def figures_of(**changes: Any) -> dict[str, Any]:
    killed = {"abandoned": 4, "restart_s": 1.0, "containers": 0, "processes": 0}
    return {
        "ends": {"none": {"solved": 2}},
        "wrong": {},
        "wall_s": 1.0,
        "containers_made": 4,
        "containers_left": 0,
        "processes_left": 0,
        "volumes_new": [],
        "networks_new": [],
        "killed": killed,
        **changes,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"wrong": {"none: unsolved": 1}},
        {"containers_left": 1},
        {"processes_left": 2},
        {"volumes_new": ["x"]},
        {"networks_new": ["x"]},
        {"killed": {"abandoned": 4, "restart_s": 1.0, "containers": 1, "processes": 0}},
        {"killed": {"abandoned": 0, "restart_s": 1.0, "containers": 0, "processes": 0}},
    ],
)
def test_each_thing_that_is_wrong_misses_a_bar(chaos: ModuleType, changes: dict[str, Any]) -> None:
    assert all(bar.holds for bar in chaos.bars_of(figures_of()))
    assert sum(not bar.holds for bar in chaos.bars_of(figures_of(**changes))) == 1


def test_an_end_of_another_type_and_a_missing_one_are_wrong(episodes: ModuleType) -> None:
    ends = [
        ("none", "solved"),
        ("none", "unsolved"),
        ("container removed", "solved"),
        ("no work", "unsolved"),
    ]
    assert episodes.wrong_ends(ends, 4) == {"none: unsolved": 1, "container removed: solved": 1}
    assert episodes.wrong_ends(ends, 5)["missing or twice"] == 1
    assert {episodes.expected(kind) for kind in episodes.KINDS} == {"solved", "unsolved", "infrastructure"}


@pytest.mark.docker
def test_an_engine_s_fault_is_the_asking_thread_s_own_and_leaves_no_container(episodes: ModuleType) -> None:
    backend = DockerBackend(episodes.connect_faulty())
    try:
        for request in ("create_container", "start", "exec_create", "exec_start"):
            with episodes.failing(request, 1), pytest.raises(SandboxError, match="injected"):
                backend.acquire(SandboxSpec(read_only=True))
            assert backend.left() == 0, request
        sandbox = backend.acquire(SandboxSpec(read_only=True))
        assert sandbox.run("echo on").output == "on\n"
        assert sandbox.container_id in episodes.FaultyApi.made
    finally:
        backend.close()


def test_a_process_with_the_mark_is_found(chaos: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(chaos.MARK, "mark-of-the-sandbox-test")
    assert chaos.processes_of([]) == []
    left = subprocess.Popen(["sleep", "60"], start_new_session=True, env=dict(os.environ))
    try:
        assert chaos.processes_of([]) == [left.pid]
        assert chaos.processes_of(["no-such-container"]) == [left.pid]
    finally:
        left.kill()
        left.wait()


@pytest.mark.parametrize(
    ("program", "arguments", "match"),
    [
        ("sandbox", ["--containers", "0"], "--containers is 0, must be at least 1"),
        ("sandbox", ["--rounds", "0"], "--rounds is 0, must be at least 1"),
        ("sandbox", ["--busy_s", "0"], "--busy_s is 0.0, must be above 0"),
        ("sandbox", ["--turn_s", "-1"], "--turn_s is -1.0, must be at least 0"),
        ("sandbox_chaos", ["--episodes", "0"], "--episodes is 0, must be at least 1"),
        ("sandbox_chaos", ["--threads", "0"], "--threads is 0, must be at least 1"),
    ],
)
def test_bad_input_is_refused(
    modules: dict[str, ModuleType],
    program: str,
    arguments: list[str],
    match: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        modules[program].main(arguments)
    assert caught.value.code == 2
    assert match in capsys.readouterr().err
