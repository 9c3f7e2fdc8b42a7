"""Agent programs in the place of environments: from a program to a batch, and what goes wrong in between."""

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.agents import AgentCall, AgentOutcome, AgentRunner, run_program
from agentenv.errors import EnvError, RolloutError, UsageError
from agentenv.inference import LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig, SlotContext
from agentenv.testing import ByteTokenizer, ScriptedModel

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

_AGENT = """
import json, os, sys, urllib.request

history = [{"role": "user", "content": sys.argv[1]}]
for _ in range(int(sys.argv[2])):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": history}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    print(message["content"])
    history += [message, {"role": "user", "content": "go on"}]
"""
"""An agent program with a loop of its own; arguments: task, turns."""


def _ask(call: AgentCall, text: str = "hi") -> str:
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(
        f"{call.base_url}/chat/completions", body, {"Authorization": f"Bearer {call.api_key}"}
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])
    except urllib.error.HTTPError as error:
        error.close()
        raise


def _config(**settings: Any) -> RolloutConfig:
    return RolloutConfig(
        **{
            "batch_size": 2,
            "num_envs": 2,
            "asynchrony": 0.0,
            "max_tokens_per_turn": 32,
            "max_tokens_per_episode": 512,
            "batch_timeout_s": 60.0,
            "shutdown_timeout_s": 60.0,
            **settings,
        }
    )


def _controller(
    play: Callable[[AgentCall], AgentOutcome], model: ScriptedModel | None = None, **settings: Any
) -> AsyncController:
    model = model or ScriptedModel(["hello"], repeat=True)
    return AsyncController(AgentRunner(play), LLMProxy([model]), ByteTokenizer(), _config(**settings))


def test_a_program_with_a_loop_of_its_own_yields_a_trajectory(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(_AGENT)

    def play(call: AgentCall) -> AgentOutcome:
        result = run_program([sys.executable, "agent.py", f"task {call.seed}", "3"], call, cwd=tmp_path)
        assert (result.exit_code, result.output) == (0, "hello\n" * 3)
        return AgentOutcome(0.25, info={"task_id": f"t{call.seed}", "success": True})

    with _controller(play) as controller:
        batch = controller.get_batch(0)
    assert len(batch) == 2
    for trajectory in batch:
        trajectory.validate()
        assert (trajectory.reward, trajectory.turns, trajectory.earlier_segments) == (0.25, 3, [])
        assert trajectory.task_id == f"t{trajectory.seed}" and trajectory.end_reason == "terminated"
        assert trajectory.messages[0] == {"role": "user", "content": f"task {trajectory.seed}"}
        assert trajectory.num_action_tokens == 3 * len("hello$")


def test_an_evaluation_plays_programs_too() -> None:
    def play(call: AgentCall) -> AgentOutcome:
        return AgentOutcome(float(_ask(call) == "hello"))

    with _controller(play) as controller:
        results = controller.evaluate(None, [3, 4, 5], greedy=True)
    assert [result.seed for result in results] == [3, 4, 5]
    assert [result.reward for result in results] == [1.0] * 3


def test_the_server_ends_with_the_last_slot() -> None:
    calls: list[AgentCall] = []
    closed: list[str] = []

    def play(call: AgentCall) -> AgentOutcome:
        calls.append(call)
        return AgentOutcome(float(len(_ask(call))))

    runner = AgentRunner(play, close=lambda: closed.append("closed"))
    proxy = LLMProxy([ScriptedModel(["hello"], repeat=True)])
    with AsyncController(runner, proxy, ByteTokenizer(), _config()) as controller:
        controller.get_batch(0)
        assert closed == []
    assert closed == ["closed"]
    with pytest.raises(urllib.error.URLError, match="refused"):
        _ask(calls[0])


def test_a_key_is_worth_nothing_after_its_episode() -> None:
    calls: list[AgentCall] = []
    refusals: list[int] = []

    def play(call: AgentCall) -> AgentOutcome:
        _ask(call)
        calls.append(call)
        if len(calls) > 1:
            try:
                _ask(calls[0])
            except urllib.error.HTTPError as error:
                refusals.append(error.code)
        return AgentOutcome(1.0)

    with _controller(play, batch_size=2, num_envs=1) as controller:
        controller.get_batch(0)
    assert refusals[:1] == [401]


def test_a_used_up_budget_is_told_to_whoever_grades() -> None:
    def play(call: AgentCall) -> AgentOutcome:
        _ask(call)
        _ask(call)
        assert not call.is_over
        with pytest.raises(urllib.error.HTTPError, match="403"):
            _ask(call)
        assert call.is_over
        return AgentOutcome(0.0, truncated=True)

    with _controller(play, max_turns=2) as controller:
        batch = controller.get_batch(0)
    assert {trajectory.end_reason for trajectory in batch} == {"max_turns"}
    assert all(trajectory.truncated and not trajectory.terminated for trajectory in batch)
    assert {trajectory.turns for trajectory in batch} == {2}


@pytest.mark.parametrize("kind", ["raises", "asks nothing", "returns something else"])
def test_an_episode_that_is_no_sample_fails_alone(kind: str) -> None:
    lock, count = threading.Lock(), 0

    def play(call: AgentCall) -> Any:
        nonlocal count
        with lock:
            count += 1
            is_first = count == 1
        if is_first and kind == "raises":
            raise KeyError("lost")
        if not (is_first and kind == "asks nothing"):
            _ask(call)
        return 1.0 if is_first and kind == "returns something else" else AgentOutcome(1.0)

    with _controller(play) as controller:
        assert len(controller.get_batch(0)) == 2
        discarded = controller.counts()["discarded"]
    assert discarded == {"episode_KeyError" if kind == "raises" else "episode_EnvError": 1}


def test_failures_of_all_programs_stop_the_run_with_the_reason() -> None:
    def play(call: AgentCall) -> AgentOutcome:
        raise OSError("the agent's image is gone")

    with (
        _controller(play, max_retries=100, failure_window=4, num_envs=2) as controller,
        pytest.raises(RolloutError, match="the agent's image is gone"),
    ):
        controller.get_batch(0)


def test_a_program_that_does_not_exist_stops_the_run_at_once(tmp_path: Path) -> None:
    def play(call: AgentCall) -> AgentOutcome:
        run_program(["no-such-agent"], call, cwd=tmp_path)
        raise AssertionError

    with _controller(play) as controller, pytest.raises(UsageError, match="no-such-agent"):
        controller.get_batch(0)


def test_a_task_too_long_for_an_argument_fails_its_episode_alone(tmp_path: Path) -> None:
    def play(call: AgentCall) -> AgentOutcome:
        with pytest.raises(EnvError, match=r"an argument of 1000000 bytes is too long for 'true'"):
            run_program(["true", "x" * 1_000_000], call, cwd=tmp_path)
        raise RuntimeError("seen")

    with _controller(play, max_retries=0) as controller, pytest.raises(RolloutError, match="seen"):
        controller.get_batch(0)


def test_a_dead_engine_stops_the_run() -> None:
    class Broken(ScriptedModel):
        error: BaseException | None = None

        async def generate(self, request: Any) -> Any:
            self.error = RuntimeError("out of memory")
            return await super().generate(request)

        def _check_open(self) -> None:
            from agentenv.errors import ModelError

            raise ModelError("dead")

    def play(call: AgentCall) -> AgentOutcome:
        _ask(call)
        raise AssertionError

    with (
        _controller(play, Broken(["x"])) as controller,
        pytest.raises(RolloutError, match="out of memory"),
    ):
        controller.get_batch(0)


def test_a_program_that_hangs_is_killed_when_the_run_stops(tmp_path: Path) -> None:
    started, ended = threading.Event(), threading.Event()

    def play(call: AgentCall) -> AgentOutcome:
        started.set()
        result = run_program([sys.executable, "-c", "import time; time.sleep(600)"], call, cwd=tmp_path)
        assert result.timed_out and result.exit_code < 0
        ended.set()
        return AgentOutcome(0.0, truncated=True)

    with _controller(play, num_envs=1, batch_size=1) as controller:
        controller.start()
        assert started.wait(60.0)
        before = time.monotonic()
    assert ended.wait(60.0) and time.monotonic() - before < 50.0


def test_a_program_past_its_deadline_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = "sleep 600 & echo $! >pid.new; mv pid.new pid; sleep 600"
    for limit_s in (1.0, 5.0, 30.0):  # longer where it did not come to its child
        call = AgentCall(0, "http://127.0.0.1:1/v1", "key", "m", deadline=time.monotonic() + limit_s)
        result = run_program(["bash", "-c", script], call, cwd=tmp_path)
        assert result.timed_out and call.is_over and result.duration_s < 100.0
        if pid.exists():
            break
    deadline = time.monotonic() + 60.0
    while _is_alive(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_program_does_not_get_the_environment_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "of the trainer")
    call = AgentCall(0, "http://127.0.0.1:1/v1", "key", "m", deadline=time.monotonic() + 120.0)
    script = "import os; print(os.environ.get('A_SECRET'), os.environ['OPENAI_API_KEY'], os.environ['MORE'])"
    result = run_program([sys.executable, "-c", script], call, cwd=tmp_path, env={"MORE": "more"})
    assert result.output == "None key more\n"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mode": "batch"}, "mode is 'batch'"),
        ({"mode": "sync", "deterministic": True}, "deterministic"),
        ({"worker": "ray"}, "worker is 'ray'"),
        ({"system_prompt": "be brief"}, "system_prompt"),
    ],
)
def test_settings_that_need_to_see_the_turns_are_refused(settings: dict[str, Any], named: str) -> None:
    runner = AgentRunner(lambda call: AgentOutcome(0.0))
    proxy = LLMProxy([ScriptedModel(["x"])])
    with pytest.raises(UsageError, match=named):
        runner.make_slot("slot", SlotContext(proxy, ByteTokenizer(), _config(**settings)))


def test_an_address_that_is_taken_is_named() -> None:
    from agentenv.listening import listen

    taken = listen("127.0.0.1", 0)
    taken.listen()
    runner = AgentRunner(lambda call: AgentOutcome(0.0), port=taken.getsockname()[1])
    proxy = LLMProxy([ScriptedModel(["x"])])
    with (
        taken,
        AsyncController(runner, proxy, ByteTokenizer(), _config()) as controller,
        pytest.raises(UsageError, match="can't listen there"),
    ):
        controller.get_batch(0)
