"""Agent programs on tasks of SWE-v0: laid out, run, graded, in a process without isolation."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.agents import AgentCall
from agentenv.errors import SandboxError, UsageError
from agentenv_envs.swe.agents import Job, Launch, SWEAgentPrograms, mini_swe_agent
from agentenv_envs.swe.embedded.tasks import MODULE
from agentenv_envs.swe.workspace import EmbeddedTasks


def _shell(script: Callable[[Job], str]) -> Callable[[Job], Launch]:
    """Launches a program that runs a shell script, in which $DOCKER is the door."""
    return lambda job: Launch(["bash", "-c", script(job)], {"DOCKER": str(job.executable)})


def _solution(seed: int) -> str:
    tasks = EmbeddedTasks("train", (1, 2), None)
    return tasks.task(seed).gold


@pytest.fixture
def programs() -> Iterator[Callable[..., SWEAgentPrograms]]:
    made: list[SWEAgentPrograms] = []

    def make(script: Callable[[Job], str], **options: Any) -> SWEAgentPrograms:
        made.append(SWEAgentPrograms(_shell(script), sandbox="local-unisolated", **options))
        return made[-1]

    yield make
    for item in made:
        item.close()


def _call(seed: int = 3, seconds: float = 60.0, **options: Any) -> AgentCall:
    return AgentCall(
        seed, "http://127.0.0.1:1/v1", "sk-key", "policy", deadline=time.monotonic() + seconds, **options
    )


def test_what_the_program_leaves_is_graded(programs: Any) -> None:
    def script(job: Job) -> str:
        (job.folder / "right.py").write_text(_solution(3))
        return f"""
            name=$($DOCKER run -d image sleep 2h)
            $DOCKER exec -w {job.workdir} $name bash -lc 'cat {MODULE}' | grep -q def || exit 1
            $DOCKER exec -w {job.workdir} -e "TEXT=$(cat right.py)" $name bash -lc 'printf "%s\\n" "$TEXT" > {MODULE}'
            echo mended; exit 3
        """

    outcome = programs(script)(_call())
    assert (outcome.reward, outcome.truncated) == (1.0, False)
    assert outcome.info["success"] and outcome.info["grade"]["resolved"]
    assert (outcome.info["exit_code"], outcome.info["commands"]) == (3, 2)
    assert outcome.info["output"] == "mended\n" and outcome.info["task_id"]


def test_a_program_that_does_nothing_has_solved_nothing(programs: Any) -> None:
    outcome = programs(lambda job: "true")(_call())
    assert (outcome.reward, outcome.truncated, outcome.info["success"]) == (0.0, False, False)


def test_a_program_finds_issue_and_endpoint(programs: Any) -> None:
    outcome = programs(
        lambda job: f"echo '{job.issue.splitlines()[0]}'; echo $OPENAI_API_KEY $OPENAI_BASE_URL"
    )(_call())
    issue = EmbeddedTasks("train", (1, 2), None).task(3).issue.splitlines()[0]
    assert outcome.info["output"] == f"{issue}\nsk-key http://127.0.0.1:1/v1\n"


def test_a_program_out_of_time_is_truncated_and_not_graded(programs: Any) -> None:
    outcome = programs(lambda job: "sleep 600")(_call(seconds=1.5))
    assert (outcome.reward, outcome.truncated) == (0.0, True)
    assert "grade" not in outcome.info and outcome.info["exit_code"] < 0


def test_a_program_out_of_budget_is_truncated_and_not_graded(programs: Any) -> None:
    outcome = programs(lambda job: "true")(_call(exhausted=lambda: "max_turns"))
    assert outcome.truncated and "grade" not in outcome.info


def test_a_program_that_is_given_up_ends_soon(programs: Any) -> None:
    cancelled = threading.Event()
    threading.Timer(1.0, cancelled.set).start()
    before = time.monotonic()
    assert programs(lambda job: "sleep 600")(_call(cancelled=cancelled)).truncated
    assert time.monotonic() - before < 30.0


def test_a_broken_sandbox_is_no_reward(programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentenv_envs.swe.sandbox.local_backend import LocalSandbox

    def broken(*_: object, **__: object) -> None:
        raise SandboxError("gone")

    def script(job: Job) -> str:
        monkeypatch.setattr(LocalSandbox, "run", broken)
        return "$DOCKER exec x id"

    with pytest.raises(SandboxError, match="gone"):
        programs(script)(_call())


def test_nothing_is_left_of_an_episode(programs: Any) -> None:
    folders: list[Path] = []

    def script(job: Job) -> str:
        folders.append(job.folder)
        return "touch kept"

    playing = programs(script)
    playing(_call())
    assert not folders[0].exists()
    assert playing._backend.left() <= 1  # the one in the pool


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"command_timeout_s": 0}, "command_timeout_s is 0"),
        ({"split": "wizard"}, "split"),
        ({"keep": "ids.txt"}, "keep='ids.txt'"),
        ({"sandbox": "vm"}, "sandbox='vm'"),
    ],
)
def test_a_bad_argument_is_named_before_the_first_episode(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        SWEAgentPrograms(_shell(lambda job: "true"), **{"sandbox": "local-unisolated", **options})


def test_an_agent_that_is_not_installed_is_named() -> None:
    with pytest.raises(UsageError, match="no-such-mini"):
        mini_swe_agent("no-such-mini")


def test_mini_swe_agent_gets_endpoint_task_and_door_by_its_own_options(tmp_path: Path) -> None:
    launch = mini_swe_agent(sys.executable, config="mini_textbased.yaml", options=["agent.step_limit=3"])(
        Job(_call(), "mend it", "/work", tmp_path / "container", tmp_path)
    )
    argv = list(launch.argv)
    assert argv[argv.index("--model") + 1] == "openai/policy" and argv[-2:] == ["--task", "mend it"]
    assert f"environment.executable={tmp_path}/container" in argv
    assert "model.model_class=litellm_textbased" in argv and "agent.step_limit=3" in argv
    assert argv[argv.index("--config") + 1] == "mini_textbased.yaml"
