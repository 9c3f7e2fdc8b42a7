"""Images that sandboxes start from: the base image of SWE tasks, and images built on top of one.

Invariants:
- A tag is made of the hash of the recipe: a changed recipe is a new image, an unchanged one is built once per engine.
- The base image has bash, coreutils, findutils, util-linux, procps, git, patch, Python 3 as `python` and `python3`,
  pip, and pytest 7 (tests written against pytest's older hooks still run).
- Where no registry answers, the same set comes from Debian packages by `debootstrap` and `docker import`, so that a
  site without a registry works too. Only that first build needs a network; `build_image` never has one.

    python -m agentenv_envs.swe.sandbox.images      builds the base image, progress on stderr, the tag on stdout
"""

import contextlib
import fcntl
import hashlib
import io
import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentenv.errors import MissingExtraError, SandboxError, UsageError

__all__ = ["BASE_REPOSITORY", "SANDBOX_DOCKERFILE", "base_image_tag", "build_image", "ensure_base_image"]

logger = logging.getLogger(__name__)

BASE_REPOSITORY = "agentenv/sandbox"
UPSTREAM_IMAGE = "python:3.12-slim"

SANDBOX_DOCKERFILE = """\
FROM python:3.12-slim AS sandbox
RUN apt-get update \\
 && apt-get install -y --no-install-recommends git patch procps \\
 && rm -rf /var/lib/apt/lists/* \\
 && pip install --no-cache-dir "pytest>=7.2,<8" setuptools wheel \\
 && python -m compileall -q -x "/test/|/lib2to3/" /usr/local/lib/python3.12 \\
 && git config --system user.name agent && git config --system user.email agent@localhost \\
 && git config --system init.defaultBranch main && git config --system safe.directory "*" \\
 && mkdir -p /work /testbed
ENV LANG=C.UTF-8 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /work
CMD ["bash"]
"""
"""The stage `sandbox` of the project's Dockerfile. Byte code is compiled in, since a read-only root cannot cache it."""

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

REGISTRY_TIMEOUT_S = 8
BUILD_TIMEOUT_S = 1800

Progress = Callable[[str], None]


def base_image_tag() -> str:
    """`agentenv/sandbox:<hash of the recipe>`; the same on every machine with the same version of agentenv."""
    recipe = "\0".join(
        [SANDBOX_DOCKERFILE, DEBIAN_SUITE, *DEBIAN_PACKAGES, GIT_CONFIG, *IMPORT_CHANGES, *DROPPED]
    )
    return f"{BASE_REPOSITORY}:{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def ensure_base_image(client: Any, *, progress: Progress | None = None) -> str:
    """The tag of the base image; builds it where the engine does not have it yet (about a minute).

    Args:
        client: a `docker.DockerClient`.
        progress: called with one line per step of a build; by default they go to the log.

    Raises:
        UsageError: no registry answers and the other way is closed (no debootstrap, or not root).
        SandboxError: a build failed.
    """
    tag = base_image_tag()
    if _has_image(client, tag):
        return tag
    with _build_lock():  # several runs that start together build once
        if not _has_image(client, tag):
            _build_base(client, tag, progress or logger.info)
    return tag


def build_image(
    client: Any, tag: str, files: Mapping[str, bytes], dockerfile: str, *, timeout_s: int = 1800
) -> str:
    """Build an image from files held in memory, without any network, and return its tag.

    Args:
        client: a `docker.DockerClient`.
        tag: what to call the image.
        files: the build context: relative path -> content.
        dockerfile: the recipe; its base image must be in the engine already.
        timeout_s: silence of the engine after which the build counts as failed.

    Raises:
        SandboxError: a step of the build failed; the message ends with the last lines of its output.
    """
    return _docker_build(
        client, tag, files, dockerfile, network="none", timeout_s=timeout_s, progress=logger.debug
    )


def _build_base(client: Any, tag: str, progress: Progress) -> None:
    try:
        if _registry_answers(client):
            progress(f"building {tag} from {UPSTREAM_IMAGE}")
            _docker_build(
                client,
                tag,
                {},
                SANDBOX_DOCKERFILE,
                network=None,
                timeout_s=BUILD_TIMEOUT_S,
                progress=progress,
            )
            return
        reason = f"no registry answers for {UPSTREAM_IMAGE}"
    except SandboxError as error:
        reason = f"the build from {UPSTREAM_IMAGE} failed ({error})"
    progress(f"{reason}; building {tag} from Debian packages")
    _import_debian(client, tag, progress, reason)


def _has_image(client: Any, tag: str) -> bool:
    from docker.errors import APIError, ImageNotFound

    try:
        client.images.get(tag)
    except ImageNotFound:
        return False
    except (APIError, OSError) as error:
        raise SandboxError(
            f"the Docker engine cannot tell whether it has the image {tag}: {error}"
        ) from error
    return True


def _registry_answers(client: Any) -> bool:
    """True where the engine has the upstream image or can reach the registry that serves it."""
    from docker.errors import DockerException

    if _has_image(client, UPSTREAM_IMAGE):
        return True
    try:
        with _request_timeout(client, REGISTRY_TIMEOUT_S):  # the engine itself would retry for far longer
            client.api.inspect_distribution(UPSTREAM_IMAGE)
    except (DockerException, OSError) as error:
        logger.debug("the registry of %s does not answer: %s", UPSTREAM_IMAGE, error)
        return False
    return True


@contextlib.contextmanager
def _request_timeout(client: Any, timeout_s: int) -> Iterator[None]:
    before, client.api.timeout = client.api.timeout, timeout_s
    try:
        yield
    finally:
        client.api.timeout = before


def _docker_build(
    client: Any,
    tag: str,
    files: Mapping[str, bytes],
    dockerfile: str,
    *,
    network: str | None,
    timeout_s: int,
    progress: Progress,
) -> str:
    from docker.errors import DockerException

    lines: list[str] = []
    try:
        with _request_timeout(client, timeout_s):
            stream = client.api.build(
                fileobj=_context(files, dockerfile),
                custom_context=True,
                tag=tag,
                rm=True,
                forcerm=True,
                network_mode=network,
                decode=True,
            )
            for event in stream:
                text = str(event.get("stream") or event.get("error") or "").strip()
                lines += text.splitlines()
                if text:
                    progress(text.splitlines()[0])
                if "error" in event:
                    raise SandboxError(f"building the image {tag} failed: " + " | ".join(lines[-12:]))
    except (DockerException, OSError) as error:
        raise SandboxError(f"building the image {tag} failed: {error}") from error
    return tag


def _context(files: Mapping[str, bytes], dockerfile: str) -> io.BytesIO:
    """A tar of the build context with fixed times, so that the engine's layer cache works."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in {"Dockerfile": dockerfile.encode(), **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    buffer.seek(0)
    return buffer


def _import_debian(client: Any, tag: str, progress: Progress, reason: str) -> None:
    """The base image from Debian packages: debootstrap into a folder, then `docker import`."""
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
    if tar.returncode != 0 or not _has_image(client, tag):
        raise SandboxError(
            f"docker import of the image {tag} failed: tar ended with exit code {tar.returncode}"
        )


@contextlib.contextmanager
def _build_lock() -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"agentenv-image-{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases it
        yield


def main() -> int:
    """Build the base image with progress on stderr; the tag is the only line on stdout."""
    try:
        import docker
    except ImportError:
        print(MissingExtraError("docker", "docker"), file=sys.stderr)
        return 2
    try:
        tag = ensure_base_image(docker.from_env(), progress=lambda line: print(line, file=sys.stderr))
    except (docker.errors.DockerException, UsageError, SandboxError) as error:
        print(error, file=sys.stderr)
        return 2
    print(tag)
    return 0


if __name__ == "__main__":
    sys.exit(main())
