"""The commands of docs/deployment.md: the recipe takes their options, and accelerate its configuration."""

import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "deployment.md").read_text(encoding="utf-8")


def test_the_recipe_takes_every_command_that_is_planned(
    page: str, swe_sao: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^.*recipes/swe_sao\.py (.*)$", page, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        parsed = swe_sao.RECIPE.parse(shlex.split(command))
        assert parsed.arguments.engine == "vllm"
        assert (parsed.config.num_envs, parsed.config.max_tokens_per_episode) == (32, 16_384)
        half = "bfloat16" in command
        assert (parsed.config.model_init_kwargs == {"dtype": "bfloat16"}) is half
        assert parsed.arguments.use_peft is half


def test_accelerate_reads_the_configuration_as_fsdp2(page: str, tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    (tmp_path / "fsdp2.yaml").write_text(
        re.findall(r"<!-- example: fsdp2.yaml -->\n```yaml\n(.*?)```", page, re.S)[0]
    )
    config = config_args.load_config_from_file(str(tmp_path / "fsdp2.yaml"))
    assert str(config.distributed_type) == "DistributedType.FSDP"
    assert (config.fsdp_config["fsdp_version"], config.mixed_precision) == (2, "bf16")
