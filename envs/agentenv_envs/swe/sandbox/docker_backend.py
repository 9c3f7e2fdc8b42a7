"""Sandboxes in Docker containers: hardened, labelled, pooled where a reset is possible.

Invariants:
- A sandbox is used again only after a reset that left nothing over; anything odd costs the container.
- No container outlives its owner for long: `close` removes all that the backend made, and what a killed process left
  is removed by the next backend that opens (`reap`).
- Where the root is writable, what a container writes is bounded (`disk.py`).
- At most 2 x processors containers start at a time: more would slow one another down.
"""

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from agentenv.errors import SandboxError, UsageError

from .base import BASE_IMAGE, EXIT_KILLED, CommandResult, OutputStream, Sandbox, SandboxSpec, as_bytes
from .disk import DiskWatch
from .driver import Driver
from .engine import connect, container_settings, engine_errors, fair_cgroup_parent
from .images import ensure_base_image
from .labels import BACKEND, SANDBOX, is_abandoned, owner_labels
from .pool import WarmPool

__all__ = ["DockerBackend", "DockerSandbox"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

PARALLEL_REMOVALS = 8
KILLS_BEFORE_RECYCLING = 2
"""Commands killed in a row (exit code 137: out of memory, mostly) after which a container is not used again."""


class DockerSandbox:
    """A container with its driver channel; see `Sandbox`."""

    kind = "docker"

    def __init__(
        self, api: Any, container_id: str, spec: SandboxSpec, on_close: Callable[["DockerSandbox"], object]
    ):
        self.id = container_id[:12]
        self.container_id = container_id
        self.spec = spec
        self._on_close = on_close
        self._kills = 0
        self._worn = False
        self._broken = False
        self._closed = False
        self._busy = False
        self.disk_used_mb: int | None = None
        """MiB on the engine's disk, where that is over the limit; `DiskWatch` says."""
        self._driver = Driver(api, container_id, spec, f"sandbox {self.id}")

    @property
    def reusable(self) -> bool:
        """True where a reset is worth trying; not while another thread runs something in it."""
        return self.spec.read_only and not (self._broken or self._closed or self._worn or self._busy)

    def run(
        self,
        command: str,
        *,
        timeout_s: float = 60.0,
        half_bytes: int = 4000,
        on_output: Callable[[str], None] | None = None,
    ) -> CommandResult:
        if timeout_s <= 0 or half_bytes < 1:
            raise ValueError(f"timeout_s={timeout_s!r}, half_bytes={half_bytes!r}: both must be positive")
        stream = None if on_output is None else OutputStream(on_output)
        result = self._guard(lambda: self._driver.run(command, timeout_s, half_bytes, stream))
        self._kills = self._kills + 1 if result.exit_code == EXIT_KILLED else 0
        self._worn = self._worn or self._kills >= KILLS_BEFORE_RECYCLING
        if self.disk_used_mb is not None:
            note = f"\n[files take {self.disk_used_mb} MiB, over the limit of {self.spec.disk_mb}: remove some]\n"
            result = replace(result, output=result.output + note)
        if stream is not None:
            stream.end()
        return result

    def write_files(self, files: Mapping[str, str | bytes]) -> None:
        content = as_bytes(files)
        self._guard(lambda: self._driver.write(content))

    def read_file(self, path: str, *, max_bytes: int = 1_000_000) -> bytes:
        return self._guard(lambda: self._driver.read(path, max_bytes))

    def reset(self, files: Mapping[str, str | bytes] | None = None) -> None:
        if not self.spec.read_only:
            raise SandboxError(f"sandbox {self.id}: only a sandbox with read_only=True can be reset")
        content = as_bytes(files or {})
        self._guard(lambda: self._driver.reset(content))

    def kill_all(self) -> None:
        """Kill all that runs in it, from any thread; a command that another thread waits for ends as killed.

        Raises:
            SandboxError: the engine does not do it.
        """
        self._driver.kill_all()

    def alive(self) -> bool:
        """True where the driver answers."""
        return not (self._broken or self._closed) and self._driver.ping()

    def close(self) -> None:
        if not self._closed:
            self.detach()
            self._on_close(self)

    def detach(self) -> None:
        """Close the channel and leave the container to the backend."""
        self._closed = True
        self._driver.close()

    def _guard(self, action: Callable[[], T]) -> T:
        """Run a request; after a `SandboxError`, or an interruption in its midst, the container is never used again."""
        if self._closed or self._broken:
            raise SandboxError(f"sandbox {self.id} is {'closed' if self._closed else 'broken'}")
        self._busy = True
        try:
            return action()
        except BaseException as error:
            if isinstance(error, SandboxError) or not isinstance(error, Exception):
                self._broken = True
            raise
        finally:
            self._busy = False


class DockerBackend:
    """Sandboxes from the Docker engine that the environment names (DOCKER_HOST, or the local socket).

    Args:
        client: a `docker.DockerClient`; by default one from the environment.
        max_starting: how many containers may be starting at a time.

    Raises:
        UsageError: no engine answers.
    """

    kind = "docker"

    def __init__(self, client: Any = None, *, max_starting: int | None = None) -> None:
        self._client = client if client is not None else connect()
        self._api = self._client.api
        self._id = uuid.uuid4().hex
        self._local_engine = str(self._api.base_url).startswith("http+docker://")
        with engine_errors("asking the Docker engine about itself"):
            self._cgroup_parent = fair_cgroup_parent(self._api.info())
        self._starting = threading.BoundedSemaphore(max_starting or 2 * (os.cpu_count() or 1))
        self._image_lock = threading.Lock()
        self._base_image: str | None = None
        self._pool: WarmPool[DockerSandbox] = WarmPool()
        self._live: set[DockerSandbox] = set()
        self._live_lock = threading.Lock()
        self._closed = False
        self._disk_watch = DiskWatch(self._api, f"{BACKEND}={self._id}", self._writable)
        self.reap()

    @property
    def client(self) -> Any:
        """The `docker.DockerClient`, for building images."""
        return self._client

    def acquire(self, spec: SandboxSpec) -> DockerSandbox:
        if self._closed:
            raise SandboxError("the sandbox backend is closed")
        while (sandbox := self._pool.take(spec)) is not None:
            if sandbox.alive():
                return sandbox
            logger.warning("sandbox %s vanished from the pool", sandbox.id)
            self._discard(sandbox)
        with self._starting:
            return self._start(spec)

    def release(self, sandbox: Sandbox) -> None:
        if not isinstance(sandbox, DockerSandbox):
            raise TypeError(f"a sandbox of the Docker backend is needed, not {type(sandbox).__name__}")
        if sandbox.reusable and not self._closed:
            try:
                sandbox.reset()
            except SandboxError as error:
                logger.warning("%s; the container is thrown away", error)
            else:
                if self._pool.put(sandbox.spec, sandbox):
                    return
        self._discard(sandbox)

    def left(self) -> int:
        with engine_errors("listing containers"):
            return len(self._containers(f"{BACKEND}={self._id}"))

    def reap(self) -> int:
        with engine_errors("listing containers"):
            found = self._containers(SANDBOX)
        dead = [item["Id"] for item in found if is_abandoned(item["Labels"], local_engine=self._local_engine)]
        if dead:
            logger.info("removing %d containers that dead processes left", len(dead))
        return self._remove(dead)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._disk_watch.close()
        self._pool.close()
        with self._live_lock:
            live = list(self._live)
        for sandbox in live:  # those that are in use, too: their commands end with a SandboxError
            sandbox.detach()
        try:
            # By label, not from memory: also what a start that failed half-way may have left.
            with engine_errors("listing containers"):
                mine = [item["Id"] for item in self._containers(f"{BACKEND}={self._id}")]
            self._remove(mine)
        finally:
            self._client.close()

    def _start(self, spec: SandboxSpec) -> DockerSandbox:
        image = self._image(spec.image)
        try:
            container_id = self._start_container(spec, image)
        except SandboxError as error:
            if self._cgroup_parent is None:
                raise
            logger.warning("%s; trying without cgroup parent %s", error, self._cgroup_parent)
            self._cgroup_parent = None
            container_id = self._start_container(spec, image)
        try:
            sandbox = DockerSandbox(self._api, container_id, spec, self._forget)
        except BaseException:
            self._remove_one(container_id)
            raise
        with self._live_lock:
            self._live.add(sandbox)
        if not spec.read_only:
            self._disk_watch.start()
        return sandbox

    def _start_container(self, spec: SandboxSpec, image: str) -> str:
        """Create and start a container; leaves none behind when it fails."""
        settings = container_settings(self._api, spec, image, owner_labels(self._id), self._cgroup_parent)
        with engine_errors(f"creating a container of {image}"):
            container_id = str(self._api.create_container(**settings)["Id"])
        try:
            with engine_errors(f"starting container {container_id[:12]} of {image}"):
                self._api.start(container_id)
        except BaseException:
            self._remove_one(container_id)
            raise
        return container_id

    def _writable(self) -> list[DockerSandbox]:
        with self._live_lock:
            return [sandbox for sandbox in self._live if not sandbox.spec.read_only]

    def _forget(self, sandbox: DockerSandbox) -> None:
        with self._live_lock:
            self._live.discard(sandbox)
        self._remove_one(sandbox.container_id)

    def _image(self, name: str) -> str:
        from docker.errors import ImageNotFound

        if name == BASE_IMAGE:
            with self._image_lock:
                self._base_image = self._base_image or ensure_base_image(self._client)
                return self._base_image
        with engine_errors(f"looking for the image {name}"):
            try:
                self._api.inspect_image(name)
            except ImageNotFound:
                raise UsageError(
                    f"image={name!r}: the Docker engine has no such image; pull or build it first"
                ) from None
        return name

    def _containers(self, label: str) -> list[dict[str, Any]]:
        return list(self._api.containers(all=True, filters={"label": label}))

    def _discard(self, sandbox: DockerSandbox) -> None:
        try:
            sandbox.close()
        except SandboxError as error:
            logger.warning("%s", error)

    def _remove(self, container_ids: Iterable[str]) -> int:
        ids = list(container_ids)
        if not ids:
            return 0
        try:
            with ThreadPoolExecutor(PARALLEL_REMOVALS, thread_name_prefix="sandbox-removal") as threads:
                return sum(threads.map(self._remove_one, ids))
        except RuntimeError:  # the interpreter is ending: no pool starts any more
            return sum(map(self._remove_one, ids))

    def _remove_one(self, container_id: str) -> bool:
        """Remove a container with its volumes; true if it is gone or going. Failures are logged: the reaper retries."""
        from docker.errors import APIError, NotFound

        try:
            self._api.remove_container(container_id, force=True, v=True)
        except NotFound:
            return True
        except APIError as error:
            if error.status_code == 409:  # another removal is under way
                return True
            logger.warning("container %s is not removed: %s", container_id[:12], error)
            return False
        except Exception as error:
            logger.warning("container %s is not removed: %s", container_id[:12], error)
            return False
        return True
