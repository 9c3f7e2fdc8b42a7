"""Environments written for verifiers, as it is released, played as ours; runs the example of docs/interop.md."""

import asyncio
import json
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("AGENTENV_REQUIRE_INTEROP") != "1":
    pytest.importorskip("verifiers")

import verifiers

import agentenv
from agentenv.errors import InfrastructureError, RewardError, UsageError
from agentenv.interop.verifiers import VerifiersEnv
from agentenv.interop.verifiers.episode import _TurnClient
from agentenv.testing import check_env

pytestmark = pytest.mark.interop

HEAD = """
import verifiers as vf
from datasets import Dataset
"""

MODULES = {
    "vf_capitals": """
    def exact(completion, answer):
        return float(completion[-1].content.strip() == answer)

    def length(completion):
        return len(completion[-1].content)

    def load_environment(system_prompt="Answer with one word."):
        rows = [("France", "Paris"), ("Japan", "Tokyo"), ("Kenya", "Nairobi")]
        dataset = Dataset.from_list([{"question": f"Capital of {c}?", "answer": a} for c, a in rows])
        held_out = Dataset.from_list([{"question": "Capital of Peru?", "answer": "Lima"}])
        return vf.SingleTurnEnv(
            dataset=dataset,
            eval_dataset=held_out,
            system_prompt=system_prompt,
            rubric=vf.Rubric(funcs=[exact, length], weights=[1.0, 0.0]),
        )
    """,
    "vf_guess": """
    class Guess(vf.MultiTurnEnv):
        cleaned = []

        async def setup_state(self, state):
            state["guesses"] = 0
            return state

        @vf.cleanup
        async def count(self, state):
            Guess.cleaned.append(state["guesses"])

        async def env_response(self, messages, state, **kwargs):
            state["guesses"] += 1
            guess, number = messages[-1].content.strip(), state["answer"]
            if guess == "crash":
                raise vf.SandboxError("the sandbox is gone")
            if guess == "bug":
                raise KeyError("bug")
            if guess == number:
                state["final_env_response"] = [vf.UserMessage(content="right")]
                return []
            return [vf.UserMessage(content="higher" if guess < number else "lower")]

    def solved(state):
        return float(bool(state.get("final_env_response"))) / max(1, state["guesses"])

    def load_environment(max_turns=4):
        dataset = Dataset.from_list([{"question": "Guess from 1 to 9.", "answer": str(n)} for n in range(1, 10)])
        return Guess(dataset=dataset, max_turns=max_turns, rubric=vf.Rubric(funcs=[solved]))
    """,
    "vf_tools": """
    def add(a: int, b: int) -> int:
        '''Add two numbers.

        Args:
            a: one.
            b: the other.
        '''
        return a + b

    def right(completion, answer):
        return float(answer in (completion[-1].content or ""))

    def load_environment():
        dataset = Dataset.from_list([{"question": "What is 17 + 25?", "answer": "42"}])
        return vf.ToolEnv(dataset=dataset, tools=[add], max_turns=5, rubric=vf.Rubric(funcs=[right]))
    """,
    "vf_session": """
    def count(word: str, times: int) -> int:
        '''Count.

        Args:
            word: what.
            times: how often.
        '''
        return times * len(word)

    class Session(vf.StatefulToolEnv):
        def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            state["calls"] = state.get("calls", 0) + 1
            return {**tool_args, "times": state["calls"]}

    def calls(state):
        return float(state.get("calls", 0))

    def load_environment():
        dataset = Dataset.from_list([{"question": "Count.", "answer": ""}])
        env = Session(dataset=dataset, rubric=vf.Rubric(funcs=[calls]))
        env.add_tool(count, args_to_skip=["times"])
        return env
    """,
    "vf_refused": """
    class Rewriting(vf.SingleTurnEnv):
        async def get_prompt_messages(self, state):
            return state["prompt"]

    class Asking(vf.SingleTurnEnv):
        async def get_model_response(self, state, prompt, **kwargs):
            return None

    def ranks(completions) -> list[float]:
        return [0.0 for _ in completions]

    def broken(completion):
        raise ValueError("no parser")

    def load_environment(kind):
        dataset = Dataset.from_list([{"question": "?", "answer": ""}])
        if kind == "group":
            return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[ranks]))
        if kind == "ungradable":
            return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[broken]))
        if kind == "routed":
            return vf.EnvGroup(envs=[load_environment("ungradable")], env_names=["one"])
        return {"rewriting": Rewriting, "asking": Asking}[kind](dataset=dataset, rubric=vf.Rubric(funcs=[broken]))
    """,
}


@pytest.fixture(scope="module", autouse=True)
def _modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("environments")
    for name, source in MODULES.items():
        (folder / f"{name}.py").write_text(HEAD + textwrap.dedent(source))
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    yield
    patch.undo()
    for name in MODULES:
        sys.modules.pop(name, None)


def call(**arguments: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"


def test_a_single_turn_environment_is_a_data_set_and_a_rubric() -> None:
    env = agentenv.make("Verifiers-v0", env_id="vf-capitals")
    assert isinstance(env, VerifiersEnv) and env.max_turns == 1
    observation, info = env.reset(seed=4)
    assert observation == "Answer with one word.\n\nCapital of Japan?"
    assert info == {"task_id": "vf-capitals-train-1", "family": "vf-capitals"}
    _, reward, terminated, truncated, info = env.step("Tokyo")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert info["metrics"] == {"exact": 1.0, "length": 5.0, "num_turns": 1.0}
    assert env.reset(seed=0)[0].endswith("France?")
    assert env.step("Lyon")[1:4] == (0.0, True, False)
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step("Paris")
    check_env(env, actions=["Tokyo"], seed=1)


def test_the_held_out_split_is_the_evaluation_data_set_and_arguments_go_to_load_environment() -> None:
    env = VerifiersEnv("vf-capitals", split="heldout", env_kwargs={"system_prompt": "Be brief."})
    assert env.reset(seed=7)[0] == "Be brief.\n\nCapital of Peru?"
    assert env.step("Lima")[1] == 1.0


def test_a_multi_turn_environment_answers_ends_and_cleans_up_as_in_verifiers() -> None:
    env = VerifiersEnv("vf-guess")
    cleaned = sys.modules["vf_guess"].Guess.cleaned
    assert env.max_turns == 4
    assert env.reset(seed=4)[0] == "Guess from 1 to 9."
    assert env.step("3") == ("higher", 0.0, False, False, {})
    assert env.step("7") == ("lower", 0.0, False, False, {})
    observation, reward, terminated, truncated, info = env.step("5")
    assert (observation, terminated, truncated) == ("right", True, False)
    assert reward == pytest.approx(1 / 3) and info["stop_condition"] == "has_final_env_response"
    assert cleaned[-1] == 3
    env.reset(seed=4)
    assert [env.step("1")[2:4] for _ in range(4)] == [(False, False)] * 3 + [(False, True)]
    env.reset(seed=4)
    env.step("1")
    ended = len(cleaned)
    env.close()
    env.close()
    assert cleaned[ended:] == [1], "a rollout that is left is cleaned up, once"
    check_env(VerifiersEnv("vf-guess"), actions=["3", "7", "5"], seed=4)


def test_the_policy_calls_the_tools_of_a_tool_environment_in_text() -> None:
    env = VerifiersEnv("vf-tools")
    observation, _ = env.reset(seed=0)
    assert (
        observation.startswith("What is 17 + 25?\n\nYou can call tools.") and '"name": "add"' in observation
    )
    assert env.step(f"Let me see. {call(a=17, b=25)}")[0] == "42"
    assert env.step(call(a=1, b=1) + call(a=2, b=2))[0] == "2\n4"
    assert "Expecting value" in env.step('<tool_call>{"name": "add", "argu')[0]
    _, reward, terminated, truncated, info = env.step("It is 42.")
    assert (reward, terminated, truncated, info["stop_condition"]) == (1.0, True, False, "no_tools_called")
    assert info["metrics"]["add_calls"] == 3.0
    check_env(env, actions=[call(a=17, b=25), "42"], seed=0)


def test_a_tool_environment_with_state_injects_its_arguments() -> None:
    env = VerifiersEnv("vf-session")
    assert "times" not in env.reset(seed=0)[0].split("The tools:")[1]
    count = '<tool_call>{"name": "count", "arguments": {"word": "abc"}}</tool_call>'
    assert [env.step(count)[0], env.step(count)[0]] == ["3", "6"]
    assert env.step("done")[1] == 2.0


class ScriptedClient(_TurnClient):
    """Gives prepared answers, for verifiers' own way of running a rollout."""

    def __init__(self, answers: list[str]) -> None:
        super().__init__()
        self.answers = answers

    async def get_response(self, prompt: Any, model: str, *args: Any, **kwargs: Any) -> Any:
        from verifiers.types import ResponseMessage

        text = self.answers.pop(0)
        self.answered.put_nowait(ResponseMessage(content=text, finish_reason="stop", is_truncated=False))
        return await super().get_response(prompt, model, *args, **kwargs)


@pytest.mark.parametrize(
    ("id", "actions"), [("vf-guess", ["1", "9", "4"]), ("vf-guess", ["1"] * 4), ("vf-capitals", ["Rome"])]
)
def test_rewards_and_conversations_are_those_of_verifiers_own_rollout(id: str, actions: list[str]) -> None:
    env = VerifiersEnv(id)
    told = [env.reset(seed=0 if id == "vf-capitals" else 3)[0]]
    reward, info = 0.0, {}
    for action in actions:
        observation, reward, *_, info = env.step(action)
        told.append(observation)
    theirs = verifiers.load_environment(id)
    row = theirs.get_dataset()[0 if id == "vf-capitals" else 3]
    output = asyncio.run(theirs.run_rollout(row, ScriptedClient(list(actions)), "scripted", {}))
    assert reward == output["reward"]
    assert info["metrics"] == output["metrics"]
    spoken = [message["content"] for message in output["completion"]]
    played = [text for pair in zip(actions, told[1:], strict=True) for text in pair]
    assert spoken == played[: len(spoken)] and not any(played[len(spoken) :])


def test_many_episodes_go_on_side_by_side() -> None:
    envs = [VerifiersEnv("vf-guess") for _ in range(5)]
    for number, env in enumerate(envs):
        env.reset(seed=number)
    assert [env.step("3")[0] for env in envs] == ["lower", "lower", "right", "higher", "higher"]
    for env in envs:
        env.close()


def test_failures_are_told_apart() -> None:
    env = VerifiersEnv("vf-guess")
    for action, kind, message in (
        ("crash", InfrastructureError, "the sandbox is gone"),
        ("bug", KeyError, "bug"),
    ):
        env.reset(seed=0)
        with pytest.raises(kind, match=message):
            env.step(action)
        with pytest.raises(RuntimeError, match="call reset first"):
            env.step("1")
    ungradable = VerifiersEnv("vf-refused", env_kwargs={"kind": "ungradable"})
    ungradable.reset(seed=0)
    with pytest.raises(RewardError, match="no parser"):
        ungradable.step("x")


def test_signals_stay_the_programs_and_environments_can_be_made_in_any_thread() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    VerifiersEnv("vf-capitals", env_kwargs={"system_prompt": "one"})
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    made: list[str] = []

    def make() -> None:
        made.append(VerifiersEnv("vf-capitals", env_kwargs={"system_prompt": "two"}).reset(seed=0)[0])

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert made == ["two\n\nCapital of France?"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_id": "vf-nowhere"}, "verifiers can't load it"),
        ({"env_id": "vf-guess", "env_kwargs": {"turns": 3}}, "verifiers can't load it"),
        ({"env_id": "vf-guess", "split": "test"}, "split must be train or heldout"),
        ({"env_id": "vf-guess", "split": "heldout"}, "has no data set for split 'heldout'"),
        (
            {"env_id": "vf-refused", "env_kwargs": {"kind": "group"}},
            "compare the rollouts of a group; supported are",
        ),
        (
            {"env_id": "vf-refused", "env_kwargs": {"kind": "routed"}},
            "EnvGroup has a rollout loop of its own",
        ),
        ({"env_id": "vf-refused", "env_kwargs": {"kind": "rewriting"}}, "rewrites the conversation"),
        ({"env_id": "vf-refused", "env_kwargs": {"kind": "asking"}}, "asks the model in a way of its own"),
    ],
)
def test_what_cannot_be_stepped_is_one_clear_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        agentenv.make("Verifiers-v0", **arguments)


def test_the_example_of_the_documentation_runs(
    documented: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exec(documented("Verifiers-v0", **{"gsm8k": "vf-capitals", "18": "Paris"}), found := {})
    assert found["terminated"] is True and found["reward"] == 1.0
