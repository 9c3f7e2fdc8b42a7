"""What a service lets clients ask for, and how it knows them."""

from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import UsageError
from agentenv_envs.swe.sandbox import SandboxSpec
from agentenv_envs.swe.sandbox.service.limits import ServiceLimits, Tokens

LIMITS = ServiceLimits(memory_mb=1024, images=("swebench/*",))


def test_a_specification_within_the_limits_is_taken_as_it_is() -> None:
    given = {
        "image": "swebench/x:1",
        "read_only": True,
        "memory_mb": 1024,
        "cpus": 0.5,
        "environment": {"A": "b"},
    }
    wanted = SandboxSpec("swebench/x:1", read_only=True, memory_mb=1024, cpus=0.5, environment={"A": "b"})
    assert LIMITS.spec(given) == wanted
    assert LIMITS.spec({}) == SandboxSpec()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"privileged": True}, "spec.privileged: no such field; image, workdir"),
        ({"mounts": ["/:/host"]}, "spec.mounts: no such field"),
        ({"network": "host"}, "spec.network: no such field"),
        ({"memory_mb": 1025}, "spec.memory_mb=1025: 16 to 1024 is allowed"),
        ({"memory_mb": True}, "spec.memory_mb=True: a number is needed"),
        ({"memory_mb": 100.5}, "a whole number is needed"),
        ({"cpus": float("nan")}, "spec.cpus=nan: a number is needed"),
        ({"pids": "128"}, "spec.pids='128': a number is needed"),
        ({"read_only": "yes"}, "true or false is needed"),
        ({"workdir": "/work/../etc"}, "workdir="),
        ({"workdir": "/" + "a" * 2000}, "at most 1024 characters"),
        ({"image": "ubuntu"}, "this service allows base, swebench/*"),
        ({"image": "agentenv/swe-x:1"}, "this service allows base, swebench/*"),
        ({"image": "-v /:/host"}, "not the name of an image"),
        ({"environment": {"A=B": "x"}}, "is no name of a variable"),
        ({"environment": {"A": 1}}, "spec.environment.A: a string"),
        ({"environment": []}, "spec.environment: an object"),
        ([], "spec: a JSON object is needed"),
    ],
)
def test_anything_else_is_refused_with_one_message(given: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        LIMITS.spec(given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_images_of_package_rows_may_be_used_where_they_may_be_built() -> None:
    assert ServiceLimits(packages=True).spec({"image": "agentenv/swe-x:1"}).image == "agentenv/swe-x:1"


def test_tokens_tell_clients_apart(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# trainers\nalice 0123456789abcdefA\n\nbob 0123456789abcdefB\n")
    tokens = Tokens.read(path)
    assert tokens.client("0123456789abcdefA") == "alice"
    assert tokens.client("0123456789abcdefB") == "bob"
    assert tokens.client("0123456789abcdef") is None
    assert tokens.client("") is None
    path.write_text("0123456789abcdef\n")
    assert Tokens.read(path).client("0123456789abcdef") == "default"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no token"),
        ("alice short", "at least 16 characters"),
        ("a b c", "line 1: 'CLIENT TOKEN' or 'TOKEN' is needed"),
        ("a 0123456789abcdef\na 0123456789abcdeX", "line 2: client 'a' is there already"),
        ("a 0123456789abcdef\nb 0123456789abcdef", "a token of its own"),
        ("a/b 0123456789abcdef", "client 'a/b'"),
    ],
)
def test_a_bad_file_of_tokens_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        Tokens.read(path)
    with pytest.raises(UsageError, match="--token-file"):
        Tokens.read(tmp_path / "missing")
