"""Agent programs as they are, trained on: what is recorded is what the model says, and SAO takes a step on it.

What plays, compares and trains is that of `benchmarks/agent_programs.py`. mini-swe-agent is used where its command
`mini` is installed, or where AGENTENV_MINI_SWE_AGENT names it; OpenHands where AGENTENV_OPENHANDS_PYTHON names the
python that has it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from agentenv.errors import AgentEnvError
from agentenv.trajectory import Trajectory
from agentenv_envs.swe.agents import Job, Launch, Launcher, mini_swe_agent
from agentenv_envs.swe.workspace import EmbeddedTasks

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

_AGENT = """
import json, os, subprocess, urllib.request

history = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "mend it"}]
for turn in range(4):
    if turn == 3:  # what came before is summed up
        history = [*history[:2], {"role": "user", "content": "you looked around"}]
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": history}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    output = subprocess.run([os.environ["DOCKER"], "exec", "x", "ls"], capture_output=True, text=True).stdout
    history += [message, {"role": "user", "content": output}]
"""


@pytest.fixture(scope="module")
def programs(repository: Path, load_program: Callable[[str], ModuleType]) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        return load_program("benchmarks/agent_episodes.py")


@pytest.fixture(scope="module")
def releases(load_program: Callable[[str], ModuleType]) -> ModuleType:
    return load_program("benchmarks/agent_releases.py")


@pytest.fixture(scope="module")
def mini() -> str:
    """The command of mini-swe-agent, from its released package."""
    found = os.environ.get("AGENTENV_MINI_SWE_AGENT") or shutil.which("mini")
    if not found:
        pytest.skip("mini-swe-agent is not installed")
    return found


@pytest.fixture(scope="module")
def openhands_python() -> str:
    """The python of an environment with OpenHands from its released packages."""
    found = os.environ.get("AGENTENV_OPENHANDS_PYTHON")
    if not found:
        pytest.skip("AGENTENV_OPENHANDS_PYTHON names no environment with OpenHands")
    return found


def test_one_sao_step_trains_on_an_agent_program_that_forks(programs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(_AGENT)

    def launch(job: Job) -> Launch:
        return Launch([sys.executable, str(tmp_path / "agent.py")], {"DOCKER": str(job.executable)})

    step = programs.sao_step(launch, programs.random_policy())
    assert step.difference < 1e-4 and step.changed > 0 and "loss" in step.log
    assert step.engine_tokens == sum(trajectory.num_action_tokens for trajectory in step.batch) > 0
    for trajectory in step.batch:
        assert trajectory.turns == 4 and len(trajectory.earlier_segments) == 1
        assert trajectory.info["exit_code"] == 0 and trajectory.info["commands"] == 4


def test_a_wrong_log_prob_shows_as_a_difference(programs: ModuleType) -> None:
    policy = programs.random_policy()
    prompt, completion = [5, 6, 7], [8, 9, 10]
    logprobs = programs.forward_logprobs(policy.model, prompt, completion).tolist()
    with torch.no_grad():
        whole = policy.model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
    assert logprobs[1] == pytest.approx(float(whole[3, 9]), abs=1e-5)
    recorded, mask = [logprobs[0], 0.0, logprobs[2] - 0.25], [True, False, True]
    trajectory = Trajectory(prompt, completion, recorded, mask, [0, -1, 0])
    assert programs.largest_difference(policy.model, trajectory) == pytest.approx(0.25, abs=1e-4)


def test_network_interfaces_are_read_from_what_the_sandbox_told(programs: ModuleType) -> None:
    trajectory = Trajectory([1], [], [], [], [])
    for told, names in (
        ('{"output": "interfaces: lo eth0\\n"}', ["eth0"]),
        ("<output>\ninterfaces: lo\n</output>", []),
    ):
        trajectory.messages = [
            {"role": "assistant", "content": "interfaces: x9"},
            {"role": "tool", "content": told},
        ]
        assert programs.interfaces(trajectory) == names
    trajectory.messages = []
    with pytest.raises(AgentEnvError, match="no network interfaces"):
        programs.interfaces(trajectory)


def test_dictated_answers_are_checked_and_trained_on_as_sampled_ones(
    programs: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(_AGENT)

    def launch(job: Job) -> Launch:
        return Launch([sys.executable, str(tmp_path / "agent.py")], {"DOCKER": str(job.executable)})

    said = ["one", "two", "three", "four"]
    policy = programs.random_policy()
    step = programs.sao_step(launch, policy, said=said, seed=5)
    assert step.difference < 1e-4 and [trajectory.reward for trajectory in step.batch] == [0.0, 0.0]
    trajectory = step.batch[0]
    answers = [message["content"] for message in trajectory.messages if message["role"] == "assistant"]
    assert answers == ["four"]
    assert trajectory.info["task_id"] == EmbeddedTasks("train", (1,), None).task(5).task_id


@pytest.mark.slow
def test_one_sao_step_trains_on_mini_swe_agent_as_it_is_released(mini: str, programs: ModuleType) -> None:
    policy = programs.random_policy()
    step = programs.sao_step(mini_swe_agent(mini), policy)
    assert step.difference < 1e-4 and step.changed > 0 and "loss" in step.log
    for trajectory in step.batch:
        # Noise is no call of a tool: it leaves such an answer out of its history, and gives up after three.
        assert (trajectory.turns, len(trajectory.earlier_segments)) == (3, 2)
        assert trajectory.info["agent_program"]["forks"] == 2
        assert trajectory.terminated and not trajectory.success
        assert "bash" in policy.tokenizer.decode(trajectory.prompt_ids)


def _dictated(programs: ModuleType, releases: ModuleType, agent: str, launcher: Launcher) -> Trajectory:
    """An episode in which the program solves its task."""
    release = releases.RELEASES[agent]
    step = programs.sao_step(
        launcher,
        programs.random_policy(),
        said=release.answers(),
        seed=releases.SEED,
        max_tokens=1000,
    )
    trajectory = step.batch[0]
    info: dict[str, Any] = trajectory.info
    assert step.difference < 1e-4 and step.changed > 0
    assert (info["exit_code"], info["commands"]) == (0, release.commands), info["output"]
    assert info["grade"]["resolved"] and trajectory.reward == 1.0 and trajectory.end_reason == "terminated"
    return trajectory


@pytest.mark.slow
def test_the_tools_of_mini_swe_agent_reach_the_sandbox(
    mini: str, programs: ModuleType, releases: ModuleType
) -> None:
    trajectory = _dictated(programs, releases, "mini-swe-agent", mini_swe_agent(mini))
    assert trajectory.info["agent_program"]["forks"] == 0
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["system", "user", *["assistant", "tool"] * 3, "assistant"]
    assert "def " in trajectory.messages[3]["content"] and isinstance(programs.interfaces(trajectory), list)


@pytest.mark.slow
def test_the_tools_of_openhands_reach_the_sandbox(
    openhands_python: str, programs: ModuleType, releases: ModuleType
) -> None:
    trajectory = _dictated(programs, releases, "openhands", releases.launcher("openhands", openhands_python))
    agent = trajectory.info["agent_program"]
    assert (agent["forks"], agent["agents"], len(trajectory.split())) == (
        1,
        2,
        3,
    )  # its history was summed up
    text = "\n".join(message["content"] for message in trajectory.messages)
    for part in ("You looked around.", "absolute path", "seen: yes in /", "has been edited"):
        assert part in text
