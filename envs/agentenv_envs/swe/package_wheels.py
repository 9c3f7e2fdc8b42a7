"""Fetching a release and everything that its tests need, on the host, with pip.

A site's pip knows its mirror and its certificates; a container that is built from what pip fetched needs
neither, and an air-gapped site works the same. Building a source distribution runs the code of its build:
fetch releases that you would install.

Invariants:
- What is fetched fits the container's Python and machine, not the host's.
- The release itself is wheeled twice over: its real wheel only tells pip what it depends on; into the image
  goes an editable one, which holds metadata and entry points and finds the code in the repository.
- Nothing is installed on the host, and every file lies in the folder that the caller gave.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import SandboxError, UsageError

from .data import SWETask

__all__ = [
    "FetchedPackage",
    "TargetPython",
    "editable_wheel",
    "fetch_package",
    "requirements",
    "requirements_file",
]

logger = logging.getLogger(__name__)

_PIP_TIMEOUT_S = 900.0
_LOG_TAIL_LINES = 12


@dataclass(frozen=True)
class TargetPython:
    """The Python that the tests run in.

    Attributes:
        version: major and minor, such as (3, 12).
        machine: as `platform.machine()` says it, such as "x86_64".
        glibc: version of the C library, such as (2, 36): newest manylinux wheels that load.
    """

    version: tuple[int, int]
    machine: str
    glibc: tuple[int, int]

    @classmethod
    def of_host(cls) -> TargetPython:
        """The Python that runs this."""
        libc = [*platform.libc_ver()[1].split("."), "0", "0"]
        return cls(sys.version_info[:2], platform.machine(), (int(libc[0] or 0), int(libc[1] or 0)))

    @property
    def is_host(self) -> bool:
        """Whether wheels that pip chooses for the host fit as well."""
        host = TargetPython.of_host()
        same = host.version == self.version and host.machine == self.machine
        return sys.platform == "linux" and same and host.glibc <= self.glibc

    def pip_options(self) -> list[str]:
        """Options that make `pip download` choose wheels for this Python instead of the host's."""
        options = [
            "--only-binary",
            ":all:",
            "--implementation",
            "cp",
            "--python-version",
            ".".join(map(str, self.version)),
        ]
        for minor in range(self.glibc[1], 16, -1):
            options += ["--platform", f"manylinux_{self.glibc[0]}_{minor}_{self.machine}"]
        options += ["--platform", f"manylinux2014_{self.machine}", "--platform", f"linux_{self.machine}"]
        return options


@dataclass(frozen=True)
class FetchedPackage:
    """Files on the host from which an image is built.

    Attributes:
        sdist: the source distribution.
        wheels: wheels of all dependencies, and the editable one of the release itself.
    """

    sdist: Path
    wheels: tuple[Path, ...]


def fetch_package(task: SWETask, target: TargetPython, folder: Path) -> FetchedPackage:
    """Fetch the source distribution of a package row and wheels of all that it and its tests need.

    Args:
        task: a package row.
        target: the container's Python.
        folder: an empty folder that receives the files.

    Raises:
        UsageError: `source_root` does not hold the package's modules.
        SandboxError: pip failed (the message ends with the tail of its output), or the package has compiled
        parts.
    """
    assert task.package is not None
    name = task.package.partition("==")[0]
    sources, own, wheels = folder / "sdist", folder / "own", folder / "wheels"
    if task.source_archive is None:
        _pip(task, "download", "--no-deps", "--no-binary", name, "--dest", str(sources), task.package)
    else:
        sources.mkdir(parents=True)
        shutil.copy(task.source_archive, sources)
    sdist = _only_file(task, sources)
    _pip(task, "wheel", "--no-deps", "--wheel-dir", str(own), str(sdist))
    real_wheel = _only_file(task, own)
    _check_source_root(task, sdist, real_wheel)
    needs = [str(real_wheel), *requirements(task)]
    if target.is_host:
        # Not `download`: where a dependency comes as source alone, `wheel` builds it here.
        _pip(task, "wheel", "--wheel-dir", str(wheels), *needs)
    else:
        _download_for(task, target, wheels, needs)
    (wheels / real_wheel.name).unlink(missing_ok=True)
    editable_wheel(real_wheel, wheels, _join(task.workdir, task.source_root))
    return FetchedPackage(sdist, tuple(sorted(wheels.iterdir())))


def requirements(task: SWETask) -> list[str]:
    """The row's `install`; pytest is added where the row forgot it."""
    names = {re.split(r"[^\w.-]", item, maxsplit=1)[0].lower() for item in task.install}
    return [*task.install, *([] if "pytest" in names else ["pytest"])]


def requirements_file(task: SWETask) -> str:
    """What the tests' environment holds, as pip's requirements file: the release itself comes first."""
    return "\n".join([str(task.package), *requirements(task), ""])


def editable_wheel(real_wheel: Path, folder: Path, source: str) -> Path:
    """Write the editable twin of a pure-Python wheel: its metadata, and a path file that leads to the source.

    Args:
        real_wheel: the wheel that the release builds.
        folder: where to write; the file has the same name.
        source: absolute path, in the container, that the package's modules are imported from.

    Source: PEP 660, where a build backend makes such a wheel; here no backend is needed in the container.
    """
    target = folder / real_wheel.name
    stem = "-".join(real_wheel.name.split("-")[:2])
    records: list[str] = []
    with zipfile.ZipFile(real_wheel) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:

        def add(path: str, content: bytes) -> None:
            # The date is fixed so that the same release gives the same bytes.
            new.writestr(zipfile.ZipInfo(path, (2000, 1, 1, 0, 0, 0)), content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            records.append(f"{path},sha256={digest},{len(content)}")

        record = ""
        for path in old.namelist():
            if path.endswith(".dist-info/RECORD"):
                record = path
            elif not path.endswith("/") and re.match(r"[^/]+\.(dist-info/|data/(scripts|data)/)", path):
                add(path, old.read(path))
        add(f"__editable__.{stem}.pth", f"{source}\n".encode())
        records.append(f"{record},,")
        new.writestr(zipfile.ZipInfo(record, (2000, 1, 1, 0, 0, 0)), "\n".join(records) + "\n")
    return target


def _download_for(task: SWETask, target: TargetPython, wheels: Path, needs: Sequence[str]) -> None:
    """`pip download` for another Python; what comes as source alone is wheeled here, then tried again."""
    wheels.mkdir(parents=True, exist_ok=True)
    built: set[str] = set()
    while True:
        try:
            options = ["--find-links", str(wheels), "--dest", str(wheels), *target.pip_options()]
            _pip(task, "download", *options, *needs)
            return
        except SandboxError as error:
            missing = re.search(r"No matching distribution found for ([A-Za-z0-9][^\s(|]*)", str(error))
            if missing is None or missing[1] in built:
                raise
            built.add(missing[1])
            logger.info(
                "%s: %s has no wheel for the container's Python; building one", task.instance_id, missing[1]
            )
            _pip(task, "wheel", "--no-deps", "--wheel-dir", str(wheels), missing[1])


def _check_source_root(task: SWETask, sdist: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        modules = [
            name
            for name in archive.namelist()
            if name.endswith(".py") and not re.match(r"[^/]+\.(dist-info|data)/", name)
        ]
    if not wheel.name.endswith("-none-any.whl"):
        raise SandboxError(
            f"{task.instance_id}: {task.package} builds compiled code; package rows must be pure Python"
        )
    files = set(_names_in(task, sdist))
    if modules and not any(_join(task.source_root, module) in files for module in modules):
        raise UsageError(
            f"{task.instance_id}: field 'source_root': {task.source_root!r} does not hold {modules[0]} "
            f"in the source distribution of {task.package}"
        )


def _names_in(task: SWETask, sdist: Path) -> Iterable[str]:
    """Paths in a source distribution, without its top folder."""
    try:
        if zipfile.is_zipfile(sdist):
            with zipfile.ZipFile(sdist) as zipped:
                names = zipped.namelist()
        else:
            with tarfile.open(sdist) as tarred:
                names = tarred.getnames()
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise SandboxError(f"{task.instance_id}: {sdist.name} can't be read: {error}") from error
    return (name.partition("/")[2] for name in names)


def _join(folder: str, path: str) -> str:
    if path == ".":
        return folder
    return path if folder == "." else f"{folder}/{path}"


def _only_file(task: SWETask, folder: Path) -> Path:
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    if len(files) != 1:
        raise SandboxError(f"{task.instance_id}: pip left {len(files)} files for {task.package}, expected 1")
    return files[0]


def run_on_host(
    command: list[str], *, timeout_s: float, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program of this machine without stdin, its output and errors together as text.

    Raises:
        OSError: it can't be started.
        subprocess.TimeoutExpired: it took over `timeout_s` seconds.
    """
    return subprocess.run(
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout_s,
        env={**os.environ, **(variables or {})},
    )


def last_lines(log: str, number: int) -> str:
    """The last lines of a log in one, for an error message."""
    return " | ".join(line.strip() for line in log.splitlines()[-number:] if line.strip())


def _pip(task: SWETask, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    logger.info("%s: pip %s", task.instance_id, " ".join(arguments))
    try:
        done = run_on_host(command, timeout_s=_PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SandboxError(
            f"{task.instance_id}: pip {arguments[0]} took over {_PIP_TIMEOUT_S:.0f} s"
        ) from None
    except OSError as error:
        raise SandboxError(f"{task.instance_id}: pip can't be started: {error}") from error
    if done.returncode != 0:
        raise SandboxError(
            f"{task.instance_id}: pip {arguments[0]} for {task.package} failed "
            f"with exit code {done.returncode}: {last_lines(done.stdout, _LOG_TAIL_LINES)}"
        )
