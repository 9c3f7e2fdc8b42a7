"""What clients may ask of a service, and who they are.

Invariants:
- A client names values, never settings of the engine: a specification has the fields of `SandboxSpec` and no others,
  each within the limits. There is no way to ask for a mount, a privilege or a network.
- Whatever is refused is one message that names the field, its value and what is allowed.
- Tokens are compared in constant time, and only their hashes are kept.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError
from agentenv_envs.swe.sandbox.base import BASE_IMAGE, SandboxSpec

__all__ = ["IMAGE_NAME", "Fields", "ServiceLimits", "Tokens"]

_SPEC_FIELDS = tuple(field.name for field in fields(SandboxSpec))
IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")
"""No pattern of `fnmatch` is one."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_CLIENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MIN_TOKEN = 16


class Fields:
    """An object of a request, read field by field; `done` refuses what was not read.

    Raises:
        UsageError: every method, where the field is not what it has to be.
    """

    def __init__(self, value: object, name: str = "") -> None:
        if not isinstance(value, dict):
            raise UsageError(f"{name or 'the body'}: a JSON object is needed")
        self._value, self._name = value, name
        self._read: set[str] = set()

    def take(self, name: str, default: Any) -> Any:
        """A field as it came."""
        self._read.add(name)
        return self._value.get(name, default)

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self.take(name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "a string is needed")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false is needed")
        return value

    def number(self, name: str, default: float | None, least: float, most: float) -> float:
        """A number from `least` to `most`."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise self.error(name, value, "a number is needed")
        if not least <= value <= most:
            raise self.error(name, value, f"{least:g} to {most:g} is allowed")
        return float(value)

    def whole(self, name: str, default: int | None, least: int, most: int) -> int:
        """A whole number from `least` to `most`."""
        value = self.number(name, default, least, most)
        if value != int(value):
            raise self.error(name, value, "a whole number is needed")
        return int(value)

    def done(self, allowed: tuple[str, ...] | None = None) -> None:
        """Refuse fields that nobody asked for."""
        unknown = sorted(set(self._value) - self._read)
        if unknown:
            known = ", ".join(allowed or sorted(self._read))
            raise UsageError(f"{self._path(unknown[0])}: no such field; {known} are allowed")

    def error(self, name: str, value: object, needed: str) -> UsageError:
        """The message about a field."""
        return UsageError(f"{self._path(name)}={repr(value)[:200]}: {needed}")

    def _path(self, name: str) -> str:
        return f"{self._name}.{name}" if self._name else name


@dataclass(frozen=True)
class ServiceLimits:
    """What all clients together, one client, and one request may take.

    Raises:
        UsageError: a limit is out of its range.
    """

    max_sandboxes: int = 32
    """Containers at a time, warm ones included."""
    per_client: int = 32
    """Leases of one client at a time."""
    images: tuple[str, ...] = ()
    """Patterns of images that clients may use besides the base image, such as "swebench/*"; "*" is any."""
    packages: bool = False
    """Clients may have images of package rows built. Their build scripts run in the service, which holds the socket."""
    memory_mb: int = 8192
    cpus: float = 4.0
    pids: int = 1024
    writable_mb: int = 1024
    disk_mb: int = 20_480
    """Most that one sandbox may have of each; units as in `SandboxSpec`."""
    ttl_s: float = 3600.0
    """Longest time to live of a lease that is not renewed."""
    timeout_s: float = 7200.0
    """Longest command."""
    half_bytes: int = 4 << 20
    """Most output that comes back from head and tail, each."""
    read_bytes: int = 64 << 20
    """Longest file that is read."""
    body_bytes: int = 64 << 20
    """Longest body of a request; base64 takes a third more than the files in it."""
    wait_s: float = 25.0
    """Longest time that an answer is held back: shorter than what proxies allow."""
    queue: int = 4
    """Requests that may wait for one sandbox."""

    def __post_init__(self) -> None:
        for name in ("max_sandboxes", "per_client", "memory_mb", "cpus", "pids", "writable_mb"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name}={getattr(self, name)!r}: more than 0 is needed")

    def spec(self, value: object) -> SandboxSpec:
        """The specification of a request.

        Raises:
            UsageError: an unknown field, one out of its range, or an image that is not allowed.
        """
        given = Fields(value, "spec")
        environment = given.take("environment", {})
        spec_values: dict[str, Any] = {
            "image": self.image(given.text("image", BASE_IMAGE)),
            "workdir": given.text("workdir", "/work"),
            "read_only": given.flag("read_only", False),
            "memory_mb": given.whole("memory_mb", 512, 16, self.memory_mb),
            "cpus": given.number("cpus", 1.0, 0.01, self.cpus),
            "pids": given.whole("pids", 128, 8, self.pids),
            "writable_mb": given.whole("writable_mb", 64, 1, self.writable_mb),
            "disk_mb": given.whole("disk_mb", 10_240, 1, self.disk_mb),
            "environment": _environment(environment),
        }
        given.done(_SPEC_FIELDS)
        if len(str(spec_values["workdir"])) > 1024:
            raise UsageError("spec.workdir: at most 1024 characters are allowed")
        return SandboxSpec(**spec_values)

    def image(self, name: str) -> str:
        """A name of an image, where it is allowed.

        Raises:
            UsageError: it is not.
        """
        patterns = [*self.images, *(["agentenv/swe-*"] if self.packages else [])]
        if name == BASE_IMAGE:
            return name
        if not IMAGE_NAME.fullmatch(name):
            raise UsageError(f"spec.image={name[:200]!r}: not the name of an image")
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            allowed = ", ".join([BASE_IMAGE, *patterns])
            raise UsageError(
                f"spec.image={name!r}: this service allows {allowed} (agentenv sandbox serve --allow-image)"
            )
        return name


class Tokens:
    """Clients by their tokens.

    Args:
        clients: name -> token.

    Raises:
        UsageError: none, a bad name, a token that is too short, or one that two clients share.
    """

    def __init__(self, clients: Mapping[str, str]) -> None:
        if not clients:
            raise UsageError("tokens: at least one client is needed")
        for name, token in clients.items():
            if not _CLIENT.fullmatch(name):
                raise UsageError(
                    f"client {name!r}: letters, digits, '.', '_' and '-' are allowed, 64 at most"
                )
            if len(token) < _MIN_TOKEN:
                raise UsageError(f"token of client {name!r}: at least {_MIN_TOKEN} characters are needed")
        self._hashes = {name: _hash(token) for name, token in clients.items()}
        if len(set(self._hashes.values())) < len(self._hashes):
            raise UsageError("tokens: each client needs a token of its own")

    @classmethod
    def read(cls, path: Path) -> "Tokens":
        """From a file with a line "client token" for each client, or one line with the token of the client "default".

        Raises:
            UsageError: no such file, or a line that is neither.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--token-file {path}: {error}") from None
        clients: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            parts = line.split()
            if not parts or line.lstrip().startswith("#"):
                continue
            if len(parts) > 2:
                raise UsageError(f"--token-file {path}, line {number}: 'CLIENT TOKEN' or 'TOKEN' is needed")
            name = parts[0] if len(parts) == 2 else "default"
            if name in clients:
                raise UsageError(f"--token-file {path}, line {number}: client {name!r} is there already")
            clients[name] = parts[-1]
        if not clients:
            raise UsageError(f"--token-file {path}: holds no token")
        return cls(clients)

    def client(self, token: str) -> str | None:
        """Whose token it is; takes the same time for every token."""
        found = None
        given = _hash(token)
        for name, known in self._hashes.items():
            if secrets.compare_digest(given, known):
                found = name
        return found


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _environment(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > 64:
        raise UsageError("spec.environment: an object of at most 64 variables is needed")
    for name, text in value.items():
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"spec.environment: {name[:200]!r} is no name of a variable")
        if not isinstance(text, str) or len(text) > 8192 or "\0" in text:
            raise UsageError(f"spec.environment.{name}: a string of at most 8192 characters is needed")
    return dict(value)
