"""Agent programs on tasks of SWE-v0: laid out, run, graded, in a process without isolation."""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.agents import AgentCall
from agentenv.errors import SandboxError, UsageError
from agentenv_envs.swe.agents import Job, Launch, SWEAgentPrograms, command_line, mini_swe_agent, openhands
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


def _call(seed: int = 3, seconds: float = 120.0, **options: Any) -> AgentCall:
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
    assert "+++ b/app.py" in outcome.info["patch"]
    assert (outcome.info["exit_code"], outcome.info["commands"]) == (3, 2)
    assert outcome.info["output"] == "mended\n" and outcome.info["task_id"]


@pytest.mark.docker
def test_in_docker_commands_have_no_network_and_what_they_leave_is_graded() -> None:
    def script(job: Job) -> str:
        (job.folder / "right.py").write_text(_solution(3))
        return f"""
            $DOCKER exec -w {job.workdir} x bash -c 'tail -n +3 /proc/net/dev | cut -d: -f1; ls {job.folder}'
            $DOCKER exec -e "TEXT=$(cat right.py)" x bash -c 'printf "%s\\n" "$TEXT" > {MODULE}'
        """

    playing = SWEAgentPrograms(_shell(script), sandbox="docker")
    try:
        outcome = playing(_call(seconds=300.0))
    finally:
        playing.close()
    assert (outcome.reward, outcome.info["sandbox"], outcome.info["commands"]) == (1.0, "docker", 2)
    interfaces, *rest = outcome.info["output"].splitlines()
    assert interfaces.strip() == "lo"
    assert "cannot access" in rest[0]  # the program's own folder is not in the sandbox


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
    outcome = programs(lambda job: "sleep 600")(_call(seconds=3.0))
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
    assert time.monotonic() - before < 60.0


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


def test_openhands_starts_in_an_environment_of_its_own(tmp_path: Path) -> None:
    job = Job(_call(), "mend it", "/work", tmp_path / "container", tmp_path)
    launch = openhands(sys.executable, condense_after=12)(job)
    python, isolated, program, issue_file, *rest = launch.argv
    assert (python, isolated, rest) == (sys.executable, "-I", ["/work", "policy", "--condense_after", "12"])
    assert Path(program).is_file() and Path(issue_file).read_text() == "mend it"
    # What a user has in the home folder for OpenHands is none of the policy's.
    assert (launch.env["HOME"], launch.env["DOCKER"]) == (str(tmp_path), str(tmp_path / "container"))
    assert openhands(sys.executable)(job).argv[-1] == "policy"
    with pytest.raises(UsageError, match="no-such-python"):
        openhands("no-such-python")
    with pytest.raises(UsageError, match="condense_after is 7"):
        openhands(sys.executable, condense_after=7)


def test_a_command_line_has_its_words_filled_in(tmp_path: Path) -> None:
    job = Job(_call(), "mend it; 'now'", "/work", tmp_path / "container", tmp_path)
    launch = command_line(
        f"{sys.executable} -m 'my agent' {{issue_file}} --dir={{workdir}} {{docker}} {{{{x}}}}"
    )(job)
    docker = str(tmp_path / "container")
    assert list(launch.argv[1:]) == [
        "-m",
        "my agent",
        str(tmp_path / "issue.txt"),
        "--dir=/work",
        docker,
        "{x}",
    ]
    assert (tmp_path / "issue.txt").read_text() == "mend it; 'now'"
    assert launch.env == {"DOCKER": docker}
    assert command_line("sh -c {issue}")(job).argv[-1] == "mend it; 'now'"  # one word, whatever it holds


def test_a_program_named_by_a_relative_path_is_found_from_where_the_user_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Any
) -> None:
    (tmp_path / "agent").write_text("#!/bin/sh\necho ran in $PWD\n")
    (tmp_path / "agent").chmod(0o700)
    monkeypatch.chdir(tmp_path)
    playing = programs(lambda job: "true")
    playing._launcher = command_line("./agent")
    monkeypatch.chdir("/")
    outcome = playing(_call())
    assert outcome.info["output"].startswith("ran in ") and str(tmp_path) not in outcome.info["output"]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("no-such-agent {issue}", "no program 'no-such-agent'"),
        ("sh 'unclosed", "No closing quotation"),
        ("sh {wizard}", "{wizard} is unknown"),
        ("sh {", "the agent's command"),
        (" ", "is empty"),
    ],
)
def test_a_command_line_that_cannot_be_run_is_named(command: str, named: str) -> None:
    with pytest.raises(UsageError, match=re.escape(named)):
        command_line(command)
