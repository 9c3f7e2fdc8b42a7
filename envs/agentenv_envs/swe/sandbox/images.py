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
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentenv.errors import MissingExtraError, SandboxError, UsageError

from .debian import DEBIAN_RECIPE, import_debian

__all__ = [
    "BASE_REPOSITORY",
    "SANDBOX_DOCKERFILE",
    "base_image_tag",
    "build_image",
    "build_lock",
    "ensure_base_image",
    "ensure_pulled",
    "has_image",
]

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

REGISTRY_TIMEOUT_S = 8
BUILD_TIMEOUT_S = 1800
PULL_PROGRESS_S = 5.0
"""Between two lines on a pull."""

Progress = Callable[[str], None]


def base_image_tag() -> str:
    """`agentenv/sandbox:<hash of the recipe>`; the same on every machine with the same version of agentenv."""
    recipe = "\0".join([SANDBOX_DOCKERFILE, *DEBIAN_RECIPE])
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
    if has_image(client, tag):
        return tag
    with build_lock(tag):  # several runs that start together build once
        if not has_image(client, tag):
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


def ensure_pulled(client: Any, image: str, *, progress: Progress | None = None) -> None:
    """Pull an image where the engine does not have it yet.

    Args:
        client: a `docker.DockerClient`.
        image: NAME, NAME:TAG or NAME@DIGEST.
        progress: called with a line at the start, every five seconds, and in the end; by default they go to the log.

    Raises:
        SandboxError: the registry does not answer, or has no such image.
    """
    if has_image(client, image):
        return
    with build_lock(image):  # several that need it at once pull it once
        if not has_image(client, image):
            _pull(client, image, progress or logger.info)


def has_image(client: Any, tag: str) -> bool:
    """True where the engine has an image of this name.

    Raises:
        SandboxError: it does not answer.
    """
    from docker.errors import DockerException, ImageNotFound

    try:
        client.images.get(tag)
    except ImageNotFound:
        return False
    except (DockerException, OSError) as error:
        raise SandboxError(
            f"the Docker engine cannot tell whether it has the image {tag}: {error}"
        ) from error
    return True


def _pull(client: Any, image: str, progress: Progress) -> None:
    from docker.errors import DockerException

    progress(f"pulling {image}")
    began = told = time.monotonic()
    layers: dict[str, tuple[int, int]] = {}  # bytes that are there, and all
    try:
        for event in client.api.pull(image, stream=True, decode=True):
            if "error" in event:
                raise SandboxError(f"the image {image} can't be pulled: {event['error']}")
            detail = event.get("progressDetail") or {}
            if event.get("status") == "Downloading" and detail.get("total"):
                layers[event["id"]] = (int(detail["current"]), int(detail["total"]))
            elif event.get("status") == "Download complete" and event.get("id") in layers:
                layers[event["id"]] = (layers[event["id"]][1],) * 2
            if time.monotonic() - told >= PULL_PROGRESS_S:
                told = time.monotonic()
                here, size = (sum(sizes[part] for sizes in layers.values()) / 1e6 for part in (0, 1))
                progress(f"pulling {image}: {here:.0f} of {size:.0f} MB of {len(layers)} layers so far")
    except (DockerException, OSError) as error:
        raise SandboxError(f"the image {image} can't be pulled: {error}") from error
    progress(f"pulled {image} in {time.monotonic() - began:.0f} s")


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
    import_debian(client, tag, progress, reason)


def _registry_answers(client: Any) -> bool:
    """True where the engine has the upstream image or can reach the registry that serves it."""
    from docker.errors import DockerException

    if has_image(client, UPSTREAM_IMAGE):
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


@contextlib.contextmanager
def build_lock(tag: str) -> Iterator[None]:
    """Held by one thread of one process at a time; another tag has another lock."""
    digest = hashlib.sha256(tag.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"agentenv-image-{os.getuid()}-{digest}.lock"
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
