"""Paths and files that an agent's tools name, as the sandbox has them.

Invariants:
- what can't be done to a file is a `RefusalError` whose text says what is allowed; `SandboxError` passes through;
- nothing but a shell, `test`, `find` and `grep` is expected in the sandbox.
"""

import posixpath
import shlex
from typing import Final, Literal

from agentenv_envs.swe.sandbox import Sandbox

from .base import Limits

__all__ = ["MAX_FILE_BYTES", "RefusalError", "full_path", "kind_of", "read_text", "shell_path", "write_text"]

MAX_FILE_BYTES: Final = 1_000_000
"""Of a file that the tools read or write: what `Sandbox.read_file` returns at most by default."""
_MAX_PATH_BYTES = 4_000
_MAX_NAME_BYTES = 255
# What is read there would be the host's end of the sandbox, not what a command of the agent sees.
_KERNEL_FOLDERS = ("/proc", "/sys", "/dev")


class RefusalError(Exception):
    """A tool can't do what it was asked for; the text is for the agent."""


def full_path(path: str, sandbox: Sandbox) -> str:
    """A path that the agent named, absolute and without "..".

    Raises:
        RefusalError: no file can have it, or it lies where the kernel's own files are, or, where nothing isolates
            the sandbox, outside of its workdir.
    """
    workdir = sandbox.spec.workdir
    named = path.strip()
    if not named or "\0" in named:
        raise RefusalError("path is empty or holds a NUL character; name a file or a folder")
    full = posixpath.normpath(posixpath.join(workdir, named))
    full = "/" + full.lstrip("/")
    size = max(len(part.encode()) for part in full.split("/"))
    if len(full.encode()) > _MAX_PATH_BYTES or size > _MAX_NAME_BYTES:
        raise RefusalError(
            f"the path is too long: at most {_MAX_PATH_BYTES} bytes, {_MAX_NAME_BYTES} for each name"
        )
    if any(full == folder or full.startswith(folder + "/") for folder in _KERNEL_FOLDERS):
        raise RefusalError(f"{full} is not for this tool; use a shell command")
    # There the files of a tool and those of a command are the same in the workdir only.
    if sandbox.kind == "local-unisolated" and not (full == workdir or full.startswith(workdir + "/")):
        raise RefusalError(f"{full} is outside of {workdir}; this tool works inside it only")
    return full


def shell_path(full: str, workdir: str) -> str:
    """A path as a word of a command that runs in the workdir."""
    if full == workdir:
        return "."
    if full.startswith(workdir + "/"):
        return shlex.quote("./" + full[len(workdir) + 1 :])
    return shlex.quote(full)


def kind_of(full: str, sandbox: Sandbox, limits: Limits) -> Literal["file", "folder", "other", "missing"]:
    """What lies at a path."""
    try:
        sandbox.read_file(full, max_bytes=1)
        return "file"
    except OSError:
        pass
    word = shell_path(full, sandbox.spec.workdir)
    command = (
        f"if [ -d {word} ]; then exit 41; elif [ -e {word} ] || [ -L {word} ]; then exit 42; else exit 43; fi"
    )
    code = sandbox.run(command, timeout_s=limits.timeout_s).exit_code
    if code == 41:
        return "folder"
    return "missing" if code == 43 else "other"


def read_text(full: str, sandbox: Sandbox, limits: Limits) -> str:
    """A whole text file.

    Raises:
        RefusalError: there is none, or it is too large or no UTF-8 text.
    """
    try:
        data = sandbox.read_file(full, max_bytes=MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RefusalError(_why_not_read(full, sandbox, limits)) from error
    if len(data) > MAX_FILE_BYTES:
        raise RefusalError(
            f"{full} is over {MAX_FILE_BYTES} bytes; use a shell command (sed -n, grep -n) on parts of it"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise RefusalError(f"{full} is not UTF-8 text ({len(data)} bytes); use a shell command")
    return text


def write_text(full: str, text: str, sandbox: Sandbox) -> None:
    """Write a whole text file, with the folders that it needs.

    Raises:
        RefusalError: it is too large, or the sandbox can't write it.
    """
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_FILE_BYTES:
        raise RefusalError(f"{len(data)} bytes are too many for {full}; at most {MAX_FILE_BYTES}")
    try:
        sandbox.write_files({full: data})
    except OSError as error:
        raise RefusalError(f"{full} can't be written; choose another path") from error


def _why_not_read(full: str, sandbox: Sandbox, limits: Limits) -> str:
    kind = kind_of(full, sandbox, limits)
    if kind == "missing":
        return f"there is no file {full}"
    if kind == "folder":
        return f"{full} is a folder; only view shows one"
    return f"{full} can't be read as a file; use a shell command"
