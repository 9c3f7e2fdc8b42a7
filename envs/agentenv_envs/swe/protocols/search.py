"""`search`: literal text in the files of a sandbox, by its own grep.

Invariants:
- a folder gives files with their number of lines, a file gives its lines;
- binary and hidden files of a folder are left out, as is what can't be read.
"""

import shlex
from collections.abc import Mapping
from typing import Any

from agentenv_envs.swe.sandbox import Sandbox

from .base import Limits, cut
from .paths import RefusalError, full_path, kind_of, shell_path

__all__ = ["search"]


def search(arguments: Mapping[str, Any], sandbox: Sandbox, limits: Limits) -> str:
    """Do what arguments that `functions.SEARCH` has checked say.

    Raises:
        RefusalError: it can't be done; the text says what is allowed.
        SandboxError: the sandbox is gone or does not answer.
    """
    term: str = arguments["search_term"].strip("\n")
    if not term or "\n" in term or "\0" in term:
        raise RefusalError("search_term has to be a text within one line")
    workdir = sandbox.spec.workdir
    path = full_path(arguments.get("path") or ".", sandbox)
    kind = kind_of(path, sandbox, limits)
    if kind not in ("file", "folder"):
        raise RefusalError(f"there is no file or folder {path}")
    word, wanted = shell_path(path, workdir), shlex.quote(term)
    if kind == "file":
        command = f"grep -nF -e {wanted} -- {word} || [ $? = 1 ]"
    else:
        command = (
            f"grep -rIcF --exclude-dir='.[!./]*' --exclude='.*' -e {wanted} -- {word} 2>/dev/null | "
            "sed -n -e '/:0$/d' -e 's/:\\([0-9]*\\)$/ (\\1)/p' | LC_ALL=C sort"
        )
    result = sandbox.run(command, timeout_s=limits.timeout_s, half_bytes=max(limits.chars // 2, 1))
    if result.timed_out:
        raise RefusalError("the search takes too long; name a smaller folder")
    if result.exit_code != 0:
        raise RefusalError(f"grep failed: {cut(result.output.strip(), 300)}")
    return result.output.rstrip("\n") or f"nothing in {path} holds this text"
