"""`agentenv plan`: docs/deployment.md shows what it prints, and what cannot be planned is one line."""

import json
import re
import shlex
from pathlib import Path

import pytest

from agentenv.cli import main


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "deployment.md").read_text(encoding="utf-8")


def _printed(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(command)[1:]) == 0
    return capsys.readouterr().out


def test_the_tables_of_the_page_on_deployment_are_what_the_command_prints(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = re.findall(r"<!-- plan:(.*?)-->\n\n((?:\|.*\n)+)", page)
    assert len(tables) == 3
    for options, table in tables:
        assert table in _printed(f"agentenv plan {options}", capsys)


def test_the_plans_of_the_page_on_deployment_are_what_the_command_prints(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.findall(r"```console\n\$ (agentenv plan .*)\n((?:.*\n)*?)```", page)
    assert len(shown) == 4
    for command, output in shown:
        assert output == _printed(command, capsys)


def test_the_result_can_be_had_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = _printed(f"agentenv plan --model 7B --gpus 8 --json {tmp_path / 'plan.json'}", capsys)
    result = json.loads((tmp_path / "plan.json").read_text())
    assert result["models"][0]["parameters"] == 7_615_616_512
    assert result["split"]["trainer_gpus"] == 4
    assert "\n".join(result["commands"]) in output


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--model 8B", "--model 8B"),
        ("--gpus 0", "--gpus is 0"),
        ("--gpus 2 --rollout-s 3", "--rollout-s and --train-s are needed together"),
        ("--rollout-s 3 --train-s 3", "--gpus is needed"),
        ("--gpus 2 --model 32B", "does not fit 2 x 80 GiB"),
        ("--json /no/such/folder/x", "--json /no/such/folder/x"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    options: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *options.split()]) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.count("\n") == 1 and captured.out == ""
