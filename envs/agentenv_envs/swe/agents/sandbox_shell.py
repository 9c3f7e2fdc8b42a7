"""A shell and copies of files in a task's sandbox, for programs beside it whose tools would act where they run.

It needs nothing but Python's standard library, so that a program with an environment of its own can load it. DOCKER in
the environment names what is called as `docker` is (`container_cli`).

Invariants:

* Only commands in the sandbox read or write for the agent; on this machine nothing but a private folder, which has no
  links, and which no path of the agent's leads out of.
* A command is a bash of its own. Working directory and exported variables go on to the next one, processes do not.
"""

import base64
import os
import posixpath
import secrets
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Copies", "Sandbox", "Shell", "ShellResult"]

MAX_FILE_BYTES = 1_000_000
"""Of a copy; the sandbox's door cuts longer outputs."""
CHUNK = 90_000
"""Characters of a command's argument; the system takes 131,072 bytes."""
_FOLDER, _TOO_LARGE, _FILE, _NEW, _NOTHING = 20, 21, 22, 23, 24


class Sandbox:
    """What DOCKER leads to.

    Args:
        workdir: of the repository, as the agent is told. Where the sandbox is a folder of this machine, paths below it
            stand for that folder.
    """

    def __init__(self, workdir: str) -> None:
        self.workdir = workdir
        self._start = self.run("pwd")[1].strip()

    def run(self, command: str) -> tuple[int, str]:
        """Exit code and output, stdout and stderr together, of a bash."""
        argv = [os.environ["DOCKER"], "exec", "sandbox", "bash", "-c", command]
        done = subprocess.run(
            argv, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return done.returncode, done.stdout.decode("utf-8", "replace")

    def real(self, path: str) -> str:
        """Of a path that the agent names."""
        return _moved(path, self.workdir, self._start)

    def told(self, path: str) -> str:
        """The other way."""
        return _moved(path, self._start, self.workdir)


@dataclass(frozen=True)
class ShellResult:
    """What a command did."""

    exit_code: int
    output: str
    cwd: str
    """Where it ended, as the agent is told."""
    python: str | None
    """The `python` that is found there."""


class Shell:
    """Commands, each of which starts where the one before ended."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._cwd, self._variables = self._sandbox.real(self._sandbox.workdir), ""

    @property
    def cwd(self) -> str:
        """As the agent is told."""
        return self._sandbox.told(self._cwd)

    def run(self, command: str) -> ShellResult:
        """Run it to its end."""
        mark = f"agentenv-{secrets.token_hex(8)}"
        state = f'printf "\\n%s\\n%s\\n%s\\n" {mark} "$PWD" "$(command -v python)"; declare -px'
        before = f"{self._variables}\ncd {shlex.quote(self._cwd)} || exit 126\ntrap {shlex.quote(state)} EXIT"
        code, text = self._sandbox.run(f"{before}\n{command}")
        output, found, rest = text.rpartition(f"\n{mark}\n")
        if not found or rest.count("\n") < 2:  # it was killed, or set a trap of its own
            return ShellResult(code, text, self.cwd, None)
        self._cwd, python, self._variables = rest.split("\n", 2)
        return ShellResult(code, output.rstrip("\n"), self.cwd, python or None)


class Copies:
    """Copies of one file or folder at a time, in a private folder.

    Args:
        sandbox: that they are of.
        folder: is emptied each time.
    """

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self._sandbox, self.folder = sandbox, folder

    def fetch(self, path: str) -> Path:
        """The copy's place: a file; a folder, with names down to two levels and no contents; nothing where there is
        nothing.

        Raises:
            ValueError: the path is not absolute, or cannot be copied.
        """
        if not path.startswith("/"):
            raise ValueError(
                f"{path}: the path should be an absolute path. Maybe you meant {self._sandbox.workdir}/{path}?"
            )
        path = _normal(path)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        place = Path(f"{self.folder}{path}")
        code, output = self._sandbox.run(_reading(self._sandbox.real(path)))
        if code == _NOTHING:
            return place
        if code == _TOO_LARGE:
            raise ValueError(f"{path} is too large: {MAX_FILE_BYTES} bytes are allowed. Use the terminal.")
        if code not in (_FOLDER, _FILE, _NEW):
            raise ValueError(f"{path} cannot be read: {output}")
        place.parent.mkdir(parents=True, exist_ok=True)
        if code == _FILE:
            place.write_bytes(base64.b64decode(output))
        elif code == _FOLDER:
            place.mkdir(exist_ok=True)
            for entry in sorted(base64.b64decode(output).decode("utf-8", "replace").split("\0")[:-1]):
                item = place / entry[1:]
                item.parent.mkdir(parents=True, exist_ok=True)
                if entry[0] == "d":
                    item.mkdir(exist_ok=True)
                else:
                    item.touch()
        return place

    def store(self, path: str, data: bytes) -> None:
        """Write a file of the sandbox, in as many commands as its length needs.

        Raises:
            ValueError: it cannot be written.
        """
        text, name = base64.b64encode(data).decode(), shlex.quote(self._sandbox.real(_normal(path)))
        pieces = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)] or [""]
        for index, piece in enumerate(pieces):
            code, output = self._sandbox.run(
                f"printf %s '{piece}' | base64 -d {'>>' if index else '>'} {name}"
            )
            if code != 0:
                raise ValueError(f"{path} cannot be written: {output}")


def _reading(path: str) -> str:
    """A command that tells by its exit code what there is, and writes it in base64."""
    name, parent = shlex.quote(path), shlex.quote(posixpath.dirname(path))
    return f"""
        if [ -d {name} ]; then
            find -L {name} -mindepth 1 -maxdepth 2 -printf '%y%P\\0' 2>/dev/null | base64 -w0; exit {_FOLDER}
        elif [ -f {name} ]; then
            [ "$(stat -Lc %s {name})" -le {MAX_FILE_BYTES} ] || exit {_TOO_LARGE}
            base64 -w0 {name} && exit {_FILE}
        else
            [ -d {parent} ] && exit {_NEW}; exit {_NOTHING}
        fi"""


def _normal(path: str) -> str:
    """Without `.` and `..`, which so lead nowhere."""
    return "/" + posixpath.normpath(path).lstrip("/")


def _moved(path: str, old: str, new: str) -> str:
    inside = path == old or path.startswith(f"{old}/")
    return new + path[len(old) :] if inside else path
