"""Agent programs in the SWE recipe: a program of one file, as a user would start it, with the embedded policy."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from agentenv.errors import UsageError
from agentenv_envs.swe.agents import SWEAgentPrograms
from agentenv_envs.swe.protocols.base import Malformed, format_observation
from agentenv_envs.swe.protocols.bash import INSTRUCTIONS, BashProtocol
from agentenv_trainers.recipe import run_recipe

pytest.importorskip("fastapi")


@pytest.fixture
def command(repository: Path) -> str:
    """The command line of the agent program that comes with the recipes."""
    return f"{shlex.quote(sys.executable)} -S {repository}/recipes/bash_agent.py {{issue_file}} {{workdir}}"


def test_a_run_on_an_agent_program_from_the_command_line_to_the_report(
    swe_sao: ModuleType, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--agent_command", command, "--sandbox", "local-unisolated", "--output_dir", "out"]
    sizes = ["--max_steps", "1", "--per_device_train_batch_size", "2", "--num_envs", "2", "--max_turns", "3"]
    sizes += ["--eval_episodes", "2", "--value_pretrain_episodes", "0", "--max_tokens_per_turn", "30"]
    assert run_recipe(swe_sao.main, [*arguments, "--smoke", *sizes]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["sandbox"]) == ("finished", 1, "local-unisolated")
    assert summary["containers_left"] == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()]
    assert {line["phase"] for line in lines} == {"before", "train", "after"}
    for line in lines:
        assert line["info"]["agent_program"]["turns"] == line["turns"] >= 1
        assert line["messages"][0]["content"].startswith("You repair a bug")


def test_the_agent_program_says_what_the_environment_says(
    load_program: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    agent = load_program("recipes/bash_agent.py")
    assert agent.INSTRUCTIONS == INSTRUCTIONS
    # A stand-in for the sandbox: it runs the command that it is given last.
    (tmp_path / "docker").write_text('#!/bin/sh\nfor last in "$@"; do :; done\nexec bash -c "$last"\n')
    (tmp_path / "docker").chmod(0o700)
    monkeypatch.setenv("DOCKER", str(tmp_path / "docker"))
    issue = tmp_path / "issue.txt"
    issue.write_text("it is broken")
    said = [
        "```bash\necho out; exit 3\n```",
        "```bash\ntrue\n```",
        "no block",
        "I am done.\n```bash\nsubmit\n```",
    ]
    heard: list[str] = []

    def ask(messages: list[dict[str, str]]) -> dict[str, str]:
        heard.append(messages[-1]["content"])
        return {"role": "assistant", "content": said[len(heard) - 1]}

    monkeypatch.setattr(agent, "ask", ask)
    assert agent.main(str(issue), "/testbed") == 0
    protocol = BashProtocol()
    refused = protocol.parse(said[2])
    assert isinstance(refused, Malformed)
    assert heard == [
        protocol.first_observation("it is broken", workdir="/testbed", test_command="python test.py"),
        format_observation("out\n", 3),
        format_observation("", 0),
        protocol.refusal(refused),
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--agent", "mini-swe-agent"], "--agent mini-swe-agent needs --model"),
        (
            ["--agent", "mini-swe-agent", "--model", "m", "--agent_command", "/no/mini"],
            "no program '/no/mini'",
        ),
        (["--agent_command", "sh", "--env", "Echo-v0"], "--env names an environment"),
        (["--agent", "openhands"], "--agent openhands needs --model"),
        (["--agent", "openhands", "--model", "m"], "--agent openhands needs --agent_command"),
        (
            ["--agent", "openhands", "--model", "m", "--agent_command", "/no/python"],
            "no program '/no/python'",
        ),
        (
            ["--agent", "openhands", "--agent_config", "x"],
            "--agent_config is for .* not for --agent openhands",
        ),
        (["--agent_config", "mini.yaml"], "--agent_config is for"),
        (["--agent_command", "sh", "--agent_config", "mini.yaml"], "--agent_config is for"),
        (["--agent_command", "sh", "--mode", "batch"], "mode is .batch."),
        (["--agent_command", "sh", "--env_kwargs", '{"wizard": 1}'], "wizard"),
        (["--agent_command", "sh", "--env_kwargs", '{"levels": [9]}'], "level"),
    ],
)
def test_what_cannot_work_is_named_before_a_model_is_loaded(
    swe_sao: ModuleType, options: list[str], named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    parsed = swe_sao.RECIPE.parse([*options, "--sandbox", "local-unisolated"])
    with pytest.raises(UsageError, match=named):
        swe_sao.set_up(parsed)


def test_mini_swe_agent_gets_its_configuration_and_settings_of_its_own(
    swe_sao: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--agent", "mini-swe-agent", "--agent_command", sys.executable, "--model", "m"]
    options += ["--agent_config", "mini_textbased.yaml agent.step_limit=3", "--sandbox", "local-unisolated"]
    parsed = swe_sao.RECIPE.parse(options)
    assert (parsed.config.max_tokens_per_episode, parsed.config.num_envs) == (16384, 16)
    setup = swe_sao.set_up(parsed)
    try:
        train, held_out = (runner.play for runner in (setup.train_env, setup.eval_env))
        assert isinstance(train, SWEAgentPrograms)
        assert (train.tasks.split, held_out.tasks.split) == ("train", "heldout")
    finally:
        setup.sandboxes.close()
    assert setup.sandboxes.left() == 0
