"""`agentenv doctor`: its lines, its deadlines and its exit code; the real engine in Docker."""

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import UsageError
from agentenv_envs import doctor, doctor_docker
from agentenv_envs.doctor import Check, Group, add_commands, run_checks
from agentenv_envs.doctor_docker import docker_group

# What an engine with nothing to complain about answers to `info`.
INFO: dict[str, Any] = {
    "Driver": "overlay2",
    "CgroupVersion": "2",
    "CgroupDriver": "systemd",
    "MemoryLimit": True,
    "PidsLimit": True,
    "CpuCfsQuota": True,
    "SwapLimit": True,
    "LiveRestoreEnabled": True,
    "SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"],
    "Runtimes": {"runc": {}, "runsc": {}},
}


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(["doctor", *arguments])
    code: int = args.run(args)
    return code


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")


# How checks are run.


def test_checks_keep_their_order_and_one_that_hangs_costs_its_own_line() -> None:
    ended = threading.Event()

    def hangs() -> Iterator[Check]:
        yield Check("first", "ok", "there")
        ended.wait(120.0)

    def hangs_at_once() -> Iterator[Check]:
        ended.wait(120.0)
        yield from ()

    began = time.monotonic()
    checks = run_checks(
        [
            Group(("first", "second", "third"), hangs, required=True),
            Group(("optional",), hangs_at_once),
            Group(("quick",), lambda: iter([Check("quick", "ok", "x")])),
        ],
        deadline_s=1.0,
    )
    ended.set()
    assert time.monotonic() - began < 60.0
    assert [(check.name, check.status) for check in checks] == [
        ("first", "ok"),
        ("second", "FAIL"),
        ("third", "FAIL"),
        ("optional", "warn"),
        ("quick", "ok"),
    ]
    assert checks[1].found == checks[3].found == "no answer within 1 s"


def test_a_check_that_breaks_hides_no_other() -> None:
    def breaks() -> Iterator[Check]:
        yield Check("first", "ok", "there")
        raise KeyError("Driver")

    checks = run_checks(
        [Group(("first", "second"), breaks), Group(("x",), lambda: iter([Check("x", "ok", "")]))]
    )
    assert [(check.name, check.status) for check in checks] == [
        ("first", "ok"),
        ("second", "warn"),
        ("x", "ok"),
    ]
    assert checks[1].found == "the check broke: KeyError: 'Driver'"


def test_a_program_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    for limit_s in (0.3, 4.0, 30.0):  # longer where it did not come to its first line
        monkeypatch.setattr(doctor, "PROGRAM_S", limit_s)
        assert doctor._program(["bash", "-c", f"echo $$ >{pid}; exec sleep 120"]) is None
        if pid.exists() and pid.read_text():
            break
    monkeypatch.setattr(doctor, "PROGRAM_S", 60.0)
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()
    assert doctor._program(["no-such-program"]) is None
    assert doctor._program(["false"]) is None
    assert doctor._program(["echo", "fine"]) == "fine"


# The command.


def test_without_an_engine_the_command_fails_and_says_what_to_do(
    no_engine: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    began = time.monotonic()
    assert command("--json", "--runs", str(tmp_path / "not" / "yet")) == 1
    assert time.monotonic() - began < 60.0
    checks = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    assert checks["docker engine"]["status"] == "FAIL"
    assert "no Docker engine answers" in checks["docker engine"]["found"]
    assert "DOCKER_HOST" in checks["docker engine"]["advice"]
    assert checks["container"] == {
        "name": "container",
        "status": "warn",
        "found": "not looked at: no engine answers",
        "advice": "",
    }
    assert checks["python"]["status"] == "ok"
    assert {"torch", "trl", "transformers", "gpu", "vllm", "run folder", "cgroups"} <= set(checks)
    assert not (tmp_path / "not").exists()


def test_each_line_has_status_name_and_finding_and_advice_below() -> None:
    text = doctor._text([Check("gpu", "warn", "none\nat all", "buy one"), Check("run folder", "ok", "there")])
    assert text.splitlines() == [
        "warn  gpu         none at all",
        "                  -> buy one",
        "ok    run folder  there",
    ]


def test_a_run_folder_that_is_a_file_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="is not a folder"):
        command("--runs", str(file))


# Libraries, disk and GPU.


def test_versions_of_builds_are_held_against_a_range() -> None:
    assert doctor._within("0.22.0", ">=0.22.0,<=0.31.0")
    assert doctor._within("0.31.0+cu129", ">=0.22.0,<=0.31.0")
    assert doctor._within("0.31.0rc1", ">=0.22.0,<=0.31.0")
    assert not doctor._within("0.32.0", ">=0.22.0,<=0.31.0")


def test_a_library_outside_the_range_is_named_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.40.0")
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ['vllm<=0.31.0,>=0.22.0; extra == "vllm"'])
    check = doctor._library("vllm", "trl", "vllm")
    assert check.status == "warn"
    assert check.found == "0.40.0, trl needs <=0.31.0,>=0.22.0"
    assert check.advice == "pip install 'vllm<=0.31.0,>=0.22.0'"


def test_a_library_that_is_missing_is_named_with_its_extra() -> None:
    check = doctor._library("no-such-distribution", "agentenv-rl", "train")
    assert (check.status, check.advice) == ("warn", "pip install 'agentenv-rl[train]'")


@pytest.mark.parametrize(
    ("version", "source", "status", "found"),
    [
        ("0.25.0", "__version__ = '0.25.0'", "ok", "0.25.0 (trl needs"),
        ("0.25.0", "raise ImportError('no CUDA here')", "warn", "0.25.0 (trl needs"),
        ("99.0", "", "warn", "99.0, trl needs"),
    ],
)
def test_vllm_has_to_be_in_the_range_of_trl_and_importable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, source: str, status: str, found: str
) -> None:
    pytest.importorskip("trl")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(source)
    (tmp_path / f"vllm-{version}.dist-info").mkdir()
    (tmp_path / f"vllm-{version}.dist-info" / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = doctor._vllm()
    assert check.status == status
    assert check.found.startswith(found)
    assert bool(check.advice) == (status == "warn")


def test_free_space_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert doctor.free_space("disk", folder, 0, "make room").status in ("ok", "FAIL")
    low = doctor.free_space("disk", folder, 1 << 60, "make room")
    assert low.status in ("warn", "FAIL")
    assert low.advice == "make room"
    assert f"at {folder}" in low.found


@pytest.mark.slow
def test_a_card_that_torch_does_not_see_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card = tmp_path / "nvidia-smi"
    card.write_text("#!/bin/sh\necho 'Card, 1024 MiB'\n")
    card.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (check,) = doctor._gpu()
    assert check.status == "warn"
    assert check.found.startswith("Card, 1024 MiB; torch")


# Docker.


def test_an_engine_that_takes_connections_and_says_nothing_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("docker")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "docker.sock"))
        listener.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
        began = time.monotonic()
        checks = run_checks([docker_group()], deadline_s=0.5)
        assert time.monotonic() - began < 60.0
    assert {check.status for check in checks} == {"FAIL"}
    for thread in threading.enumerate():
        if thread.name.startswith("doctor-"):
            thread.join(60.0)
            assert not thread.is_alive()


def test_an_engine_with_all_that_is_wanted_is_ok() -> None:
    engine = doctor_docker._engine({"Version": "28.1", "ApiVersion": "1.49"}, INFO)
    assert engine.found == "28.1 (API 1.49), rootless, runsc is among its runtimes"
    for check in (doctor_docker._storage_driver, doctor_docker._cgroups, doctor_docker._live_restore):
        assert check(INFO).status == "ok"
        assert check(INFO).advice == ""


@pytest.mark.parametrize(
    ("look", "change", "status", "found"),
    [
        ("_storage_driver", {"Driver": "vfs"}, "warn", "vfs: may copy the whole image"),
        ("_cgroups", {"MemoryLimit": False, "PidsLimit": False}, "FAIL", "version 2, without memory, pids"),
        ("_cgroups", {"CpuCfsQuota": False}, "FAIL", "version 2, without cpu"),
        ("_cgroups", {"CgroupVersion": "1", "SwapLimit": False}, "warn", "version 1, without limits on swap"),
        ("_live_restore", {"LiveRestoreEnabled": False}, "warn", "off: a restart of the engine ends"),
    ],
)
def test_a_setting_that_is_not_as_it_should_be_comes_with_advice(
    look: str, change: dict[str, Any], status: str, found: str
) -> None:
    check = getattr(doctor_docker, look)(INFO | change)
    assert check.status == status
    assert check.found.startswith(found)
    assert check.advice


def test_the_disk_of_an_engine_elsewhere_is_not_guessed() -> None:
    check = doctor_docker._engine_disk(INFO | {"DockerRootDir": "/"}, local=False)
    assert (check.status, check.found) == ("warn", "/ is not visible from here")


@pytest.mark.docker
def test_a_real_engine_is_looked_at_and_nothing_is_left() -> None:
    import docker

    from agentenv_envs.swe.sandbox.images import ensure_base_image
    from agentenv_envs.swe.sandbox.labels import OWNER, SANDBOX

    def mine() -> set[str]:
        found = client.api.containers(all=True, filters={"label": SANDBOX})
        return {item["Id"] for item in found if item["Labels"].get(OWNER, "").startswith(f"{os.getpid()} ")}

    client = docker.from_env()
    try:
        ensure_base_image(client)
        before = mine()
        checks = {check.name: check for check in run_checks([docker_group()], deadline_s=60.0)}
        assert mine() <= before
    finally:
        client.close()
    assert list(checks) == list(docker_group().names)
    assert checks["docker engine"].status == "ok"
    assert checks["base image"].status == "ok"
    assert checks["container"] == Check(
        "container", "ok", "a sandbox starts, reaches no network, and is removed"
    )


# Its command hangs, so that the deadline comes while the container is there.
GIVE_UP = """
from agentenv_envs import doctor, doctor_docker
doctor_docker._NETWORK_PROBE = "sleep 60"
print(doctor.run_checks([doctor_docker.docker_group()], deadline_s=3.0)[-1].found)
"""


@pytest.mark.docker
def test_a_container_whose_check_was_given_up_is_removed_at_the_end_of_the_process() -> None:
    import docker

    from agentenv_envs.swe.sandbox.images import ensure_base_image
    from agentenv_envs.swe.sandbox.labels import OWNER, SANDBOX

    client = docker.from_env()
    try:
        ensure_base_image(client)
        process = subprocess.Popen([sys.executable, "-c", GIVE_UP], stdout=subprocess.PIPE, text=True)
        out, _ = process.communicate(timeout=120)
        assert out == "no answer within 3 s\n"
        found = client.api.containers(all=True, filters={"label": SANDBOX})
    finally:
        client.close()
    assert not [item for item in found if item["Labels"].get(OWNER, "").startswith(f"{process.pid} ")]
