"""Labels by which a container tells whose it is, and the question whether that owner still lives.

Invariants:
- An owner is a process: its id, its start time (ids are reused), its pid namespace and the boot of its host.
- A container is removed for its owner's death only where that can be known for certain: same boot and same pid
  namespace, or an engine on this machine and an earlier boot. Otherwise it goes when its time to live is over.
"""

import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

__all__ = ["BACKEND", "EXPIRES", "OWNER", "SANDBOX", "TTL_S", "is_abandoned", "owner_labels"]

SANDBOX = "agentenv.sandbox"
OWNER = "agentenv.owner"
BACKEND = "agentenv.backend"
EXPIRES = "agentenv.expires"

TTL_S = 24 * 3600
"""Seconds after which a container whose owner cannot be looked up counts as abandoned."""


def owner_labels(backend_id: str, ttl_s: float = TTL_S) -> dict[str, str]:
    """Labels for a container that a backend of this process makes."""
    pid = os.getpid()
    owner = f"{pid} {_start_time(pid)} {_namespace()} {_boot_id()}"
    return {SANDBOX: "1", BACKEND: backend_id, OWNER: owner, EXPIRES: str(int(time.time() + ttl_s))}


def is_abandoned(labels: Mapping[str, str], *, local_engine: bool) -> bool:
    """True where the container's owner is dead, or cannot be known and the time to live is over.

    Args:
        labels: of the container.
        local_engine: the engine runs on this machine, so that containers of an earlier boot have no owner any more.
    """
    parts = labels.get(OWNER, "").split(" ")
    if len(parts) == 4:
        pid, start, namespace, boot = parts
        if boot == _boot_id():
            if namespace == _namespace() and pid.isdigit():
                return _start_time(int(pid)) != start
        elif local_engine:
            return True
    expires = labels.get(EXPIRES, "")
    return expires.isdigit() and int(expires) < time.time()


def _start_time(pid: int) -> str:
    """Clock ticks between boot and the start of a process; "" where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return "" if fields[0] in "ZX" else fields[19]


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
