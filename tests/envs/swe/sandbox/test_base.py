"""Specifications, paths, output and labels: what needs no engine."""

import os
import subprocess
import time

import pytest

from agentenv.errors import UsageError
from agentenv_envs.swe.sandbox import SandboxSpec, labels
from agentenv_envs.swe.sandbox.base import absolute_path, decode_output
from agentenv_envs.swe.sandbox.pool import WarmPool


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"workdir": "work"}, "workdir='work'"),
        ({"workdir": "/a b"}, "workdir='/a b'"),
        ({"workdir": "/a/../b"}, "workdir"),
        ({"workdir": "/tmp/x", "read_only": True}, "cannot lie in /tmp"),
        ({"memory_mb": 1}, "memory_mb=1"),
        ({"pids": 1}, "pids=1"),
        ({"writable_mb": 0}, "writable_mb=0"),
        ({"cpus": 0}, "cpus=0"),
    ],
)
def test_a_field_out_of_range_is_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        SandboxSpec(**fields)  # type: ignore[arg-type]


def test_equal_specifications_are_one_key() -> None:
    one = SandboxSpec(read_only=True, environment={"A": "1", "B": "2"})
    two = SandboxSpec(read_only=True, environment={"B": "2", "A": "1"})
    assert one == two
    assert hash(one) == hash(two)
    assert len({one, two, SandboxSpec(read_only=True)}) == 2


def test_paths_are_taken_from_the_workdir() -> None:
    assert absolute_path("a/../b", "/work") == "/work/b"
    assert absolute_path("/x", "/work") == "/x"
    with pytest.raises(ValueError, match="NUL"):
        absolute_path("a\0", "/work")


def test_output_is_whole_or_head_note_and_tail() -> None:
    assert decode_output(b"abc\xff", 4, 2) == "abc\ufffd"
    assert decode_output(b"abcd", 9, 2) == "ab\n[... 5 bytes left out ...]\ncd"


def test_an_owner_is_abandoned_only_when_that_is_certain() -> None:
    mine = labels.owner_labels("backend")
    assert not labels.is_abandoned(mine, local_engine=True)
    pid, start, namespace, boot = mine[labels.OWNER].split(" ")

    def owned(*parts: str, expires: float = 3600) -> dict[str, str]:
        return {labels.OWNER: " ".join(parts), labels.EXPIRES: str(int(time.time() + expires))}

    dead = subprocess.Popen(["true"])
    dead.wait()
    assert labels.is_abandoned(owned(str(dead.pid), "1", namespace, boot), local_engine=True)
    assert labels.is_abandoned(owned(pid, str(int(start) + 1), namespace, boot), local_engine=True), (
        "the id was reused"
    )
    assert labels.is_abandoned(owned(pid, start, namespace, "earlier"), local_engine=True), "an earlier boot"
    assert not labels.is_abandoned(owned(pid, start, namespace, "elsewhere"), local_engine=False)
    assert not labels.is_abandoned(owned("1", "1", "pid:[1]", boot), local_engine=True), (
        "another pid namespace"
    )
    assert labels.is_abandoned(owned("1", "1", "pid:[1]", boot, expires=-1), local_engine=True)
    assert not labels.is_abandoned({}, local_engine=True)


def test_a_zombie_counts_as_dead() -> None:
    process = subprocess.Popen(["sleep", "60"])
    start = labels._start_time(process.pid)
    assert start
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert labels._start_time(process.pid) == ""
    process.wait()


def test_the_pool_gives_the_newest_first_and_nothing_after_it_closed() -> None:
    pool: WarmPool[str] = WarmPool()
    one, two = SandboxSpec(), SandboxSpec(pids=64)
    for spec, name in ((one, "a"), (one, "b"), (two, "c")):
        assert pool.put(spec, name)
    assert pool.take(one) == "b"
    assert pool.close() == ["a", "c"]
    assert pool.take(one) is None
    assert not pool.put(one, "d")
