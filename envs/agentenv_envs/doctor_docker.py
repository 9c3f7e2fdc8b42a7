"""The doctor's look at Docker: the engine, its settings, its disk, the base image, and one real sandbox.

Invariants:
- A request to the engine takes at most `REQUEST_S` seconds.
- The sandbox is made as those of runs are, and removed again, where the check is given up at the end of the process.
"""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentenv.errors import SandboxError, UsageError

from .doctor import Check, Group, free_space

__all__ = ["docker_group"]

REQUEST_S = 4
ENGINE_LOW_BYTES = 20 << 30
"""Images of real repositories have 1 to 4 GB each, most of it shared."""
_ENGINE = "docker engine"
_AFTER_ENGINE = ("storage driver", "cgroups", "live-restore", "engine disk", "base image", "container")
_QUICK_DRIVERS = ("overlay2", "overlayfs", "fuse-overlayfs", "btrfs", "zfs", "stargz")
# The address is one of documentation (RFC 5737): with any network at all, the answer is another one.
_NETWORK_PROBE = "echo $(ls /sys/class/net); timeout 2 bash -c 'exec 3<>/dev/tcp/192.0.2.1/9' 2>&1"


def docker_group() -> Group:
    """All that needs the engine; where none answers, the rest is not looked at."""
    return Group((_ENGINE, *_AFTER_ENGINE), _look, required=True)


def _look() -> Iterator[Check]:
    from .swe.sandbox.engine import connect

    try:
        client = connect()
    except UsageError as error:
        advice = (
            "start Docker, or name its socket in DOCKER_HOST; without it, commands of SWE-v0 run unisolated"
        )
        if "pip install" in str(error):
            advice = "pip install 'agentenv-rl[docker]'"
        elif "Permission denied" in str(error):
            advice = "join the group that owns the socket (usermod -aG docker NAME) and log in again"
        yield Check(_ENGINE, "FAIL", str(error), advice)
        for name in _AFTER_ENGINE:
            yield Check(name, "warn", "not looked at: no engine answers")
        return
    try:
        client.api.timeout = REQUEST_S
        info = client.api.info()
        local = str(client.api.base_url).startswith("http+docker://")
        yield _engine(client.api.version(), info)
        yield _storage_driver(info)
        yield _cgroups(info)
        yield _live_restore(info)
        yield _engine_disk(info, local)
        image = _base_image(client)
        yield image
        yield _container(client, image)
    finally:
        client.close()


def _engine(version: Mapping[str, Any], info: Mapping[str, Any]) -> Check:
    options = " ".join(info.get("SecurityOptions") or ())
    found = [
        f"{version.get('Version')} (API {version.get('ApiVersion')})",
        "rootless" if "name=rootless" in options else "runs as root",
        f"runsc {'is' if 'runsc' in (info.get('Runtimes') or {}) else 'is not'} among its runtimes",
    ]
    return Check(_ENGINE, "ok", ", ".join(found))


def _storage_driver(info: Mapping[str, Any]) -> Check:
    driver = str(info.get("Driver"))
    if driver in _QUICK_DRIVERS:
        return Check("storage driver", "ok", driver)
    return Check(
        "storage driver",
        "warn",
        f"{driver}: may copy the whole image for each container",
        'set "storage-driver": "overlay2" in the engine\'s daemon.json (its images are gone then)',
    )


def _cgroups(info: Mapping[str, Any]) -> Check:
    version = info.get("CgroupVersion") or "1"
    missing = [
        name
        for name, field in (("memory", "MemoryLimit"), ("pids", "PidsLimit"), ("cpu", "CpuCfsQuota"))
        if not info.get(field)
    ]
    # What the engine reports of swap is about version 1 alone.
    if not missing and version == "1" and not info.get("SwapLimit"):
        return Check(
            "cgroups",
            "warn",
            "version 1, without limits on swap",
            "boot with swapaccount=1, or turn swap off: sandboxes may swap beyond their memory",
        )
    if missing:
        return Check(
            "cgroups",
            "FAIL",
            f"version {version}, without {', '.join(missing)}: limits of sandboxes do not hold",
            "delegate these controllers to the engine (rootless: Delegate=cpu cpuset io memory pids in its unit)",
        )
    return Check(
        "cgroups", "ok", f"version {version} ({info.get('CgroupDriver')}), limits on memory, pids and cpu"
    )


def _live_restore(info: Mapping[str, Any]) -> Check:
    if info.get("LiveRestoreEnabled"):
        return Check("live-restore", "ok", "on")
    return Check(
        "live-restore",
        "warn",
        "off: a restart of the engine ends every episode that is under way",
        'set "live-restore": true in the engine\'s daemon.json and reload it',
    )


def _engine_disk(info: Mapping[str, Any], local: bool) -> Check:
    root = Path(str(info.get("DockerRootDir") or "/var/lib/docker"))
    if not local or not _is_there(root):
        return Check("engine disk", "warn", f"{root} is not visible from here", "look there with df")
    return free_space("engine disk", root, ENGINE_LOW_BYTES, "docker system df says what takes the space")


def _is_there(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _base_image(client: Any) -> Check:
    from docker.errors import DockerException, ImageNotFound

    from .swe.sandbox.images import UPSTREAM_IMAGE, base_image_tag

    tag = base_image_tag()
    try:
        size = int(client.api.inspect_image(tag)["Size"])
        return Check("base image", "ok", f"{tag}, {size / 1e6:.0f} MB")
    except ImageNotFound:
        pass
    build = "the first sandbox builds it; so does: python -m agentenv_envs.swe.sandbox.images"
    try:
        client.api.inspect_image(UPSTREAM_IMAGE)
        return Check("base image", "warn", f"not there; {UPSTREAM_IMAGE}, which it is built from, is", build)
    except ImageNotFound:
        pass
    try:
        client.api.inspect_distribution(UPSTREAM_IMAGE)
        return Check("base image", "warn", f"not there; a registry has {UPSTREAM_IMAGE} for it", build)
    except (DockerException, OSError):
        pass
    tool = shutil.which("debootstrap") or shutil.which("debootstrap", path="/usr/sbin:/sbin")
    if tool is not None and os.geteuid() == 0:
        found = f"not there; no registry answers for {UPSTREAM_IMAGE}, so it will be made of Debian packages"
        return Check("base image", "warn", found, build)
    return Check(
        "base image",
        "FAIL",
        f"not there, and no registry answers for {UPSTREAM_IMAGE}",
        "let the engine reach a registry, or install debootstrap and build it as root",
    )


def _container(client: Any, image: Check) -> Check:
    """Start a sandbox, see that it reaches no network, and remove it."""
    from .swe.sandbox import SandboxSpec
    from .swe.sandbox.docker_backend import DockerBackend
    from .swe.sandbox.images import base_image_tag

    if image.status != "ok":
        return Check("container", "warn", "not looked at: the base image is not there")
    try:
        backend = DockerBackend(client)
        atexit.register(backend.close)  # should the doctor not wait for what follows
        try:
            sandbox = backend.acquire(SandboxSpec(read_only=True, memory_mb=128))
            try:
                result = sandbox.run(_NETWORK_PROBE, timeout_s=4.0)
            finally:
                sandbox.close()
            left = backend.left()
        finally:
            backend.close()
            atexit.unregister(backend.close)
    except (SandboxError, UsageError) as error:
        return Check(
            "container", "FAIL", str(error), f"try: docker run --rm --network none {base_image_tag()} true"
        )
    interfaces, _, connection = result.output.partition("\n")
    if interfaces.split() != ["lo"] or "unreachable" not in connection:
        return Check(
            "container",
            "FAIL",
            f"a sandbox with network none has interfaces {interfaces!r}: {connection.strip()[-200:]}",
            "sandboxes of this engine are not cut off: do not run untrusted code in them",
        )
    if left:
        return Check("container", "FAIL", "a sandbox could not be removed", "docker ps -a shows it")
    return Check("container", "ok", "a sandbox starts, reaches no network, and is removed")
