"""The base image from Debian packages, where no container registry answers: debootstrap, then docker import."""

import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentenv.errors import SandboxError, UsageError

__all__ = ["DEBIAN_RECIPE", "import_debian"]

logger = logging.getLogger(__name__)

DEBIAN_SUITE = "bookworm"
DEBIAN_PACKAGES = (
    "bash",
    "coreutils",
    "findutils",
    "util-linux",
    "procps",
    "git",
    "patch",
    "python3",
    "python-is-python3",
    "python3-pip",
    "python3-pytest",
)
GIT_CONFIG = """\
[user]
\tname = agent
\temail = agent@localhost
[init]
\tdefaultBranch = main
[safe]
\tdirectory = *
"""
IMPORT_CHANGES = (
    "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "ENV LANG=C.UTF-8",
    "ENV PIP_ROOT_USER_ACTION=ignore",
    "ENV PIP_DISABLE_PIP_VERSION_CHECK=1",
    "WORKDIR /work",
    'CMD ["bash"]',
)
DROPPED = (
    "var/cache/apt",
    "var/lib/apt/lists",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
)


DEBIAN_RECIPE = (DEBIAN_SUITE, *DEBIAN_PACKAGES, GIT_CONFIG, *IMPORT_CHANGES, *DROPPED)
"""All that decides what the image holds."""

Progress = Callable[[str], None]


def import_debian(client: Any, tag: str, progress: Progress, reason: str) -> None:
    """Bootstrap a Debian system into a folder and import it as an image.

    Args:
        client: a `docker.DockerClient`.
        tag: what to call the image.
        progress: called with one line per step.
        reason: why it has to be this way, for messages.

    Raises:
        UsageError: debootstrap is not installed, or this process is not root.
        SandboxError: a step failed.
    """
    tool = shutil.which("debootstrap") or shutil.which("debootstrap", path="/usr/sbin:/sbin")
    if tool is None:
        raise UsageError(
            f"cannot make the base image {tag}: {reason}, and debootstrap is not installed (apt install debootstrap)"
        )
    if os.geteuid() != 0:
        raise UsageError(f"cannot make the base image {tag}: {reason}, and debootstrap needs root")
    with tempfile.TemporaryDirectory(prefix="agentenv-image-") as folder:
        root = Path(folder) / "root"
        command = [
            tool,
            "--variant=minbase",
            f"--include={','.join(DEBIAN_PACKAGES)}",
            DEBIAN_SUITE,
            str(root),
        ]
        mirror = _debian_mirror()
        _run_with_progress([*command, mirror] if mirror else command, progress, tag)
        _trim(root)
        progress("importing the file system")
        _import_tree(client, root, tag)


def _debian_mirror() -> str | None:
    """The mirror that this host's own apt uses for the suite; None leaves the choice to debootstrap."""
    sources = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for path in sources:
        if path.suffix not in (".list", ".sources") or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        for line in re.findall(r"(?m)^(?:deb\s.*|URIs:.*)$", text):
            url = re.search(r"https?://[^\s@]+/debian/?(?=\s|$)", line)
            if url and re.search(rf"\b{DEBIAN_SUITE}\b", line if line.startswith("deb") else text):
                return url.group()
    return None


def _run_with_progress(command: list[str], progress: Progress, tag: str) -> None:
    lines: list[str] = []
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            progress(line.strip())
    if process.returncode != 0:
        raise SandboxError(
            f"{Path(command[0]).name} for the image {tag} failed with exit code {process.returncode}: "
            + " | ".join(lines[-8:])
        )


def _trim(root: Path) -> None:
    """Drop what a sandbox never reads, and set what the Dockerfile sets by command."""
    for name in DROPPED:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir(parents=True, exist_ok=True)
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()  # the container is the virtual environment
    (root / "etc/gitconfig").write_text(GIT_CONFIG)
    (root / "etc/resolv.conf").write_text("")
    for name in ("work", "testbed"):
        (root / name).mkdir(exist_ok=True)


def _import_tree(client: Any, root: Path, tag: str) -> None:
    from docker.errors import DockerException

    repository, _, version = tag.rpartition(":")
    command = [
        "tar",
        "--numeric-owner",
        "-C",
        str(root),
        "--exclude=./dev/*",
        "--exclude=./proc/*",
        "-cf",
        "-",
        ".",
    ]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as tar:
        try:
            client.api.import_image_from_stream(
                tar.stdout, repository=repository, tag=version, changes=list(IMPORT_CHANGES)
            )
        except (DockerException, OSError) as error:
            tar.kill()
            raise SandboxError(f"docker import of the image {tag} failed: {error}") from error
    if tar.returncode != 0:
        raise SandboxError(
            f"docker import of the image {tag} failed: tar ended with exit code {tar.returncode}"
        )
