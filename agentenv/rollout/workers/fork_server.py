"""The rollout's handle on a fork server (:mod:`agentenv.rollout.workers.process_main`).

Invariants:

* One server per set of modules to import; it lives as long as a worker needs it, and not longer.
* Nothing here blocks the caller: a thread of the server's own starts it and hands it the requests.
* A server that died is replaced at the next request; the workers of the old one see their control sockets end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading

from agentenv.errors import UsageError
from agentenv.rollout.workers.env_payload import Imports

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0
"""From the end of a worker to the killing of its process: the environment's time to close."""

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from agentenv.rollout.workers.process_main import main; main()"
)

_Request = tuple[socket.socket, socket.socket]


class ForkServer:
    """A server and its thread; both start with the first request. Use :func:`acquire` and :func:`release`.

    Args:
        imports: what the server imports before it forks.
    """

    def __init__(self, imports: Imports) -> None:
        self.users = 0
        self._imports = imports
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def fork(self, calls: socket.socket, control: socket.socket) -> None:
        """Have a process forked that owns these ends of two socket pairs; they are closed here."""
        if self._thread is None:
            # The kernel ties the server's life to this thread's.
            self._thread = threading.Thread(target=self._run, name="agentenv-fork-server", daemon=True)
            self._thread.start()
        self._requests.put((calls, control))

    def close(self) -> None:
        """End the server once its forks have ended; does not wait."""
        self._requests.put(None)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._send(request)
            except OSError as error:
                # A request that fails leaves the worker with a control socket that ends at once.
                if self._has_died():
                    self._end_server()
                    with contextlib.suppress(OSError):
                        self._send(request)
                else:
                    logger.warning("no process could be asked for: %s", error)
            finally:
                for end in request:
                    end.close()
        self._end_server()

    def _has_died(self) -> bool:
        if self._process is None:
            return False
        try:
            # Its socket ends a moment before it does.
            self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _send(self, request: _Request) -> None:
        if self._socket is None:
            self._start_server()
        assert self._socket is not None
        socket.send_fds(self._socket, [b"f"], [end.fileno() for end in request])

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair()
        settings = {
            "fd": theirs.fileno(),
            "parent": os.getpid(),
            "grace_s": CLOSE_GRACE_S,
            "code": _BOOTSTRAP,
            "path": [entry for entry in sys.path if isinstance(entry, str)],
            "argv": sys.argv,
            "modules": self._imports.modules,
            "main": self._imports.main,
            "preload": True,
        }
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOTSTRAP, json.dumps(settings)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        self._socket = ours

    def _end_server(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.wait()
            self._process = None


_servers: dict[tuple[int, Imports], ForkServer] = {}
_lock = threading.Lock()


def acquire(imports: Imports) -> ForkServer:
    """The server for environments that need these imports; to be given back by :func:`release`.

    Raises:
        UsageError: this platform can't fork.
    """
    if not (hasattr(os, "fork") and hasattr(os, "waitid")):
        raise UsageError(
            f"worker 'process' needs a platform with fork and waitid, which Python {sys.version.split()[0]} does not "
            f"have on {sys.platform}; use worker 'thread'"
        )
    with _lock:
        # A fork of this process has no thread for the servers that it inherits.
        server = _servers.setdefault((os.getpid(), imports), ForkServer(imports))
        server.users += 1
        return server


def release(server: ForkServer) -> None:
    """A user of the server is gone; the last one ends it."""
    with _lock:
        server.users -= 1
        if not server.users:
            for key in [key for key, value in _servers.items() if value is server]:
                del _servers[key]
            server.close()
