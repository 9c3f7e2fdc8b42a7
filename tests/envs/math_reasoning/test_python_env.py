"""MathPython-v0: programs in a sandbox over several turns, then an answer."""

from collections.abc import Iterator

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

import agentenv
from agentenv.baselines import make_baseline
from agentenv.errors import SandboxError, UsageError
from agentenv.testing import check_env
from agentenv_envs.math_reasoning import MathPythonEnv
from agentenv_envs.math_reasoning.python_env import LAST_TURN
from agentenv_envs.swe.protocols.tools import as_tool_call


@pytest.fixture(scope="module", params=[pytest.param("docker", marks=pytest.mark.docker), "local-unisolated"])
def env(request: pytest.FixtureRequest) -> Iterator[MathPythonEnv]:
    env = MathPythonEnv(
        split="heldout", levels=(0, 1, 2, 3, 4), sandbox=request.param, max_turns=4, tool_timeout_s=20.0
    )
    yield env
    env.close()


@pytest.fixture
def local() -> Iterator[MathPythonEnv]:
    env = MathPythonEnv(sandbox="local-unisolated", max_turns=4)
    yield env
    env.close()


def block(code: str) -> str:
    return f"```python\n{code}\n```"


def answer(env: MathPythonEnv) -> str:
    return rf"\boxed{{{env.task.answer}}}"


def test_it_keeps_the_contract_of_environments() -> None:
    def make() -> MathPythonEnv:
        return MathPythonEnv(sandbox="local-unisolated")

    env = make()
    env.reset(seed=3)
    check_env(make(), actions=["I think", block("print(6 * 7)"), answer(env)], seed=3)
    gymnasium_check_env(
        gymnasium.make("agentenv/MathPython-v0", sandbox="local-unisolated").unwrapped, skip_render_check=True
    )
    env.close()


@pytest.mark.parametrize("make", [agentenv.make, gymnasium.make])
def test_it_is_registered(make: object) -> None:
    env = make("agentenv/MathPython-v0", sandbox="local-unisolated", levels=[0])  # type: ignore[operator]
    observation, info = env.reset(seed=5)
    assert "```python\nCODE\n```" in observation and "Problem: " in observation
    assert (info["level"], info["sandbox"]) == (0, "local-unisolated")
    env.close()


def test_the_scripted_policy_solves_each_family_and_level_through_the_tool(env: MathPythonEnv) -> None:
    policy = make_baseline(env, "scripted", 0)
    seen = set()
    for seed in range(30):
        observation, info = env.reset(seed=seed)
        policy.begin(observation, info)
        seen.add(info["family"])
        observation, reward, terminated, *_ = env.step(policy.act(observation))
        assert not terminated and reward == 0.0
        _, reward, terminated, truncated, info = env.step(policy.act(observation))
        assert (reward, terminated, truncated) == (1.0, True, False), (seed, observation)
        assert info["success"] is True
        assert info["metrics"] == {
            "turns": 2.0,
            "invalid_actions": 0.0,
            "tool_calls": 1.0,
            "failed_tool_calls": 0.0,
            "answered": 1.0,
            "verifier_stopped": 0.0,
        }
    assert len(seen) == 8


def test_each_program_has_a_new_interpreter_and_the_folder_is_the_episodes(env: MathPythonEnv) -> None:
    env.reset(seed=0)
    assert env.step(block("x = 5\nopen('kept.txt', 'w').write('7')"))[0] == "(no output)"
    heard = env.step(block("print(open('kept.txt').read())\nprint(x)"))[0]
    assert heard.startswith("7\n") and "NameError: name 'x' is not defined" in heard
    assert "[exit code 1]" in heard
    env.reset(seed=0)
    assert "FileNotFoundError" in env.step(block("open('kept.txt')"))[0]


def test_several_blocks_of_a_turn_are_one_program(local: MathPythonEnv) -> None:
    local.reset(seed=0)
    assert local.step(f"First {block('x = 5')} then\n{block('print(x + 1)')}")[0] == "6"


def test_output_is_cut_to_its_budget_and_time_to_its_limit(env: MathPythonEnv) -> None:
    env.reset(seed=0)
    heard = env.step(block("print('a' * 5_000_000 + 'z')"))[0]
    assert len(heard) < env.output_chars + 100
    assert heard.startswith("aaa") and "bytes left out" in heard and heard.rstrip().endswith("z")
    before = env.tool_timeout_s
    try:
        for limit_s in (1, 5, 30):  # longer where it did not come to its first line
            env.reset(seed=0)
            env.tool_timeout_s = float(limit_s)
            heard = env.step(block("print('begun', flush=True)\nwhile True: pass"))[0]
            if "begun" in heard:
                break
    finally:
        env.tool_timeout_s = before
    assert heard.startswith("begun") and f"[stopped after {limit_s} s]" in heard


@pytest.mark.parametrize(
    "code",
    [
        "print('\\0', end='')",
        "import os\nos._exit(3)",
        "input()",
        "raise SystemExit('bye')",
        "x = 'a' * 10**10",
        "def (",
        "print('\\ud800')",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_what_a_program_does_is_an_observation(env: MathPythonEnv, code: str) -> None:
    env.reset(seed=0)
    heard, reward, terminated, truncated, info = env.step(block(code))
    assert isinstance(heard, str) and (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"malformed": False}
    assert env.step(answer(env))[1] == 1.0


def test_a_sandbox_has_no_network_and_only_the_standard_library(env: MathPythonEnv) -> None:
    if env.sandbox_kind != "docker":
        pytest.skip("a sandbox that isolates nothing has this machine's network")
    env.reset(seed=0)
    heard = env.step(block("import socket\nsocket.create_connection(('1.1.1.1', 53), 2)"))[0]
    assert "Error" in heard


def test_an_action_without_program_or_answer_is_told_so_costs_a_turn_and_is_counted(
    local: MathPythonEnv,
) -> None:
    local.reset(seed=0)
    for action, word in (
        ("I think", "write a program as"),
        (block(" "), "the program is empty"),
        (r"\boxed{}", "is empty"),
    ):
        heard, reward, terminated, truncated, info = local.step(action)
        assert heard.startswith("Not understood: ") and word in heard
        assert (reward, terminated, truncated, info["malformed"]) == (0.0, False, False, True)
    *_, info = local.step(answer(local))
    assert info["success"] is True and info["metrics"]["invalid_actions"] == 3.0


def test_turns_are_limited_and_the_last_one_is_announced(local: MathPythonEnv) -> None:
    local.reset(seed=0)
    for turn in range(1, 5):
        heard, reward, terminated, truncated, info = local.step(block("print(1)"))
        assert (LAST_TURN in heard) == (turn == 3)
        assert (reward, terminated, truncated) == (0.0, False, turn == 4)
    assert info["success"] is False and info["metrics"]["answered"] == 0.0
    assert info["metrics"]["tool_calls"] == 4.0
    with pytest.raises(RuntimeError, match="reset"):
        local.step(block("print(1)"))


@pytest.mark.parametrize("fence", ["```python", "```Python", "```py", "``` python3 ", "```PYTHON\r"])
def test_a_block_is_one_in_any_case_and_spacing(local: MathPythonEnv, fence: str) -> None:
    local.reset(seed=0)
    assert local.step(f"{fence}\nprint(6 * 7)\n```")[0] == "42"


def test_what_is_written_last_counts(local: MathPythonEnv) -> None:
    local.reset(seed=0)
    code = block("print('ran')")
    assert local.step(f"maybe {answer(local)}\n{code}")[0] == "ran"
    assert local.step(block(r"print('\\boxed{1}')"))[0] == r"\boxed{1}"
    assert local.step(f"<think>{answer(local)} {block('print(2)')}</think>{block('print(3)')}")[0].startswith(
        "3"
    )
    assert local.step(f"{code} so {answer(local)}")[1] == 1.0


@pytest.mark.parametrize("protocol", ["block", "tools"])
def test_a_box_in_code_that_was_cut_off_is_no_answer(protocol: str) -> None:
    env = MathPythonEnv(sandbox="local-unisolated", protocol=protocol)
    env.reset(seed=0)
    cut = {
        "block": "```python\nprint(r'%s",
        "tools": '<tool_call>{"name": "python", "arguments": {"code": "%s',
    }[protocol]
    heard, _, terminated, _, info = env.step(cut % answer(env))
    assert (terminated, info["malformed"]) == (False, True)
    assert "Not understood" in heard
    env.close()


def test_function_calls_are_run_and_share_what_a_turn_may_print() -> None:
    env = MathPythonEnv(sandbox="local-unisolated", protocol="tools", output_chars=40)
    assert env.tools[0]["function"]["name"] == "python"
    observation, _ = env.reset(seed=0)
    assert "<tools>" in observation and "<tool_call>" in observation
    heard = env.step(
        as_tool_call("python", code="print('a' * 99)") + as_tool_call("python", code="print('b')")
    )[0]
    assert heard.count("<tool_response>") == 2 and heard.count("a") < 30 and "b" in heard
    for wrong, word in (
        ("prose", "there is no tool call"),
        (as_tool_call("bash", command="ls"), "no function 'bash'"),
        (as_tool_call("python", text="1"), "no parameter"),
        ("<tool_call>{</tool_call>", "is not JSON"),
        ("".join(as_tool_call("python", code="1") for _ in range(5)), "at most 4"),
    ):
        env.reset(seed=0)
        heard = env.step(wrong)[0]
        assert "Not understood" in heard and word in heard, heard
    policy = make_baseline(env, "scripted", 0)
    policy.begin(*env.reset(seed=1))
    assert env.step(policy.act(env.step(policy.act(""))[0]))[1] == 1.0
    env.close()


def test_a_sandbox_that_broke_is_infrastructure_and_the_next_episode_has_a_new_one(
    env: MathPythonEnv,
) -> None:
    env.reset(seed=0)
    env.step(block("print(1)"))
    assert env._sandbox is not None
    env._sandbox.close()
    with pytest.raises(SandboxError):
        env.step(block("print(1)"))
    env.reset(seed=0)
    assert env.step(block("print(1)"))[0] == "1"


def test_an_episode_takes_a_sandbox_with_its_first_program_and_gives_it_back(local: MathPythonEnv) -> None:
    backend = local._backend
    assert backend is not None
    before = backend.left()
    local.reset(seed=0)
    assert backend.left() == before
    local.step(block("print(1)"))
    assert backend.left() == before + 1
    local.step(answer(local))
    assert backend.left() == before


def test_guessing_with_and_without_the_tool_is_seldom_right(local: MathPythonEnv) -> None:
    policy = make_baseline(local, "random", 0)
    won = 0.0
    for seed in range(40):
        observation, info = local.reset(seed=seed)
        policy.begin(observation, info)
        over = False
        while not over:
            observation, reward, terminated, truncated, _ = local.step(policy.act(observation))
            over = terminated or truncated
            won += reward
    assert won <= 8


def test_huge_actions_are_bounded(local: MathPythonEnv) -> None:
    local.reset(seed=0)
    assert "at most 100000" in local.step(block("#" * 1_000_000))[0]
    assert local.step("```python\n" * 100_000)[4]["malformed"] in (True, False)
    _, reward, terminated, _, info = local.step(r"\boxed{" + "1" * 1_000_000 + "}")
    assert (reward, terminated, info["decided_by"]) == (0.0, True, "size")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"keep_state": 1}, "keep_state is 1"),
        ({"protocol": "xml"}, "protocol is 'xml'; allowed are: block, tools"),
        ({"sandbox": "podman"}, "podman"),
        ({"max_turns": 0}, "max_turns is 0; it has to be a whole number from 1"),
        ({"max_turns": "8"}, "max_turns is '8'"),
        ({"tool_timeout_s": float("nan")}, "tool_timeout_s is nan"),
        ({"tool_timeout_s": "1"}, "tool_timeout_s is '1'"),
        ({"output_chars": 1.5}, "output_chars is 1.5"),
        ({"tool_timeout_s": -1.0}, "tool_timeout_s"),
        ({"output_chars": 0}, "output_chars"),
        ({"split": "test"}, "split"),
        ({"image": "python:3.12"}, "image='python:3.12'"),
        ({"memory_mb": 1}, "memory_mb"),
    ],
)
def test_a_bad_argument_is_refused_by_name(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        MathPythonEnv(**{"sandbox": "local-unisolated", **arguments})  # type: ignore[arg-type]


def test_a_policy_of_the_tool_needs_the_tool() -> None:
    env = agentenv.make("Math-v0")
    for name in ("Scripted", "RandomPython"):
        with pytest.raises(UsageError, match=r"MathPython-v0"):
            make_baseline(env, f"agentenv_envs.math_reasoning.policies:{name}", 0)
