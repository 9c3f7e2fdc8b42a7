"""Images of rows, made on the server's side: pulled, or built from a release.

Invariants:
- A request carries the few fields of a row that make its image, each of a closed alphabet; it carries no recipe.
- Nothing is pulled that the allow list lacks. Nothing is built unless the service was started with packages allowed:
  building a release runs its build script in the service, next to the engine's socket.
- Equal requests share one build.
"""

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from agentenv.errors import UsageError
from agentenv_envs.swe.data import SWETask
from agentenv_envs.swe.sandbox.base import SandboxBackend

from .leases import Outcome
from .limits import Fields, ServiceLimits
from .wire import Refusal

__all__ = ["TaskImages"]

MAX_WAITING = 64
MAX_KNOWN = 4096
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,199}")
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,98}[A-Za-z0-9])?==[A-Za-z0-9][A-Za-z0-9_.!+-]{0,99}")
# A name, extras and versions: neither an option of pip nor an address.
_REQUIREMENT = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_.-]*(\[[A-Za-z0-9_.,-]*\])?( ?(===?|[<>!~]=|[<>]) ?[A-Za-z0-9_.*+!-]+,?)*"
)
_FOLDER = re.compile(r"(?!.*(^|/)\.\.(/|$))[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_WORKDIR = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*){1,8}")


class TaskImages:
    """The images that a service makes for its clients.

    Args:
        backend: a Docker back-end.
        limits: which images may be pulled, and whether any may be built.
        ensure: makes a row's image and returns its name; `package_image.ensure_task_image` by default.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        limits: ServiceLimits,
        ensure: Callable[[SWETask, SandboxBackend], str] | None = None,
    ) -> None:
        self._backend, self._limits, self._ensure = backend, limits, ensure
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="task-image")
        self._lock = threading.Lock()
        self._made: dict[SWETask, Future[Outcome]] = {}

    def request(self, value: object) -> "Future[Outcome]":
        """The name of the image, as soon as it is there.

        Raises:
            UsageError: a field is not what it has to be, or the image is not allowed.
            Refusal: packages are not allowed.
        """
        task = self._task(value)
        with self._lock:
            future = self._made.get(task)
            if future is None or (future.done() and future.result().error is not None):
                if sum(not made.done() for made in self._made.values()) >= MAX_WAITING:
                    raise Refusal("busy", f"{MAX_WAITING} images are waiting to be made")
                if len(self._made) >= MAX_KNOWN:  # a request for one that is there costs little
                    self._made = {task: made for task, made in self._made.items() if not made.done()}
                future = self._made[task] = self._threads.submit(self._make, task)
            return future

    def close(self) -> None:
        """Begin no more builds."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make(self, task: SWETask) -> Outcome:
        try:
            if self._ensure is not None:
                return Outcome(self._ensure(task, self._backend))
            from agentenv_envs.swe.package_image import ensure_task_image

            return Outcome(ensure_task_image(task, self._backend))
        except Exception as error:
            return Outcome(error=error)

    def _task(self, value: object) -> SWETask:
        given = Fields(value, "task")
        if isinstance(value, dict) and "image" in value:
            image = self._limits.image(given.text("image"))
            given.done()
            return _task(image, image=image)
        if not self._limits.packages:
            raise Refusal(
                "forbidden",
                "this service builds no images of package rows (agentenv sandbox serve --allow-packages)",
            )
        install = given.take("install", [])
        texts = {
            "instance_id": (_ID, given.text("instance_id")),
            "package": (_PACKAGE, given.text("package")),
            "source_root": (_FOLDER, given.text("source_root", ".")),
            "workdir": (_WORKDIR, given.text("workdir", "/testbed")),
        }
        given.done()
        for name, (pattern, text) in texts.items():
            if not pattern.fullmatch(text):
                raise given.error(name, text, f"a value of the form {pattern.pattern} is needed")
        if not isinstance(install, list) or len(install) > 200:
            raise given.error("install", install, "a list of at most 200 requirements is needed")
        for item in install:
            if not isinstance(item, str) or len(item) > 200 or not _REQUIREMENT.fullmatch(item):
                raise given.error("install", item, "requirements such as 'pytest<8' are needed")
        return _task(
            texts["instance_id"][1],
            package=texts["package"][1],
            install=tuple(install),
            source_root=texts["source_root"][1],
            workdir=texts["workdir"][1],
        )


def _task(instance_id: str, **fields: Any) -> SWETask:
    """A row of which the image alone matters."""
    try:
        return SWETask(
            instance_id=instance_id,
            problem_statement="",
            patch="",
            test_patch="",
            fail_to_pass=(),
            pass_to_pass=(),
            test_files=(),
            **fields,
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"task: {error}") from None
