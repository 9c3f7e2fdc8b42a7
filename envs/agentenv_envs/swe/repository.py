"""The repository that an agent works in, and what comes out of it: a patch.

Invariants:
- The repository has one commit when the agent gets it, with a row's `bug_patch` applied: no object of it holds
  the fix; later commits of the agent change nothing in the
  patch, which is taken against that first one.
- A patch that is graded changes no file that decides what a test is or how tests run (`is_protected`): such
  files are as in the base commit, whatever the patch says. New files that hide an installed module are left out
  (`shadows.py`).
"""

from __future__ import annotations

import logging
import re
import secrets
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from agentenv.errors import SandboxError

from .package_folder import ensure_package_folder
from .package_image import ensure_task_image
from .sandbox import Sandbox, SandboxBackend, SandboxSpec
from .task import SWETask

__all__ = [
    "apply_agent_patch",
    "is_protected",
    "open_workspace",
    "patched_paths",
    "restore_hidden",
    "scratch_folder",
    "workspace_patch",
]

logger = logging.getLogger(__name__)

MAX_PATCH_BYTES = 2_000_000
BASE_REF = "refs/agentenv/base"
BUG_PATCH = ".git/agentenv-bug.patch"

_CONFIG_FILES = frozenset(
    (
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
    )
)
# Python imports these at its start from anywhere on the path.
_STARTUP_MODULES = frozenset(("sitecustomize", "usercustomize"))
_TEST_FOLDERS = frozenset(("test", "tests"))
_GIT_TIMEOUT_S = 300.0

# A release with a bug brought in: a new history, in which no file is left out and the fix never was.
_APPLY_BUG = f"git apply --whitespace=nowarn {BUG_PATCH} || exit 1\n"
_BUG_IN = f"""\
git apply --whitespace=nowarn {BUG_PATCH} && rm -rf .git && git init -q && git add -A -f &&
export GIT_AUTHOR_DATE='2000-01-01T00:00:00Z' GIT_COMMITTER_DATE='2000-01-01T00:00:00Z' &&
git -c user.name=agentenv -c user.email=agentenv@localhost commit -q --no-verify -m 'Base' || exit 1
"""
# A published image's history may hold the fix, also where no branch leads to it; a package image has one commit.
_ONE_COMMIT = f"""\
if [ "$published" ] || [ "$(git rev-list --all --count 2>/dev/null)" != 1 ]; then
  rm -rf .git && git init -q && git add -A &&
  git -c user.name=agentenv -c user.email=agentenv@localhost commit -q --no-verify -m 'Base' || exit 1
fi
printf '%s\\n' '__pycache__/' '*.py[cod]' '.pytest_cache/' '.hypothesis/' >>.git/info/exclude
git update-ref {BASE_REF} HEAD
"""
# Images of SWE-bench and of its relatives have the repository's Python in an environment that no shell activates.
_CONDA_IMAGE = re.compile(r"sweb\.eval\.|swesmith\.")
_CONDA = {
    "PATH": "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:"
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
}
# What an agent must not see leaves the repository before it is committed; the archive leaves with the agent's shell.
_HIDE = """\
present=()
for path in @PATHS@; do if [ -e "$path" ] || [ -L "$path" ]; then present+=("$path"); fi; done
hidden="$(mktemp)" && tar -cPf "$hidden" --files-from /dev/null -- "${present[@]}" || exit 1
trap 'rm -f "$hidden"' EXIT
rm -rf -- "${present[@]}" || exit 1
"""


def open_workspace(
    task: SWETask,
    backend: SandboxBackend,
    *,
    progress: Callable[[str], None] | None = None,
    stash: str | None = None,
) -> Sandbox:
    """A fresh sandbox with the task's repository; the caller gives it back with `backend.release`.

    Args:
        task: the row.
        backend: where the sandbox comes from.
        progress: called with one line per step where an image has to be built.
        stash: for a grading run, a path in `.git` to which the task's hidden files go; None for an agent, whose
            sandbox does not hold them at all.

    Raises:
        UsageError: the back-end can't hold real repositories.
        SandboxError: the image or the sandbox could not be made.
    """
    layout = "published=\n" if task.package is not None else "published=1\n"
    if backend.kind == "docker":
        large = task.package is None
        spec = SandboxSpec(
            image=ensure_task_image(task, backend, progress=progress),
            workdir=task.workdir,
            memory_mb=4096 if large else 1024,
            cpus=2.0 if large else 1.0,
            pids=512 if large else 256,
            environment=_CONDA if task.image is not None and _CONDA_IMAGE.search(task.image) else {},
        )
    else:
        folder = ensure_package_folder(task, progress=progress)
        spec = SandboxSpec(workdir=task.workdir, memory_mb=4096, environment=folder.variables(task))
        layout += f"cp -a {shlex.quote(str(folder.repository))}/. . || exit 1\n"
    sandbox = backend.acquire(spec)
    try:
        if task.bug_patch:
            # `layout` may put a repository's folder where this one lies, so it comes first.
            copied = sandbox.run(layout, timeout_s=_GIT_TIMEOUT_S)
            if copied.exit_code != 0:
                raise SandboxError(f"{task.instance_id}: no repository: {copied.output.strip()[-500:]}")
            sandbox.write_files({BUG_PATCH: task.bug_patch.rstrip("\n") + "\n"})
            layout = "published=\n" + _BUG_IN if task.package is not None else f"published=1\n{_APPLY_BUG}"
        if task.hidden:
            layout += _HIDE.replace("@PATHS@", shlex.join(task.hidden))
        keep = f'mv -f "$hidden" {stash} || exit 1\n' if task.hidden and stash else ""
        result = sandbox.run(layout + _ONE_COMMIT + keep, timeout_s=_GIT_TIMEOUT_S)
        if result.exit_code != 0:
            raise SandboxError(
                f"{task.instance_id}: the repository in {task.workdir} can't be prepared "
                f"(exit code {result.exit_code}): {result.output.strip()[-500:]}"
            )
    except BaseException:
        backend.release(sandbox)
        raise
    return sandbox


def workspace_patch(sandbox: Sandbox) -> str:
    """What the agent changed since `open_workspace`, as a binary-safe unified diff without renames.

    An agent that breaks its own repository, or fills it with more than `MAX_PATCH_BYTES` of changes, has
    made no patch: the result is "" then, with a line in the log.

    Raises:
        SandboxError: the sandbox does not answer.
    """
    out = f"{scratch_folder()}.patch"
    # The agent owns this repository's configuration: nothing of it may change what the diff says.
    diff = (
        "git -c core.quotePath=true diff --cached --binary --no-renames --no-color --no-ext-diff "
        f"--no-textconv --src-prefix=a/ --dst-prefix=b/ {BASE_REF}"
    )
    result = sandbox.run(
        f"rm -f .git/index.lock; git add -A && {diff} >{out} && stat -c %s {out}",
        timeout_s=_GIT_TIMEOUT_S,
    )
    lines = result.output.split()
    if result.exit_code != 0 or not lines or not lines[-1].isdigit():
        logger.warning("%s: the repository gives no patch: %s", sandbox.id, result.output.strip()[-500:])
        return ""
    size = int(lines[-1])
    if size > MAX_PATCH_BYTES:
        logger.warning("%s: a patch of %d bytes is over the limit of %d", sandbox.id, size, MAX_PATCH_BYTES)
        return ""
    try:
        patch = sandbox.read_file(out, max_bytes=MAX_PATCH_BYTES)
    except FileNotFoundError:  # `git` and `stat` may be the agent's own by now
        logger.warning("%s: the patch is not where git was told to write it", sandbox.id)
        return ""
    return patch.decode("utf-8", "surrogateescape")


def is_protected(path: str, test_files: Iterable[str]) -> bool:
    """Whether a path decides what the tests are or how they run.

    Protected are: the tests' own files, what could be imported in their place, and what lies in their folders
    `test` or `tests`; configuration of pytest (`conftest.py`, `pytest.ini`, `tox.ini`, `setup.cfg`,
    `pyproject.toml`, anywhere); what Python reads at its start (`sitecustomize`, `usercustomize`, `*.pth`); byte
    code; and metadata of installed packages, which can register plug-ins.

    Args:
        path: relative to the repository.
        test_files: the same, of the files that the row names.
    """
    pure = PurePosixPath(path)
    if pure.name in _CONFIG_FILES or pure.suffix in (".pth", ".pyc", ".pyo"):
        return True
    for part in pure.parts:
        if part == "__pycache__" or part.endswith((".egg-info", ".dist-info")):
            return True
        if part.split(".")[0] in _STARTUP_MODULES:
            return True
    for name in test_files:
        folder = _test_folder(name)
        # A folder or a compiled module of the name would be imported instead of the file.
        module = name.removesuffix(".py")
        if path in (name, module) or (module != name and path.startswith((f"{module}/", f"{module}."))):
            return True
        if folder is not None and (path == folder or path.startswith(folder + "/")):
            return True
    return False


def apply_agent_patch(
    sandbox: Sandbox, patch: str, test_files: Iterable[str], *, setup: str = ""
) -> tuple[str | None, list[str]]:
    """Apply an agent's patch to a fresh workspace and put protected files back to the base commit.

    Args:
        sandbox: from `open_workspace`, untouched since.
        patch: a unified diff; "" changes nothing.
        test_files: the row's test files.
        setup: what a shell runs to have the repository's Python.

    Returns:
        why the patch can't be used (None where it can), and the protected paths that it had changed.

    Raises:
        SandboxError: it does not answer, or has no Python.
    """
    test_files = tuple(test_files)
    if not patch.strip():
        return None, []
    content = patch.encode("utf-8", "surrogateescape")
    if len(content) > MAX_PATCH_BYTES:
        return f"the patch has {len(content)} bytes, over the limit of {MAX_PATCH_BYTES}", []
    scratch = scratch_folder()
    patch_path, listing = f"{scratch}/agent.patch", f"{scratch}/restore"
    sandbox.write_files({patch_path: content if content.endswith(b"\n") else content + b"\n"})
    result = sandbox.run(f"git apply --whitespace=nowarn {patch_path}", timeout_s=_GIT_TIMEOUT_S)
    if result.exit_code != 0:
        return f"the patch does not apply: {result.output.strip()[-500:]}", []
    paths = patched_paths(sandbox, patch_path)
    shadows = _shadows(sandbox, paths, test_files, scratch, setup)
    restored = [name for name in paths if name in shadows or is_protected(name, test_files)]
    if not restored:
        return None, []
    sandbox.write_files(
        {listing: "".join(f"{name}\0" for name in restored).encode("utf-8", "surrogateescape")}
    )
    # All are removed before one is restored: a folder of tests may have become a link or a file.
    result = sandbox.run(
        f"export GIT_LITERAL_PATHSPECS=1 && xargs -0 rm -rf -- <{listing} && "
        "while IFS= read -r -d '' path; do "
        'if git cat-file -e "HEAD:$path" 2>/dev/null; then git checkout -q HEAD -- "$path" || exit 1; fi; '
        f"done <{listing}",
        timeout_s=_GIT_TIMEOUT_S,
    )
    if result.exit_code != 0:
        return f"files of the tests can't be restored: {result.output.strip()[-500:]}", restored
    return None, restored


def _shadows(
    sandbox: Sandbox, paths: Iterable[str], test_files: Iterable[str], scratch: str, setup: str
) -> frozenset[str]:
    """Those of the paths that are new and would be imported in the place of an installed module."""
    listing = f"{scratch}/paths"
    sandbox.write_files(
        {
            listing: "".join(f"{name}\0" for name in paths).encode("utf-8", "surrogateescape"),
            f"{scratch}/shadows.py": Path(__file__).with_name("shadows.py").read_bytes(),
        }
    )
    result = sandbox.run(
        f"{setup}\n"
        "while IFS= read -r -d '' path; do "
        f'git cat-file -e "HEAD:$path" 2>/dev/null || printf \'%s\\0\' "$path"; done <{listing} >{listing}.new; '
        f"python -I {scratch}/shadows.py {listing}.new {shlex.join(test_files)} >{listing}.shadows",
        timeout_s=_GIT_TIMEOUT_S,
    )
    if result.exit_code != 0:
        raise SandboxError(
            f"{sandbox.id}: the new modules of a patch can't be looked at: {result.output.strip()[-500:]}"
        )
    found = sandbox.read_file(f"{listing}.shadows", max_bytes=2 * MAX_PATCH_BYTES)
    return frozenset(name for name in found.decode("utf-8", "surrogateescape").split("\0") if name)


def restore_hidden(sandbox: Sandbox, task: SWETask, stash: str) -> None:
    """Bring the task's hidden files back, whatever lies in their places.

    Args:
        sandbox: from `open_workspace(..., stash=stash)`.
        task: the row.
        stash: the same.

    Raises:
        SandboxError: it failed.
    """
    if not task.hidden:
        return
    command = f"rm -rf -- {shlex.join(task.hidden)} && tar -xPf {stash}"
    result = sandbox.run(command, timeout_s=_GIT_TIMEOUT_S)
    if result.exit_code != 0:
        raise SandboxError(
            f"{sandbox.id}: hidden files can't be brought back: {result.output.strip()[-500:]}"
        )


def patched_paths(sandbox: Sandbox, patch_path: str) -> list[str]:
    """Paths that a patch names, as git reads it, and tracked files that differ from the base commit now.

    Once the patch is applied, the second part holds the old names of files that it renames.

    Args:
        sandbox: from `open_workspace`.
        patch_path: a patch in the sandbox, applied or applicable.

    Raises:
        SandboxError: git can't read the patch.
    """
    out = f"{patch_path}.names"
    result = sandbox.run(
        f"set -o pipefail; {{ git apply --numstat -z {patch_path} | sed -z 's/^[^\\t]*\\t[^\\t]*\\t//' && "
        f"git diff --no-renames --name-only -z HEAD; }} >{out}",
        timeout_s=_GIT_TIMEOUT_S,
    )
    if result.exit_code != 0:
        raise SandboxError(f"{sandbox.id}: git can't list the changes: {result.output.strip()[-500:]}")
    names = sandbox.read_file(out, max_bytes=2 * MAX_PATCH_BYTES).decode("utf-8", "surrogateescape")
    return list(dict.fromkeys(name for name in names.split("\0") if name))


def scratch_folder() -> str:
    """A path for files of the grader, relative to the workdir; the agent's code can't know it.

    It lies inside `.git`, where no patch reaches and no test looks, and needs no path outside the workdir.
    """
    return f".git/agentenv-{secrets.token_hex(8)}"


def _test_folder(test_file: str) -> str | None:
    """The outermost folder of a test file that is named as one of tests."""
    parts = PurePosixPath(test_file).parts[:-1]
    for number, part in enumerate(parts, 1):
        if part in _TEST_FOLDERS or (number == 1 and part == "testing"):
            return "/".join(parts[:number])
    return None
