"""The base image and images built on it."""

from pathlib import Path

import pytest

from agentenv.errors import SandboxError
from agentenv_envs.swe.sandbox import SandboxSpec, images
from agentenv_envs.swe.sandbox.docker_backend import DockerBackend, DockerSandbox


def test_the_stage_of_the_dockerfile_and_the_packaged_recipe_are_the_same(repository: Path) -> None:
    assert images.SANDBOX_DOCKERFILE in (repository / "Dockerfile").read_text()


def test_the_tag_follows_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    before = images.base_image_tag()
    assert images.base_image_tag() == before
    monkeypatch.setattr(images, "SANDBOX_DOCKERFILE", images.SANDBOX_DOCKERFILE + "RUN true\n")
    assert images.base_image_tag() != before


@pytest.mark.docker
def test_the_base_image_has_the_tools_that_tasks_need(sandbox: DockerSandbox) -> None:
    result = sandbox.run(
        "python --version && python3 --version && git --version && patch --version && setsid -V"
    )
    assert result.exit_code == 0, result.output
    assert sandbox.run("python -m pytest --version").output.startswith("pytest 7.")
    assert sandbox.run("python -m pip --version").exit_code == 0
    assert sandbox.run(
        "git init -q . && touch a && git add a && git commit -qm a && git log --format=%an"
    ).output == ("agent\n")


@pytest.mark.docker
def test_an_image_is_built_from_memory_and_without_a_network(docker_backend: DockerBackend) -> None:
    base = images.ensure_base_image(docker_backend.client)
    tag = "agentenv/test-build:1"
    recipe = f"FROM {base}\nCOPY data/file.txt /opt/file.txt\nRUN grep -c : /proc/net/dev > /opt/interfaces\n"
    try:
        assert images.build_image(docker_backend.client, tag, {"data/file.txt": b"content"}, recipe) == tag
        sandbox = docker_backend.acquire(SandboxSpec(image=tag))
        assert sandbox.run("cat /opt/file.txt /opt/interfaces").output == "content1\n"
        docker_backend.release(sandbox)
        with pytest.raises(SandboxError, match="no-such-command"):
            images.build_image(docker_backend.client, tag, {}, f"FROM {base}\nRUN no-such-command\n")
    finally:
        docker_backend.client.images.remove(tag, force=True)
