"""Whole episodes through each protocol: solved tasks, budgets, hostile calls, real rows, transcripts of the docs."""

import asyncio
import json
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.errors import SandboxError, UsageError
from agentenv.inference import LLMProxy
from agentenv.rollout import EnvManager, EpisodeTicket, RolloutConfig, SlotContext
from agentenv.testing import ByteTokenizer, ScriptedModel
from agentenv.trajectory import Trajectory
from agentenv_envs.swe import SWEEnv
from agentenv_envs.swe.embedded.tasks import MODULE, EmbeddedTask, generate_task
from agentenv_envs.swe.protocols import PROTOCOLS, SUBMIT, as_action
from agentenv_envs.swe.protocols.r2e import as_function
from agentenv_envs.swe.protocols.tools import as_tool_call

Agent = Callable[[EmbeddedTask], list[str]]


def _change(task: EmbeddedTask) -> dict[str, str]:
    """The first gold edit as old and new text, with as many lines before it as make the old one unique."""
    edit = task.gold_edits[0]
    before, after = (source.split("\n") for source in (task.files[MODULE], edit.apply(task.files[MODULE])))
    first = edit.line - 1
    while task.files[MODULE].count("\n".join(before[first : edit.line])) > 1:
        first -= 1
    return {"old_str": "\n".join(before[first : edit.line]), "new_str": "\n".join(after[first : edit.line])}


def _by_bash(task: EmbeddedTask) -> list[str]:
    edit = task.gold_edits[0]
    return [
        as_action(f"cat -n {MODULE}"),
        as_action(f"sed -i '{edit.line}s/{edit.old}/{edit.new}/' {MODULE}"),
        as_action(SUBMIT),
    ]


def _by_r2e(task: EmbeddedTask) -> list[str]:
    return [
        as_function("file_editor", command="view", path=f"/work/{MODULE}"),
        as_function("search", search_term="return"),
        as_function("file_editor", command="str_replace", path=f"/work/{MODULE}", **_change(task)),
        as_function("execute_bash", cmd="python test.py"),
        as_function("finish", command="submit"),
    ]


def _by_tools(task: EmbeddedTask) -> list[str]:
    change = as_tool_call("file_editor", command="str_replace", path=MODULE, **_change(task))
    return [
        as_tool_call("bash", command=f"cat -n {MODULE}"),
        change + "\n" + as_tool_call("bash", command="python test.py"),
        as_tool_call("submit"),
    ]


AGENTS: dict[str, Agent] = {"bash": _by_bash, "r2e": _by_r2e, "tools": _by_tools}


def _play(env: SWEEnv, agent: Agent, seed: int) -> tuple[list[tuple[str, str]], float]:
    """Pairs of action and observation, and the reward."""
    env.reset(seed=seed)
    turns, reward = [], 0.0
    for action in agent(generate_task(seed, split="heldout")):
        observation, reward, _, truncated, info = env.step(action)
        assert not truncated and not info.get("malformed"), observation
        turns.append((action, observation))
    return turns, reward


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("sandbox", [pytest.param("docker", marks=pytest.mark.docker), "local-unisolated"])
def test_a_scripted_agent_solves_tasks_through_each_protocol(name: str, sandbox: str) -> None:
    assert set(AGENTS) == set(PROTOCOLS)
    env = SWEEnv(split="heldout", sandbox=sandbox, protocol=name)
    try:
        for seed in range(3):
            turns, reward = _play(env, AGENTS[name], seed)
            assert reward == 1.0, turns
    finally:
        env.close()


@pytest.mark.parametrize("name", AGENTS)
def test_the_transcripts_in_the_docs_are_real_ones(name: str, repository: Path) -> None:
    docs = (repository / "docs" / "environments-swe.md").read_text(encoding="utf-8")
    env = SWEEnv(split="heldout", sandbox="local-unisolated", protocol=name)
    try:
        turns, reward = _play(env, AGENTS[name], seed=0)
    finally:
        env.close()
    shown = "".join(
        f"    {who}:\n{textwrap.indent(text, ' ' * 6)}\n"
        for action, observation in turns
        for who, text in (("agent", action), ("environment", observation))
        if text
    )
    assert f"{shown}    end:\n      reward {reward}\n" in docs, shown


@pytest.fixture
def tools_env() -> Iterator[SWEEnv]:
    env = SWEEnv(split="heldout", sandbox="local-unisolated", protocol="tools")
    yield env
    env.close()


def test_an_edit_of_the_last_episode_can_not_be_undone(tools_env: SWEEnv) -> None:
    undo = as_tool_call("file_editor", command="undo_edit", path=MODULE)
    tools_env.reset(seed=0)
    tools_env.step(as_tool_call("file_editor", command="insert", path=MODULE, insert_line=0, new_str="# x"))
    tools_env.reset(seed=0)
    assert "there is no edit" in tools_env.step(undo)[0]


def test_calls_of_a_turn_share_time_and_characters() -> None:
    long, sleep = (as_tool_call("bash", command=text) for text in ("seq 10000", "sleep 60"))
    for limit_s in (0.6, 4.0, 30.0):  # longer where the first command was cut
        env = SWEEnv(
            sandbox="local-unisolated", protocol="tools", command_timeout_s=limit_s, observation_chars=400
        )
        env.reset(seed=0)
        heard, *_ = env.step(long + sleep + long)
        answers = heard.split("\n</tool_response>\n<tool_response>\n")
        if "bytes left out" in answers[0]:
            break
        env.close()
    assert len(answers) == 3 and "bytes left out" in answers[0] and len(answers[0]) < 250
    stopped = re.match(r"\[stopped after (\S+) s]", answers[1])
    assert stopped and float(stopped[1]) < limit_s and answers[2].startswith("[not run")
    # Those that were done before a submission are done; the grade is of what they left.
    env.reset(seed=0)
    *_, terminated, _, info = env.step(as_tool_call("bash", command=f"rm {MODULE}") + as_tool_call("submit"))
    assert terminated and info["grade"]["reason"] == f"{MODULE} is gone"
    env.close()


def test_an_episode_over_its_time_is_truncated_and_a_late_submission_is_graded() -> None:
    env = SWEEnv(split="heldout", sandbox="local-unisolated", episode_timeout_s=0.5)
    for _ in range(3):
        env.reset(seed=0)
        started = time.monotonic()
        heard, reward, terminated, truncated, info = env.step(as_action("sleep 200"))
        assert time.monotonic() - started < 60
        if heard == "[stopped after 0.5 s]":  # less is left where the machine stood still after the reset
            break
    assert (reward, terminated, truncated) == (0.0, False, True) and heard == "[stopped after 0.5 s]"
    assert info["success"] is False and info["truncated_by"] == "episode_timeout_s"
    env.reset(seed=0)
    time.sleep(0.6)
    *_, truncated, info = env.step(as_action("touch x"))
    assert truncated and info["truncated_by"] == "episode_timeout_s"
    env.reset(seed=0)
    time.sleep(0.6)
    _, reward, terminated, truncated, info = env.step(as_action(SUBMIT))
    assert terminated and not truncated and info["metrics"] == {"submitted": 1.0}
    env.close()


def test_a_sandbox_that_is_gone_is_infrastructure_in_each_protocol() -> None:
    view = {"command": "view", "path": MODULE}
    actions = {
        "bash": as_action("ls"),
        "r2e": as_function("file_editor", **view),
        "tools": as_tool_call("file_editor", **view),
    }
    for name, action in actions.items():
        env = SWEEnv(sandbox="local-unisolated", protocol=name)
        env.reset(seed=0)
        assert env._workspace is not None
        env._workspace.sandbox.close()
        with pytest.raises(SandboxError):
            env.step(action)
        env.close()


@pytest.mark.parametrize("name", AGENTS)
def test_a_rollout_plays_each_protocol_and_its_tokens_are_the_dialogue(name: str) -> None:
    actions = AGENTS[name](generate_task(0, split="heldout"))
    tokenizer = ByteTokenizer()

    async def play() -> Trajectory:
        manager = EnvManager(
            "slot",
            lambda: SWEEnv(split="heldout", sandbox="local-unisolated", protocol=name),
            SlotContext(
                LLMProxy([ScriptedModel(actions)]),
                tokenizer,
                RolloutConfig(max_tokens_per_episode=40_000, max_tokens_per_turn=2_000),
            ),
        )
        try:
            return await manager.run_episode(EpisodeTicket("e", "g", 0, start_version=0, number=0), 0)
        finally:
            manager.end()
            await manager.join(asyncio.get_running_loop().time() + 60)

    trajectory = asyncio.run(play())
    assert (trajectory.reward, trajectory.end_reason, trajectory.turns) == (1.0, "terminated", len(actions))
    assert [m["content"] for m in trajectory.messages if m["role"] == "assistant"] == actions
    dialogue = tokenizer.decode([*trajectory.prompt_ids, *trajectory.completion_ids])
    rendered = str(tokenizer.apply_chat_template(trajectory.messages, tokenize=False))
    assert dialogue.rstrip("\n") == rendered.rstrip("\n")


def test_a_bad_protocol_or_budget_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="allowed are: bash, r2e, tools"):
        SWEEnv(sandbox="local-unisolated", protocol="json")
    with pytest.raises(UsageError, match="episode_timeout_s"):
        SWEEnv(sandbox="local-unisolated", episode_timeout_s=0)


_PATHS = st.one_of(
    st.sampled_from(
        [MODULE, ".", "", "/", "new/x.py", f"{MODULE}/x", "\0", "\ud800", "/proc/self/mem", "a" * 400]
    ),
    st.text(max_size=8),
)
_ARGUMENTS = st.fixed_dictionaries(
    {"command": st.sampled_from(["view", "create", "str_replace", "insert", "undo_edit"]), "path": _PATHS},
    optional={
        "file_text": st.text(max_size=30),
        "old_str": st.sampled_from(["return", "    ", "", "\n", "def "]) | st.text(max_size=5),
        "new_str": st.text(max_size=30),
        "insert_line": st.integers(-3, 40) | st.text(max_size=3),
        "view_range": st.lists(st.integers(-3, 40), max_size=3) | st.text(max_size=6),
        "concise": st.booleans() | st.text(max_size=5),
    },
)


@given(arguments=_ARGUMENTS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_call_of_the_editor_raises_or_answers_at_length(
    tools_env: SWEEnv, arguments: dict[str, object]
) -> None:
    if tools_env._workspace is None or tools_env._turn > 40:
        tools_env.reset(seed=1)
    heard, reward, *_ = tools_env.step(as_tool_call("file_editor", **arguments))
    assert heard.startswith("<tool_response>\n") and len(heard) < 9_000 and reward == 0.0


ROWS = ("first",) if not os.environ.get("AGENTENV_ALL_ROWS") else ("first", "second", "third")


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize("which", ROWS)
def test_the_gold_patch_solves_a_real_row_through_the_bash_protocol(
    which: str, shared_data: Path, tmp_path: Path
) -> None:
    """AGENTENV_ALL_ROWS=1 plays all three rows; one is enough to hold the way from action to reward."""
    rows = (shared_data / "swe_pypi" / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    row = rows[("first", "second", "third").index(which)]
    source = tmp_path / "row.jsonl"
    source.write_text(row + "\n", encoding="utf-8")
    env = SWEEnv(dataset=str(source), sandbox="docker")
    try:
        env.reset(seed=0)
        patch = json.loads(row)["patch"].rstrip("\n")
        heard, *_ = env.step(as_action(f"git apply --verbose <<'PATCH'\n{patch}\nPATCH"))
        assert "exit code" not in heard, heard
        _, reward, terminated, _, info = env.step(as_action(SUBMIT))
    finally:
        env.close()
    assert (reward, terminated) == (1.0, True), info
