"""Sandboxes that a service lends: `RemoteBackend`, a `SandboxBackend` over HTTP.

Invariants:
- Leases are renewed in the background while this process lives; what it does not give back ends with its time to live.
- A new sandbox comes from the service with the least load; one that is down or full is passed over. A sandbox stays
  where it was made.
- Services of a cluster that join later are used; one that has gone is forgotten when no lease of it is left.
"""

import atexit
import hashlib
import itertools
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from agentenv.cluster.services import names_cluster
from agentenv.errors import SandboxError, SandboxTimeoutError, UsageError
from agentenv_envs.swe.data import SWETask
from agentenv_envs.swe.sandbox.base import Sandbox, SandboxSpec

from .addresses import service_urls, token_from_environment
from .endpoint import WAIT_S, Endpoint, ServiceDownError
from .remote_sandbox import RemoteSandbox
from .wire import Refusal

__all__ = ["RemoteBackend", "open_remote"]

logger = logging.getLogger(__name__)

TTL_S = 120.0
MAKING_TIMEOUT_S = 1800.0
"""Making a sandbox, its image included."""
LOOK_AGAIN_S = 15.0
"""Between two looks at the services of a cluster."""


def open_remote(text: str) -> "RemoteBackend":
    """A back-end over what `service_urls` takes; that of a cluster follows its services.

    Raises:
        UsageError: as of `service_urls` and `RemoteBackend`.
    """
    look_again = partial(service_urls, text) if names_cluster(text) else None
    return RemoteBackend(service_urls(text), look_again=look_again)


class RemoteBackend:
    """Sandboxes of one service or several; see `SandboxBackend`.

    Args:
        urls: of the services; they must be of one kind.
        token: of this client, the same for all of them; by default that of the environment.
        ttl_s: seconds after which a service ends the leases of a client that is gone.
        acquire_timeout_s: seconds for which a sandbox is waited for where all services are full or down.
        look_again: which services there are by now, where that may change.

    Raises:
        UsageError: a bad URL, no token or a refused one, or no service answers.
        MissingExtraError: httpx is not installed.
    """

    def __init__(
        self,
        urls: tuple[str, ...] | list[str],
        token: str | None = None,
        *,
        ttl_s: float = TTL_S,
        acquire_timeout_s: float = 120.0,
        look_again: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        token = token_from_environment() if token is None else token
        if not urls:
            raise UsageError("sandbox_url: at least one URL is needed")
        self._ttl_s, self._acquire_timeout_s = ttl_s, acquire_timeout_s
        self._endpoints = [Endpoint(url, token) for url in urls]
        self._token = token
        self._process = os.getpid()
        self._prefix = f"e{uuid.uuid4().hex[:15]}"
        self._numbers = itertools.count()
        self._recipes: dict[str, Mapping[str, Any]] = {}
        self._leases: dict[str, Endpoint] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        try:
            self.kind = self._greet()
        except BaseException:
            for endpoint in self._endpoints:
                endpoint.close()
            raise
        for endpoint in self._endpoints:
            self._start_renewal(endpoint)
        if look_again is not None:
            threading.Thread(target=self._follow, args=(look_again,), name="services", daemon=True).start()
        atexit.register(self.close)

    def acquire(self, spec: SandboxSpec) -> RemoteSandbox:
        deadline = time.monotonic() + self._acquire_timeout_s
        pause_s = 0.05
        while True:
            problems: list[Exception] = []
            for endpoint in sorted(self._endpoints, key=lambda endpoint: endpoint.rank):
                self._check_open()
                try:
                    return self._acquire_at(endpoint, spec)
                except (Refusal, UsageError) as problem:
                    problems.append(problem)
                except SandboxError as problem:
                    self._check_open()
                    if len(self._endpoints) == 1 and not isinstance(problem, ServiceDownError):
                        raise
                    endpoint.pass_over()  # one whose engine fails is the least loaded of all
                    problems.append(problem)
            if all(isinstance(problem, UsageError) for problem in problems):
                raise problems[0]  # no service makes such a one
            if time.monotonic() > deadline:
                raise SandboxError(
                    f"no sandbox within {self._acquire_timeout_s:g} s: " + "; ".join(map(str, problems))
                ) from problems[-1]
            self._ended.wait(pause_s)
            pause_s = min(1.0, 2 * pause_s)

    def release(self, sandbox: Sandbox) -> None:
        if not isinstance(sandbox, RemoteSandbox):
            raise TypeError(f"a sandbox of a service is needed, not {type(sandbox).__name__}")
        sandbox.close()

    def left(self) -> int:
        count, closed = 0, self._ended.is_set()
        for endpoint in self._endpoints:
            if closed:  # whoever has closed it may still ask
                endpoint = Endpoint(endpoint.url, self._token)
            try:
                _, value = endpoint.ask("GET", "/v1/sandboxes")
            finally:
                if closed:
                    endpoint.close()
            count += sum(str(item).startswith(self._prefix) for item in value["ids"])
        return count

    def reap(self) -> int:
        """Services reap by themselves."""
        return 0

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child: the leases are its parent's
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            leases = list(self._leases.items())
        if leases:
            try:
                with ThreadPoolExecutor(8, thread_name_prefix="lease-end") as threads:
                    list(threads.map(lambda lease: self._end(*lease, tries=2), leases))
            except RuntimeError:  # the interpreter is ending: no pool starts any more
                for lease in leases:
                    self._end(*lease, tries=2)
        for endpoint in self._endpoints:
            endpoint.close()
        atexit.unregister(self.close)

    def task_image(self, task: SWETask) -> str:
        """A name for a row's image, as `SandboxSpec.image`; each service makes the image when it is first asked for it.

        Args:
            task: the row.

        Raises:
            UsageError: the row brings its own source distribution, which no service is given.
        """
        if task.source_archive is not None:
            raise UsageError(
                f"{task.instance_id}: source_archive needs an engine on this machine (no sandbox_url)"
            )
        request = _image_request(task)
        name = task.image
        if name is None:
            digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:12]
            name = f"package:{task.package}-{digest}"
        self._recipes[name] = request
        return str(name)

    def _greet(self) -> str:
        """The kind of the services that answer."""
        kinds: dict[str, str] = {}
        problem: Exception | None = None
        for endpoint in self._endpoints:
            try:
                _, info = endpoint.ask("GET", "/v1/info", tries=2)
                kinds[endpoint.url] = str(info["kind"])
            except SandboxError as error:
                logger.warning("sandbox service: %s", error)
                problem = error
            except (KeyError, TypeError):
                raise UsageError(f"sandbox_url={endpoint.url!r}: this is no sandbox service") from None
        if not kinds:
            raise UsageError(f"no sandbox service answers: {problem}") from problem
        if len(set(kinds.values())) > 1:
            raise UsageError(f"sandbox_url: the services are of several kinds: {kinds}")
        return next(iter(kinds.values()))

    def _acquire_at(self, endpoint: Endpoint, spec: SandboxSpec) -> RemoteSandbox:
        # An answer that is lost must not hold up the others' turn: one try where there are others.
        tries = 1 if len(self._endpoints) > 1 else 2
        wanted = replace(spec, image=self._image_at(endpoint, spec.image, tries))
        lease_id = f"{self._prefix}-{next(self._numbers):06d}"
        body = {"spec": _spec_json(wanted), "ttl_s": self._ttl_s, "wait_s": WAIT_S}
        with self._lock:
            self._leases[lease_id] = endpoint
        endpoint.coming(1)
        try:
            self._ask_until_done(endpoint, f"/v1/sandboxes/{lease_id}", body, tries)
            self._check_open()
        except BaseException as error:
            with self._lock:
                self._leases.pop(lease_id, None)
            if not isinstance(error, Refusal | UsageError | ServiceDownError):
                self._end(lease_id, endpoint, tries=1)
            raise
        finally:
            endpoint.coming(-1)
        return RemoteSandbox(lease_id, self.kind, spec, endpoint, self._forget)

    def _image_at(self, endpoint: Endpoint, name: str, tries: int) -> str:
        """What the service's engine calls an image."""
        request = self._recipes.get(name)
        if request is None:
            return name
        if name not in endpoint.images:
            body = {"task": request, "wait_s": WAIT_S}
            endpoint.images[name] = str(self._ask_until_done(endpoint, "/v1/images", body, tries)["image"])
        return endpoint.images[name]

    def _ask_until_done(self, endpoint: Endpoint, path: str, body: Mapping[str, Any], tries: int) -> Any:
        deadline = time.monotonic() + MAKING_TIMEOUT_S
        while True:
            status, value = endpoint.ask("PUT", path, body, wait_s=WAIT_S, tries=tries)
            if status != 202:
                return value
            self._check_open()
            if time.monotonic() > deadline:
                raise SandboxTimeoutError(f"{endpoint.url}: {path} is not there in {MAKING_TIMEOUT_S:g} s")

    def _forget(self, sandbox: RemoteSandbox) -> None:
        with self._lock:
            known = self._leases.pop(sandbox.id, None)
        if known is not None and not self._ended.is_set():
            self._end(sandbox.id, sandbox.endpoint)

    def _end(self, lease_id: str, endpoint: Endpoint, *, tries: int = 3) -> None:
        """End a lease; where that fails, its time to live does."""
        try:
            endpoint.ask("DELETE", f"/v1/sandboxes/{lease_id}", wait_s=WAIT_S, tries=tries)
        except Exception as error:
            logger.info("lease %s ends by itself: %s", lease_id, error)

    def _follow(self, look_again: Callable[[], Sequence[str]]) -> None:
        while not self._ended.wait(LOOK_AGAIN_S):
            try:
                self._change_to(look_again())
            except Exception as error:  # nothing is known of any: all stay
                logger.warning("sandbox services are not looked for: %s", error)

    def _change_to(self, urls: Sequence[str]) -> None:
        """Take in services that are new, forget those that have gone and lend nothing to this client."""
        for url in dict.fromkeys(urls):
            if any(endpoint.url == url for endpoint in self._endpoints):
                continue
            endpoint = Endpoint(url, self._token)
            try:
                _, info = endpoint.ask("GET", "/v1/info", tries=1)
                if info["kind"] != self.kind:
                    raise UsageError(f"{url}: its kind is {info['kind']!r}, the others' {self.kind!r}")
            except Exception as error:
                logger.warning("sandbox service: %s", error)
                endpoint.close()
                continue
            with self._lock:
                if self._ended.is_set():
                    endpoint.close()
                    return
                self._endpoints = [*self._endpoints, endpoint]
            self._start_renewal(endpoint)
            logger.info("sandbox service: %s has joined", url)
        with self._lock:
            lending = set(self._leases.values())
            gone = [item for item in self._endpoints if item.url not in urls and item not in lending]
            if len(gone) < len(self._endpoints):
                self._endpoints = [item for item in self._endpoints if item not in gone]
            else:
                gone = []
        for endpoint in gone:
            endpoint.close()
            logger.info("sandbox service: %s has gone", endpoint.url)

    def _start_renewal(self, endpoint: Endpoint) -> None:
        threading.Thread(
            target=self._renew, args=(endpoint,), name=f"lease-renewal {endpoint.url}", daemon=True
        ).start()

    def _renew(self, endpoint: Endpoint) -> None:
        while not self._ended.wait(self._ttl_s / 4) and endpoint in self._endpoints:
            with self._lock:
                ids = [lease_id for lease_id, where in self._leases.items() if where is endpoint]
            if not ids:
                continue
            try:
                _, value = endpoint.ask("POST", "/v1/renew", {"ids": ids}, tries=2)
            except Exception as error:
                logger.warning("leases are not renewed: %s", error)
                continue
            if value["lost"]:
                logger.warning("%s has ended %d leases", endpoint.url, len(value["lost"]))

    def _check_open(self) -> None:
        if self._ended.is_set():
            raise SandboxError("the sandbox backend is closed")


def _spec_json(spec: SandboxSpec) -> dict[str, Any]:
    return asdict(replace(spec, environment=dict(spec.environment)))


def _image_request(task: SWETask) -> dict[str, Any]:
    """What a client sends for a row's image."""
    if task.package is None:
        return {"image": task.image}
    return {
        "instance_id": task.instance_id,
        "package": task.package,
        "install": list(task.install),
        "source_root": task.source_root,
        "workdir": task.workdir,
    }
