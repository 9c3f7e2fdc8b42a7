"""A package row without a container engine: an environment and a repository in folders of this machine.

For the sandbox `local-unisolated`, which a user has to ask for: the row's code runs with all the rights of
the user.

Invariants:
- A folder is built once per recipe, under the user's cache, and then only read: each sandbox copies the
  repository.
- The repository is the same as in an image: one commit, no hidden tests.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import SandboxError, UsageError

from .data import SWETask
from .package_image import REPOSITORY_SCRIPT, package_image_tag
from .package_wheels import TargetPython, fetch_package, last_lines, requirements_file, run_on_host
from .sandbox.images import build_lock

__all__ = ["PackageFolder", "ensure_package_folder"]

_STEP_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class PackageFolder:
    """Where a package row lies on this machine.

    Attributes:
        path: holds `environment` (a virtual environment) and `repository`.
    """

    path: Path

    @property
    def repository(self) -> Path:
        """A git repository with one commit, to be copied."""
        return self.path / "repository"

    def variables(self, task: SWETask) -> dict[str, str]:
        """Variables with which commands that start in a copy of the repository use the environment."""
        folders = [str(self.path / "environment" / "bin"), "/usr/local/bin", "/usr/bin", "/bin"]
        return {
            "PATH": os.pathsep.join(folders),
            "PYTHONPATH": task.source_root,  # relative: each sandbox has its copy elsewhere
            "PYTHONDONTWRITEBYTECODE": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_SYSTEM": "/dev/null",
        }


def ensure_package_folder(task: SWETask, *, progress: Callable[[str], None] | None = None) -> PackageFolder:
    """The folder of a package row; builds it where the cache lacks it.

    Args:
        task: a package row.
        progress: called with one line per step of a build.

    Raises:
        UsageError: the row needs an image, or its `source_root` is wrong.
        SandboxError: pip, git or another step failed.
    """
    if task.package is None:
        raise UsageError(f"{task.instance_id}: a row with an image ({task.image}) needs the docker sandbox")
    tag = package_image_tag(task, f"{sys.version} {sys.base_prefix}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentenv" / "packages"
    folder = PackageFolder(cache / hashlib.sha256(tag.encode()).hexdigest()[:16])
    complete = folder.path / "complete"
    with build_lock(str(folder.path)):
        if not complete.is_file():
            if progress is not None:
                progress(f"{task.instance_id}: fetching {task.package} and its wheels into {folder.path}")
            shutil.rmtree(folder.path, ignore_errors=True)
            folder.path.mkdir(parents=True)
            _build(task, folder)
            complete.touch()
    return folder


def _build(task: SWETask, folder: PackageFolder) -> None:
    environment = folder.path / "environment"
    with tempfile.TemporaryDirectory(prefix="agentenv-package-") as name:
        fetched = fetch_package(task, TargetPython.of_host(), Path(name))
        listing = Path(name) / "requirements.txt"
        listing.write_text(requirements_file(task))
        _run(task, [sys.executable, "-m", "venv", "--without-pip", str(environment)])
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        pip += ["--python", str(environment / "bin/python"), "install", "--no-index"]
        _run(task, [*pip, "--find-links", str(Path(name) / "wheels"), "-r", str(listing)])
        _run(
            task,
            ["bash", "-c", REPOSITORY_SCRIPT],
            {"SDIST": str(fetched.sdist), "TESTBED": str(folder.repository), "PACKAGE": str(task.package)},
        )


def _run(task: SWETask, command: list[str], variables: Mapping[str, str] | None = None) -> None:
    settings = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", **(variables or {})}
    try:
        done = run_on_host(command, timeout_s=_STEP_TIMEOUT_S, variables=settings)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{task.instance_id}: {' '.join(command[:3])} failed: {error}") from error
    if done.returncode != 0:
        tail = last_lines(done.stdout, 12)
        raise SandboxError(f"{task.instance_id}: {' '.join(command[:3])} failed: {tail}")
