"""The image of a task: a published one, or one built from a release's source distribution.

Invariants:
- Building happens without a network; all that it needs was fetched on the host before (`package_wheels`).
- The repository is a git repository with exactly one commit: its history holds no fix.
- The hidden tests are not in the image, nor is the gold patch.
- The tests' Python is an environment of its own, so that a row's pins never meet what the base image has; the
  package is imported from the repository.
- The tag is made of a hash of the recipe and of the base image: an unchanged row is built once per engine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentenv.errors import SandboxError, UsageError

from .data import SWETask
from .package_wheels import FetchedPackage, TargetPython, fetch_package, requirements, requirements_file
from .sandbox import SandboxBackend, SandboxSpec
from .sandbox.images import build_image, build_lock, ensure_base_image, ensure_pulled, has_image

__all__ = ["REPOSITORY_SCRIPT", "ensure_task_image", "package_image_tag"]

logger = logging.getLogger(__name__)

PACKAGE_LABEL = "agentenv.package"
INSTANCE_LABEL = "agentenv.instance"
ENVIRONMENT = "/opt/testbed"

# Lays the repository out of a source distribution in $SDIST at $TESTBED, as one commit.
REPOSITORY_SCRIPT = """\
set -euo pipefail
unpacked="$(mktemp -d -p "$(dirname "$TESTBED")")"
python3 -c 'import shutil, sys; shutil.unpack_archive(*sys.argv[1:])' "$SDIST" "$unpacked"
test "$(ls "$unpacked" | wc -l)" = 1
rm -rf "$TESTBED"
mv "$unpacked"/* "$TESTBED"
rmdir "$unpacked"
cd "$TESTBED"
if [ "$(id -u)" = 0 ]; then chown -R 0:0 .; fi
chmod -R u+rwX,go+rX .
rm -rf .git
git init -q
printf '%s\\n' '__pycache__/' '*.py[cod]' '.pytest_cache/' '.hypothesis/' >>.git/info/exclude
git add -A -f
export GIT_AUTHOR_DATE='2000-01-01T00:00:00Z' GIT_COMMITTER_DATE='2000-01-01T00:00:00Z'
git -c user.name=agentenv -c user.email=agentenv@localhost commit -q --no-verify -m "Import $PACKAGE"
test "$(git rev-list --all --count)" = 1
"""
# Part of the tag, as is the script above: a change here builds every package image anew.
_BUILD_SCRIPT = f"""\
set -euo pipefail
cd /build
python3 -m venv --without-pip {ENVIRONMENT}
python3 -m pip --python {ENVIRONMENT}/bin/python install --no-index --find-links wheels -r requirements.txt
export SDIST="$(echo /build/sdist/*)"
bash repository.sh
cd /
rm -rf /build
"""
_DOCKERFILE = f"""\
FROM @BASE@
COPY . /build/
RUN TESTBED=@WORKDIR@ PACKAGE=@PACKAGE@ bash /build/build.sh
ENV PATH={ENVIRONMENT}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV PYTHONDONTWRITEBYTECODE=1
WORKDIR @WORKDIR@
LABEL {PACKAGE_LABEL}="@PACKAGE@" {INSTANCE_LABEL}="@INSTANCE@"
"""
_PROBE = (
    "import os, platform, sys; "
    "print(*sys.version_info[:2], platform.machine(), os.confstr('CS_GNU_LIBC_VERSION').split()[-1])"
)

Progress = Callable[[str], None]


def ensure_task_image(task: SWETask, backend: SandboxBackend, *, progress: Progress | None = None) -> str:
    """The tag of the image that holds the task's repository; builds or pulls it where the engine lacks it.

    Args:
        task: an image row or a package row.
        backend: a Docker back-end.
        progress: called with one line per step of a build; by default they go to the log.

    Raises:
        UsageError: the back-end has no images, or the row's `source_root` is wrong.
        SandboxError: pip, the build or the pull failed; the message ends with the tail of its log.
    """
    if backend.kind != "docker":
        raise UsageError(
            f"{task.instance_id}: a task on a real repository needs the docker sandbox, got {backend.kind!r}"
        )
    remote = getattr(getattr(backend, "backend", backend), "task_image", None)
    if remote is not None:  # a sandbox service makes the image beside its own engine
        return str(remote(task))
    client = _client_of(backend)
    say = progress or logger.info
    if task.package is None:
        assert task.image is not None
        ensure_pulled(client, task.image, progress=say)
        return task.image
    base = ensure_base_image(client, progress=progress)
    tag = package_image_tag(task, _image_id(client, base))
    if has_image(client, tag):
        return tag
    with build_lock(tag):  # environments that start together build once
        if not has_image(client, tag):
            _build(task, backend, client, base, tag, say)
    return tag


def package_image_tag(task: SWETask, base_id: str) -> str:
    """`agentenv/swe-<name>:<version>-<hash>`; equal recipes on the same base image have equal tags."""
    assert task.package is not None
    name, _, version = task.package.partition("==")
    recipe = json.dumps(
        [
            task.package,
            sorted(requirements(task)),
            task.source_root,
            task.workdir,
            base_id,
            REPOSITORY_SCRIPT,
            _BUILD_SCRIPT,
            _DOCKERFILE,
            *([] if task.source_archive is None else [_digest(task.source_archive)]),
        ]
    )
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    return f"agentenv/swe-{_slug(name)}:{_slug(version)}-{digest}"


def _build(task: SWETask, backend: SandboxBackend, client: Any, base: str, tag: str, say: Progress) -> None:
    target = _probe(backend, base)
    with tempfile.TemporaryDirectory(prefix="agentenv-package-") as folder:
        say(f"{task.instance_id}: fetching {task.package} and its wheels")
        fetched = fetch_package(task, target, Path(folder))
        say(f"{task.instance_id}: building {tag} from {len(fetched.wheels)} wheels")
        build_image(client, tag, _context(task, fetched), _dockerfile(task, base))


def _context(task: SWETask, fetched: FetchedPackage) -> dict[str, bytes]:
    files = {f"wheels/{path.name}": path.read_bytes() for path in fetched.wheels}
    files[f"sdist/{fetched.sdist.name}"] = fetched.sdist.read_bytes()
    files["requirements.txt"] = requirements_file(task).encode()
    files["repository.sh"] = REPOSITORY_SCRIPT.encode()
    files["build.sh"] = _BUILD_SCRIPT.encode()
    return files


def _dockerfile(task: SWETask, base: str) -> str:
    # These values are of closed alphabets (checked when the row was read), so they can't break out of a line.
    values = {
        "BASE": base,
        "WORKDIR": task.workdir,
        "PACKAGE": str(task.package),
        "INSTANCE": task.instance_id,
    }
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], _DOCKERFILE)


def _probe(backend: SandboxBackend, image: str) -> TargetPython:
    sandbox = backend.acquire(SandboxSpec(image=image, read_only=False))
    try:
        result = sandbox.run(f'python3 -c "{_PROBE}"', timeout_s=60.0)
    finally:
        backend.release(sandbox)
    parts = result.output.split()
    try:
        major, minor, machine, libc = parts
        glibc = tuple(int(part) for part in libc.split(".")[:2])
        return TargetPython((int(major), int(minor)), machine, (glibc[0], glibc[1]))
    except (ValueError, IndexError):
        raise SandboxError(
            f"the image {image} has no usable python3: {result.output.strip()[-500:]!r}"
        ) from None


def _client_of(backend: SandboxBackend) -> Any:
    # A handle of `open_backend` keeps the back-end behind it.
    client = getattr(getattr(backend, "backend", backend), "client", None)
    if client is None:
        raise SandboxError(
            f"the sandbox back-end {backend.kind!r} offers no Docker client to build images with"
        )
    return client


def _image_id(client: Any, tag: str) -> str:
    from docker.errors import DockerException

    try:
        return str(client.images.get(tag).id)
    except (DockerException, OSError) as error:
        raise SandboxError(f"the Docker engine can't show the image {tag}: {error}") from error


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror or error}") from None


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
