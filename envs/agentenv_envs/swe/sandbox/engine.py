"""The Docker engine: the connection to it, its errors, and the settings that harden a container.

Invariants:
- A container has no network, no capability, no way to gain privileges, and limits on memory (no swap), processors,
  processes and file size; its log driver is off, since output would grow the host's disk.
- With `read_only` nothing but memory file systems can be written, /dev included, so that emptying these is all that a
  reset has to do. There are no POSIX message queues, which no listing would show.
- PID 1 ignores every signal from inside but one and its memory is closed, so that no command can end its container or
  leave anything behind in it. At that one it kills all others, which needs no fork: no exec starts in a container whose
  processes are used up. A command may send it, too, and has gained what `kill -9 -1` does.
"""

import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from agentenv.errors import MissingExtraError, SandboxError, SandboxTimeoutError, UsageError

from .base import SandboxSpec

__all__ = [
    "OUTPUT_FOLDER",
    "RESET_MOUNTS",
    "SWEEP_SIGNAL",
    "connect",
    "container_settings",
    "engine_errors",
    "fair_cgroup_parent",
]

OUTPUT_FOLDER = "/run/out"
"""Memory file system of the driver channel; `driver.sh` names it too."""
RESET_MOUNTS = {"/tmp": "1777", "/dev/shm": "1777", OUTPUT_FOLDER: "700"}
"""Memory file systems of a read_only sandbox besides the workdir (mode 755): path -> mode."""

SWEEP_SIGNAL = "RTMIN+3"
"""Told to PID 1: kill all others."""
ENGINE_TIMEOUT_S = 60
PROBE_TIMEOUT_S = 5
CHANNEL_MB = 34
"""Size of the memory file system of the driver channel: 32 MiB of output and the driver's own program."""
SHM_MB = 16
FILE_BYTES = 1_000_000_000
"""Size limit of one file in a container whose root is writable."""

# An execute-only copy of bash, like the driver: nothing inside can read it or write into it, so it stays what it is. It
# waits on a pipe that nobody writes, and has no child that a sweep would kill. The driver removes the two files when
# PID 1 is called init, that is, when all this is done.
_PID_1 = (
    f'i={OUTPUT_FOLDER}/init; cp -- "$BASH" "$i" && chmod 111 "$i" && mkfifo -m 600 "$i.wait" && exec 3<>"$i.wait" && '
    'exec -a init "$i" -p -c \'trap "" HUP INT QUIT TERM USR1 USR2; '
    f'trap "kill -KILL -1" {SWEEP_SIGNAL}; while :; do read -r -u 3 _; done\''
)


def connect() -> Any:
    """A Docker client, after the engine has answered.

    Raises:
        MissingExtraError: the Docker SDK is not installed.
        UsageError: no engine answers.
    """
    try:
        import docker
    except ImportError as error:
        raise MissingExtraError("docker", "docker") from error
    import requests

    address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    try:
        if address.startswith("unix://"):  # the client leaks a socket where nothing listens
            with socket.socket(socket.AF_UNIX) as listener:
                listener.settimeout(PROBE_TIMEOUT_S)
                listener.connect(address.removeprefix("unix://"))
        probe = docker.from_env(timeout=PROBE_TIMEOUT_S)
        probe.ping()
        probe.close()
        return docker.from_env(timeout=ENGINE_TIMEOUT_S, max_pool_size=64)
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise UsageError(f"sandbox='docker': no Docker engine answers ({error})") from error


@contextmanager
def engine_errors(what: str) -> Iterator[None]:
    """Turn what the Docker client raises into `SandboxError`, with the action that failed in the message."""
    import requests
    from docker.errors import DockerException

    try:
        yield
    except requests.exceptions.Timeout as error:
        raise SandboxTimeoutError(f"{what}: the Docker engine did not answer in time ({error})") from error
    except (DockerException, requests.exceptions.RequestException, OSError) as error:
        raise SandboxError(f"{what}: {error}") from error


def fair_cgroup_parent(info: Mapping[str, Any]) -> str | None:
    """The parent under which each sandbox gets as much processor time as any other process; None: the engine's own.

    With the driver cgroupfs the engine puts all containers into one group that counts as a single process: beside a
    trainer that keeps all processors busy, sandboxes then run several times slower than the same commands outside.

    Args:
        info: what the engine's `info` request answers.
    """
    return "/" if info.get("CgroupDriver") == "cgroupfs" else None


def container_settings(
    api: Any, spec: SandboxSpec, image: str, labels: dict[str, str], cgroup_parent: str | None
) -> dict[str, Any]:
    """Arguments of `create_container` for a hardened container of `image`."""
    from docker.types import LogConfig, Ulimit

    in_memory = "rw,nosuid,nodev,exec"
    tmpfs = {OUTPUT_FOLDER: f"{in_memory},size={CHANNEL_MB}m,mode={RESET_MOUNTS[OUTPUT_FOLDER]}"}
    file_bytes = FILE_BYTES
    if spec.read_only:
        file_bytes = max(spec.writable_mb, CHANNEL_MB) << 20
        tmpfs[spec.workdir] = f"{in_memory},size={spec.writable_mb}m,mode=755"
        tmpfs["/tmp"] = f"{in_memory},size={spec.writable_mb}m,mode={RESET_MOUNTS['/tmp']}"
        tmpfs["/dev/shm"] = f"rw,nosuid,nodev,noexec,size={SHM_MB}m,mode={RESET_MOUNTS['/dev/shm']}"
        # The engine leaves these two writable even under a read-only root.
        tmpfs["/dev"] = "ro,dev,nosuid,noexec,size=64k,mode=755"
        tmpfs["/sys/fs/cgroup"] = "ro,nosuid,nodev,noexec,size=64k,mode=755"
    ulimits = [Ulimit(name="fsize", soft=file_bytes, hard=file_bytes), Ulimit(name="core", soft=0, hard=0)]
    if spec.read_only:
        ulimits.append(Ulimit(name="msgqueue", soft=0, hard=0))
    host = api.create_host_config(
        network_mode="none",
        cgroup_parent=cgroup_parent,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true"],
        pids_limit=spec.pids,
        mem_limit=f"{spec.memory_mb}m",
        memswap_limit=f"{spec.memory_mb}m",
        nano_cpus=int(spec.cpus * 1e9),
        read_only=spec.read_only,
        ipc_mode="none" if spec.read_only else None,
        init=False,
        log_config=LogConfig(type=LogConfig.types.NONE),
        tmpfs=tmpfs,
        ulimits=ulimits,
    )
    return {
        "image": image,
        "name": f"agentenv-{uuid.uuid4().hex[:12]}",
        "command": ["-c", _PID_1],
        "entrypoint": ["bash"],
        "hostname": "sandbox",
        "user": "0:0",
        "working_dir": spec.workdir,
        "environment": dict(spec.environment),
        "labels": labels,
        "stop_signal": "SIGKILL",
        "host_config": host,
    }
