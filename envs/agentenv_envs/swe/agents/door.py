"""A door to one sandbox for programs beside it: a socket in a private folder, and an executable that knocks at it.

Invariants:

* Commands run one after another, each within its time: a sandbox belongs to one thread at a time.
* After :meth:`SandboxDoor.close` no command runs, and folder and socket are gone. A command that is running then is
  waited for, within its time.
* A sandbox that broke is kept as :attr:`SandboxDoor.error`: it is no fault of the agent's.
"""

import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentenv.errors import SandboxError
from agentenv_envs.swe.sandbox import Sandbox

from . import container_cli

__all__ = ["SandboxDoor"]

_REQUEST_BYTES = 8 << 20
_REQUEST_TIMEOUT_S = 30.0
_SHELLS = (["bash", "-c"], ["bash", "-lc"], ["sh", "-c"], ["sh", "-lc"])


class SandboxDoor:
    """Opens at once.

    Args:
        sandbox: that commands run in; not used by anybody else until :meth:`close`.
        command_timeout_s: of each command.
        deadline: of ``time.monotonic``: no command runs longer.
        output_bytes: how much of a command's output comes back, half from its head and half from its tail.
    """

    def __init__(
        self, sandbox: Sandbox, *, command_timeout_s: float, deadline: float, output_bytes: int = 2 << 20
    ) -> None:
        self._sandbox, self._timeout_s, self._deadline = sandbox, command_timeout_s, deadline
        self._half_bytes = max(1, output_bytes // 2)
        self.error: SandboxError | None = None
        """What the sandbox broke of; None: it did not."""
        self.commands = 0
        """How many were run."""
        self._closing = False
        self.folder = Path(tempfile.mkdtemp(prefix="agentenv-door-"))
        """Private; also for what the program keeps. Removed at the end."""
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(self.folder / "door"))
            self._listener.listen(16)
            self._listener.settimeout(0.1)
            self.executable = self.folder / "container"
            """In the place of ``docker``."""
            script = shlex.quote(str(Path(container_cli.__file__)))
            self.executable.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {script} "$@"\n')
            self.executable.chmod(0o700)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._thread = threading.Thread(target=self._serve, name="agentenv-sandbox-door", daemon=True)
        self._thread.start()

    @property
    def variables(self) -> dict[str, str]:
        """What the program's environment needs."""
        return {container_cli.DOOR: str(self.folder / "door")}

    def close(self) -> None:
        """Close it; idempotent."""
        self._closing = True
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _serve(self) -> None:
        while not self._closing:
            try:
                visitor, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            with visitor, suppress(OSError):  # who knocked has gone
                visitor.settimeout(_REQUEST_TIMEOUT_S)
                answer = self._answer(_read(visitor))
                visitor.sendall(json.dumps(answer).encode())

    def _answer(self, request: Any) -> dict[str, Any]:
        command = _command(request, self._sandbox.spec.workdir)
        left_s = min(self._timeout_s, self._deadline - time.monotonic())
        if command is None or self._closing or left_s <= 0:
            reason = "not a command" if command is None else "the time is over"
            return {"output": f"container: {reason}\n", "exit_code": container_cli.EXIT_USAGE}
        try:
            result = self._sandbox.run(command, timeout_s=left_s, half_bytes=self._half_bytes)
        except SandboxError as error:
            self.error = error
            return {"output": "container: the sandbox broke\n", "exit_code": container_cli.EXIT_USAGE}
        self.commands += 1
        note = f"\n[timed out after {left_s:g} s]\n" if result.timed_out else ""
        return {"output": result.output + note, "exit_code": result.exit_code}


def _read(visitor: socket.socket) -> Any:
    data = bytearray()
    while not data.endswith(b"\n") and len(data) <= _REQUEST_BYTES:
        piece = visitor.recv(1 << 16)
        if not piece:
            break
        data += piece
    try:
        return json.loads(data)
    except ValueError:
        return None


def _command(request: Any, workdir: str) -> str | None:
    """The text for bash; None: the request is none."""
    argv = request.get("argv") if isinstance(request, dict) else None
    if not isinstance(argv, list) or not argv or not all(isinstance(part, str) for part in argv):
        return None
    # The sandbox runs texts with bash itself: one shell is enough.
    text = argv[-1] if argv[:-1] in _SHELLS else shlex.join(argv)
    before = [
        f"export {name}={shlex.quote(str(value))}" for name, value in (request.get("env") or {}).items()
    ]
    directory = request.get("workdir")
    if isinstance(directory, str) and os.path.normpath(directory) != os.path.normpath(workdir):
        before.append(f"cd {shlex.quote(directory)} || exit 126")
    return "\n".join([*before, text])
