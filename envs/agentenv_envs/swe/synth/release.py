"""What tasks are made of: a release of the package index, or a folder of this machine.

Invariants:
- A folder is packed, not used: its rows go with the archive beside them and stay what they are when the folder
  changes. The user's folder is only read.
- Equal folders give equal archives.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import SandboxError, UsageError
from agentenv_envs.swe.data import SWETask
from agentenv_envs.swe.package_wheels import last_lines, run_on_host

__all__ = ["Release", "find_release"]

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?==[A-Za-z0-9][\w.!+-]*")
_LEFT_OUT = frozenset(
    (".git", ".hg", ".tox", ".nox", ".venv", "venv", "build", "dist", "node_modules", "__pycache__", ".eggs")
)
_ROOTS = ("src", "lib", "python")  # where else than at the top packages lie
_TIMEOUT_S = 900.0
_MAX_FILES = 20_000


@dataclass(frozen=True)
class Release:
    """A source distribution and how its tests are installed.

    Attributes:
        package: "name==version".
        install: requirements of its tests.
        source_root: folder that its modules are imported from.
        archive: the packed folder; None for a release of the package index.
    """

    package: str
    install: tuple[str, ...]
    source_root: str
    archive: Path | None = None

    @property
    def name(self) -> str:
        """For people: "inflection 0.5.1"."""
        return self.package.replace("==", " ")

    @property
    def digest(self) -> str:
        """Differs where packages, or archives of the same package, differ."""
        content = self.archive.read_bytes() if self.archive is not None else b""
        return hashlib.sha256(self.package.encode() + b"\0" + content).hexdigest()

    def task(self) -> SWETask:
        """A row without a bug, from which a workspace can be opened."""
        return SWETask(
            instance_id=f"{self.package.replace('==', '-')}__synth",
            problem_statement="",
            patch="",
            test_patch="",
            fail_to_pass=(),
            pass_to_pass=(),
            test_files=(),
            repo=self.package,
            package=self.package,
            install=self.install,
            source_root=self.source_root,
            source_archive=None if self.archive is None else str(self.archive),
        )


def find_release(target: str, install: Sequence[str], source_root: str | None, folder: Path) -> Release:
    """The release that a user names.

    Args:
        target: "name==version", or a folder that pip can build.
        install: requirements of the tests; pytest is added where it is missing.
        source_root: folder of the modules; None to find out.
        folder: where a folder's archive is written.

    Raises:
        UsageError: the target is neither, or the folder can't be built.
        SandboxError: pip failed.
    """
    needs = list(install)
    if "pytest" not in {re.split(r"[^\w.-]", item, maxsplit=1)[0].lower() for item in needs}:
        needs.append("pytest<9")
    path = Path(target).expanduser()
    with tempfile.TemporaryDirectory(prefix="agentenv-synth-") as name:
        scratch = Path(name)
        if path.is_dir():
            content = _pack(path)
            packed = scratch / "source.tar.gz"
            packed.write_bytes(content)
            _pip("wheel", "--no-deps", "--wheel-dir", str(scratch / "wheel"), str(packed))
            wheel = next((scratch / "wheel").glob("*.whl"))
            package = "==".join(wheel.name.split("-")[:2])
            names = _names_in(packed)
            archive = (
                folder / f"{package.replace('==', '-')}-{hashlib.sha256(content).hexdigest()[:8]}.tar.gz"
            )
            archive.write_bytes(content)
            return Release(package, tuple(needs), source_root or _root_of(names), archive.absolute())
        if not _PACKAGE.fullmatch(target):
            raise UsageError(f"{target}: neither a folder nor of the form name==version")
        if source_root is None:
            project = target.partition("==")[0]
            _pip("download", "--no-deps", "--no-binary", project, "--dest", name, target)
            source_root = _root_of(_names_in(next(scratch.iterdir())))
        return Release(target, tuple(needs), source_root)


def _pack(folder: Path) -> bytes:
    """A folder as a .tar.gz with one top folder; of a git repository what git tracks or would track."""
    files = _files_of(folder)
    if not files:
        raise UsageError(f"{folder}: holds no files")
    if len(files) > _MAX_FILES:
        raise UsageError(f"{folder}: holds {len(files)} files; at most {_MAX_FILES} are packed")
    content = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=content, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for name in files:
            path = folder / name
            entry = tarfile.TarInfo(f"source/{name}")
            entry.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            entry.size = path.stat().st_size
            entry.mtime = 946684800  # 2000-01-01: zip files, and so wheels, know no date before 1980
            with path.open("rb") as file:
                archive.addfile(entry, file)
    return content.getvalue()


def _files_of(folder: Path) -> list[str]:
    """Regular files, relative and sorted; links are left out, for they may lead outside."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = run_on_host(command, timeout_s=60.0) if (folder / ".git").exists() else None
    if listed is not None and listed.returncode == 0:
        names: Iterable[str] = listed.stdout.split("\0")
    else:
        names = (
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if not _LEFT_OUT.intersection(path.relative_to(folder).parts) and path.suffix != ".pyc"
        )
    return sorted({n for n in names if n and (folder / n).is_file() and not (folder / n).is_symlink()})


def _root_of(names: Iterable[str]) -> str:
    found = {match[1] for name in names if (match := re.match(r"([^/]+)/[^/]+(/__init__)?\.py$", name))}
    return next((root for root in _ROOTS if root in found), ".")


def _names_in(archive: Path) -> list[str]:
    """Paths in a source distribution, without its top folder."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                names = zipped.namelist()
        else:
            with tarfile.open(archive) as tarred:
                names = tarred.getnames()
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise SandboxError(f"{archive.name} can't be read: {error}") from error
    return [name.partition("/")[2] for name in names]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    try:
        done = run_on_host(command, timeout_s=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"pip {arguments[0]} failed: {error}") from error
    if done.returncode != 0:
        raise UsageError(
            f"pip {arguments[0]} {arguments[-1]} failed with exit code {done.returncode}: "
            f"{last_lines(done.stdout, 12)}"
        )
