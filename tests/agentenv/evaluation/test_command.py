"""`agentenv eval` as a user runs it: servers, baselines, bad input, resuming."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentenv
from agentenv import cli
from agentenv.evaluation import wilson_interval

Evaluate = Callable[..., tuple[int, dict[str, Any], str]]


class TwoKinds(agentenv.BaseEnv):
    """Even tasks are easy; every tenth cannot be reset; one word is no action."""

    worker = "thread"
    policies = {  # noqa: RUF012
        "good": "test_command_policies:Good",
        "strict": "test_command_policies:Strict",
    }

    def __init__(self, split: str = "train") -> None:
        self.split = split

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        assert seed is not None
        if seed % 10 == 9:
            raise OSError("the disk is full")
        self.family = "easy" if seed % 2 == 0 else "hard"
        self.turn = 0
        return f"A {self.family} task.", {"task_id": f"task-{seed}", "family": self.family}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        done = self.turn == 2
        solved = done and self.family == "easy"
        info: dict[str, Any] = {"invalid_actions": self.turn if action == "nonsense" else 0}
        if done:
            info |= {"success": solved, "metrics": {"turns": self.turn, "broken": float("nan")}}
        return "Go on.", float(solved), done, False, info


class InAProcess(TwoKinds):
    worker = "process"


POLICIES = """
class Good:
    def __init__(self, env, seed):
        self.seed = seed

    def begin(self, observation, info):
        self.info = info

    def act(self, observation):
        return f"{observation} {self.seed} \\U0001f600 " + "x" * 1000


class Strict(Good):
    def begin(self, observation, info):
        from agentenv.errors import UsageError

        raise UsageError("policy 'Strict' does not play this")
"""


@pytest.fixture
def evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """Runs the command; gives exit code, report and standard error."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    report = tmp_path / "eval.json"

    def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
        code = cli.main(["eval", *arguments, "--json", str(report)])
        written = json.loads(report.read_text()) if report.exists() else {}
        return code, written, capsys.readouterr().err

    return run


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_command_policies.py").write_text(POLICIES)
    monkeypatch.syspath_prepend(tmp_path)
    # A process that holds an environment imports it, too.
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture
def two_kinds() -> str:
    agentenv.register("TwoKindsOfThisTest-v0", TwoKinds)
    return "TwoKindsOfThisTest-v0"


def _without_timing(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if name != "timing"}


def says_the_word(request: dict[str, Any]) -> str:
    """What solves Echo-v0."""
    first = next(m["content"] for m in request["messages"] if m["content"].startswith("Say the word "))
    return str(first.removesuffix(".").rpartition(" ")[2])


def test_a_server_is_asked_with_the_whole_conversation_and_its_tokens_are_counted(
    evaluate: Evaluate, server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "very-secret")
    server.answer = lambda r: says_the_word(r) if len(r["messages"]) == 4 else "what?"
    code, report, err = evaluate(
        "Echo-v0", "--url", server.url, "--episodes", "6", "--system-prompt", "Be brief.", "--max-tokens", "7"
    )
    assert code == 0, err
    assert (report["success"], report["episodes"], report["steps"]) == (1.0, 6, 2.0)
    assert report["interval"] == list(wilson_interval(6, 6))
    assert report["tokens"] == {"prompt": 20.0, "completion": 4.0}
    assert report["invalid_action_share"] is None  # Echo-v0 counts none
    assert report["families"]["echo"]["success"] == 1.0
    assert report["settings"]["model_name"] == "tiny"
    last = server.requests[-1]
    assert [message["role"] for message in last["messages"]] == ["system", "user", "assistant", "user"]
    assert last["messages"][0]["content"] == "Be brief."
    assert (last["max_tokens"], last["temperature"]) == (7, 1.0)
    assert set(server.keys) == {"Bearer very-secret"}
    written = "".join(path.read_text() for path in tmp_path.glob("eval*"))
    assert "what?" in written  # the transcripts are there
    assert "very-secret" not in written + err


def test_tokens_that_a_server_does_not_count_are_unknown_and_not_zero(
    evaluate: Evaluate, server: Any
) -> None:
    server.answer, server.counts = says_the_word, False
    _, report, _ = evaluate("Echo-v0", "--url", server.url, "--episodes", "2")
    assert report["tokens"] == {"prompt": None, "completion": None}


def test_what_infrastructure_ended_is_counted_apart_and_by_its_reason(
    evaluate: Evaluate, two_kinds: str, policies: None
) -> None:
    code, report, err = evaluate(two_kinds, "--policy", "good", "--episodes", "20", "--num-envs", "4")
    assert code == 0, err
    # Seeds begin at 2**31, which ends in 8: the second and the twelfth cannot be reset.
    assert (report["episodes"], report["failed"], report["failures"]) == (18, 2, {"reset_OSError": 2})
    assert report["success"] == 10 / 18
    assert report["families"]["easy"]["success"] == 1.0
    assert report["families"]["hard"]["success"] == 0.0
    assert set(report["families"]) == {"easy", "hard"}
    assert report["invalid_action_share"] == 0.0
    assert report["metrics"] == {"turns": 2.0}


def test_an_action_that_is_none_is_counted(evaluate: Evaluate, two_kinds: str, server: Any) -> None:
    server.answer = lambda request: "nonsense" if "easy" in request["messages"][0]["content"] else "act"
    _, report, _ = evaluate(two_kinds, "--url", server.url, "--episodes", "8", "--split", "heldout")
    assert report["families"]["easy"]["invalid_action_share"] == 1.0
    assert report["families"]["hard"]["invalid_action_share"] == 0.0


def test_a_baseline_plays_in_a_process_and_is_the_same_in_every_slot(
    evaluate: Evaluate, policies: None, tmp_path: Path
) -> None:
    agentenv.register("InAProcessOfThisTest-v0", InAProcess)
    reports = []
    for slots in ("1", "3"):
        code, report, err = evaluate(
            "InAProcessOfThisTest-v0",
            "--policy",
            "good",
            "--episodes",
            "5",
            "--num-envs",
            slots,
            "--overwrite",
        )
        assert code == 0, err
        reports.append(_without_timing(report))
        lines = (tmp_path / "eval.episodes.jsonl").read_text().splitlines()[1:]
        spoken = sorted(
            (line["index"], [message["content"] for message in line["messages"]])
            for line in map(json.loads, lines)
        )
        reports.append({"messages": spoken})
    assert reports[:2] == reports[2:]
    observation, action = spoken[0][1][:2]
    assert observation == "A easy task."
    assert action.startswith("A easy task. ") and action.endswith("\U0001f600 " + "x" * 1000)


def test_bad_input_to_a_baseline_is_one_error(evaluate: Evaluate, two_kinds: str, policies: None) -> None:
    code, report, err = evaluate(two_kinds, "--policy", "strict", "--episodes", "3")
    assert (code, report) == (2, {})
    assert "policy 'Strict' does not play this" in err
    assert "Traceback" not in err


def test_a_killed_run_goes_on_and_gives_the_same_report(tmp_path: Path, server: Any) -> None:
    def answer(request: dict[str, Any]) -> str:
        time.sleep(0.02)
        # Right in half of the tasks, whenever they are asked.
        word = says_the_word(request)
        return word if word in ("apple", "brook", "cedar", "delta") else "no"

    server.answer = answer
    reports = []
    for name in ("killed", "whole"):
        report = tmp_path / f"{name}.json"
        command = [
            sys.executable,
            "-m",
            "agentenv",
            "eval",
            "Echo-v0",
            "--url",
            server.url,
            "--episodes",
            "40",
        ]
        command += ["--num-envs", "2", "--json", str(report)]
        if name == "killed":
            log = tmp_path / "killed.episodes.jsonl"
            process = subprocess.Popen(command, stderr=subprocess.PIPE)
            deadline = time.monotonic() + 60
            while not (log.exists() and len(log.read_text().splitlines()) > 8):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            assert not report.exists()
            with log.open("a") as file:
                file.write('{"index": 39, "se')  # what a kill in the middle of a line leaves
            played = len(server.requests)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        if name == "killed":
            assert "of 40 episodes were played already" in done.stderr
            assert len(server.requests) - played < 3 * 40 - 8
        reports.append(_without_timing(json.loads(report.read_text())))
    assert reports[0] == reports[1]
    assert reports[0]["episodes"] == 40


def test_ctrl_c_ends_it_at_once_although_an_answer_is_awaited(tmp_path: Path, server: Any) -> None:
    def answer(request: dict[str, Any]) -> str:
        if len(server.requests) > 6:
            time.sleep(300)
        return says_the_word(request)

    server.answer = answer
    command = [sys.executable, "-m", "agentenv", "eval", "Echo-v0", "--url", server.url, "--episodes", "40"]
    process = subprocess.Popen(
        [*command, "--num-envs", "2", "--json", str(tmp_path / "eval.json")],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(server.requests) < 8:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "6 of 40 episodes are kept; the same command goes on" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "change",
    [
        ("--seed", "1"),
        ("--episodes", "5"),
        ("--max-turns", "2"),
        ("--env-option", "max_turns=2"),
        ("--policy", "random"),
    ],
)
def test_a_changed_setting_is_refused_and_harms_nothing(
    evaluate: Evaluate, tmp_path: Path, change: tuple[str, str]
) -> None:
    arguments = ["Echo-v0", "--policy", "oracle", "--episodes", "4"]
    assert evaluate(*arguments)[0] == 0
    kept = (tmp_path / "eval.episodes.jsonl").read_bytes()
    changed = [a for a in arguments if change[0] != "--policy" or a not in ("--policy", "oracle")]
    code, report, err = evaluate(*changed, *change)
    assert code == 2
    assert "was begun with other settings" in err and change[1].rpartition("=")[2] in err
    assert (tmp_path / "eval.episodes.jsonl").read_bytes() == kept
    assert report["settings"]["episodes"] == 4
    assert evaluate(*changed, *change, "--overwrite")[0] == 0


def test_an_evaluation_that_is_done_is_reported_again_and_not_played_again(
    evaluate: Evaluate, server: Any
) -> None:
    server.answer = says_the_word
    arguments = ("Echo-v0", "--url", server.url, "--episodes", "3")
    first = evaluate(*arguments)[1]
    played = len(server.requests)
    assert evaluate(*arguments, "--num-envs", "1")[1] == first
    assert len(server.requests) == played


def test_episodes_that_failed_are_played_again(evaluate: Evaluate, server: Any) -> None:
    broken = True

    def answer(request: dict[str, Any]) -> Any:
        word = says_the_word(request)
        return (500, {"error": "no memory"}, {}) if broken and word < "d" else word

    server.answer = answer
    arguments = ("Echo-v0", "--url", server.url, "--episodes", "12", "--retries", "0", "--num-envs", "12")
    code, report, _ = evaluate(*arguments)
    assert (
        code == 0 and report["failed"] > 0 and report["failures"] == {"generate_ModelError": report["failed"]}
    )
    broken = False
    code, report, _ = evaluate(*arguments)
    assert (code, report["episodes"], report["failed"]) == (0, 12, 0)


def test_a_conversation_that_outgrows_the_model_is_cut_off_and_no_failure(
    evaluate: Evaluate, server: Any
) -> None:
    def answer(request: dict[str, Any]) -> Any:
        if len(request["messages"]) > 3:
            return 400, {"error": {"message": "maximum context length is 64 tokens"}}, {}
        return "no"

    server.answer = answer
    _, report, _ = evaluate("Echo-v0", "--url", server.url, "--episodes", "3")
    assert (report["success"], report["failed"], report["ends"]) == (0.0, 0, {"max_tokens": 3})
    assert report["steps"] == 2.0


def test_a_server_that_does_not_answer_at_all_is_one_error_and_exit_code_2(evaluate: Evaluate) -> None:
    code, report, err = evaluate("Echo-v0", "--url", "http://127.0.0.1:9/v1", "--episodes", "3")
    assert (code, report) == (2, {})
    assert err.count("\n") == 1
    assert "http://127.0.0.1:9/v1/models: connection refused: nothing listens there" in err


def test_a_key_that_is_refused_in_the_middle_ends_the_run_and_what_was_played_is_kept(
    evaluate: Evaluate, server: Any
) -> None:
    refused = False

    def answer(request: dict[str, Any]) -> Any:
        nonlocal refused
        refused = len(server.requests) > 5
        return (401, {"error": {"message": "expired"}}, {}) if refused else says_the_word(request)

    server.answer = answer
    arguments = ("Echo-v0", "--url", server.url, "--episodes", "20", "--num-envs", "1")
    code, report, err = evaluate(*arguments)
    assert (code, report) == (2, {})
    assert "the server answered 401: expired (OPENAI_API_KEY is not set)" in err
    assert "5 of 20 episodes are kept; the same command goes on" in err
    server.answer = says_the_word
    assert evaluate(*arguments)[1]["episodes"] == 20


def test_a_run_in_which_everything_fails_stops_early_and_says_why(evaluate: Evaluate, server: Any) -> None:
    server.answer = lambda request: (500, {"error": "out of memory"}, {})
    code, report, err = evaluate(
        "Echo-v0", "--url", server.url, "--episodes", "1000", "--retries", "0", "--num-envs", "2"
    )
    assert (code, report) == (1, {})
    assert "infrastructure ended all of the first 8 episodes" in err and "out of memory" in err
    assert len(server.requests) < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Ecko-v0", "--policy", "oracle"], "did you mean 'Echo-v0'"),
        (["Echo-v0", "--policy", "oracel"], "EchoEnv has no policy 'oracel'; did you mean 'oracle'"),
        (["Echo-v0", "--policy", "oracle", "--split", "test"], "takes no argument 'split'"),
        (["KeyDoor-v0", "--policy", "oracle", "--split", "tets"], "split must be one of train, heldout"),
        (["Echo-v0", "--policy", "oracle", "--env-option", "max_turns"], "must be KEY=VALUE"),
        (["Echo-v0", "--policy", "oracle", "--env-option", "turns=3"], "did you mean 'max_turns'"),
        (["Echo-v0", "--policy", "oracle", "--model-name", "x"], "--model-name goes with --url"),
        (["Echo-v0", "--url", "localhost:8000"], "must be an address such as http"),
        (["absent.py", "--policy", "oracle"], "environment absent.py: no such file"),
        (["Echo-v0", "--policy", "oracle", "--system-prompt", "@absent.txt"], "cannot be read"),
        (
            ["KeyDoor-v0", "--policy", "oracle", "--split", "train", "--env-option", "split=heldout"],
            "the split is given twice",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    evaluate: Evaluate, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, report, err = evaluate(*arguments)
    assert (code, report) == (2, {})
    assert message in err and err.count("\n") == 1
    assert list(tmp_path.glob("eval*")) == []


@pytest.mark.parametrize(
    "arguments",
    [[], ["--policy", "oracle", "--url", "http://x"], ["--policy", "oracle", "--episodes", "0"]],
)
def test_what_the_command_line_does_not_allow_is_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", "Echo-v0", *arguments])
    assert ended.value.code == 2


def test_a_folder_that_is_not_there_and_a_file_in_use_are_told(evaluate: Evaluate, tmp_path: Path) -> None:
    from agentenv.errors import UsageError
    from agentenv.evaluation.records import EpisodeLog

    assert cli.main(["eval", "Echo-v0", "--policy", "oracle", "--json", str(tmp_path / "no" / "x.json")]) == 2
    path = tmp_path / "eval.episodes.jsonl"
    with EpisodeLog(path, {}), pytest.raises(UsageError, match="in use by another evaluation"):
        EpisodeLog(path, {})
    path.write_text("not JSON\n")
    code, _, err = evaluate("Echo-v0", "--policy", "oracle", "--episodes", "1")
    assert code == 2 and "line 1: not a line of an evaluation" in err


@pytest.mark.parametrize("line", ["3", "[]", "{}", '{"index": 0}'])
def test_a_line_that_is_no_episode_is_named(evaluate: Evaluate, tmp_path: Path, line: str) -> None:
    path = tmp_path / "eval.episodes.jsonl"
    path.write_text(f'{{"settings": {{}}}}\n{line}\n')
    code, _, err = evaluate("Echo-v0", "--policy", "oracle", "--episodes", "1")
    assert code == 2 and "line 2: not a line of an evaluation" in err
    path.write_text('{"settings": 3}\n')
    code, _, err = evaluate("Echo-v0", "--policy", "oracle", "--episodes", "1")
    assert code == 2 and "line 1: not a line of an evaluation" in err


def test_a_command_that_failed_before_its_first_episode_binds_nobody(
    evaluate: Evaluate, server: Any, two_kinds: str
) -> None:
    code, _, err = evaluate(two_kinds, "--url", server.url, "--env-option", "splitt=x", "--episodes", "1")
    assert code == 2 and "splitt" in err
    code, report, _ = evaluate(two_kinds, "--url", server.url, "--env-option", "split=x", "--episodes", "1")
    assert (code, report["episodes"]) == (0, 1)


def test_a_folder_is_no_report_and_nothing_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("folder", "."):
        assert cli.main(["eval", "Echo-v0", "--policy", "oracle", "--json", name]) == 2
        assert f"--json {name}: is a folder; name a file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_report_takes_the_place_of_no_device_pipe_or_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "sink").symlink_to(os.devnull)
    (tmp_path / "latest").symlink_to("absent.json")
    for name, why in (("pipe", "is no regular file"), ("sink", "is a link"), ("latest", "is a link")):
        path = tmp_path / name
        assert cli.main(["eval", "Echo-v0", "--policy", "oracle", "--json", str(path)]) == 2
        assert f"--json {path}: {why}" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "pipe", "sink"]
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "sink").is_symlink()


def test_an_evaluation_without_a_result_says_why(evaluate: Evaluate, server: Any) -> None:
    server.answer = lambda request: (500, {"error": "out of memory"}, {})
    code, report, err = evaluate("Echo-v0", "--url", server.url, "--episodes", "2", "--retries", "0")
    assert (code, report["episodes"], report["failed"]) == (1, 0, 2)
    assert "infrastructure ended every episode: there is no result" in err and "out of memory" in err


def test_a_users_file_needs_no_registration(evaluate: Evaluate, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import agentenv\n"
        "class Mine(agentenv.BaseEnv):\n"
        "    policies = {'random': 'mine_policies:Random'}\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return 'Say x.', {'family': None}\n"
        "    def step(self, action):\n"
        "        return '', float(action == 'x'), True, False, {'success': action == 'x'}\n"
    )
    (tmp_path / "mine_policies.py").write_text(
        "class Random:\n"
        "    def __init__(self, env, seed): pass\n"
        "    def begin(self, observation, info): pass\n"
        "    def act(self, observation): return 'x'\n"
    )
    code, report, err = evaluate(str(file), "--policy", "random", "--episodes", "3")
    assert code == 0, err
    assert (report["success"], list(report["families"])) == (1.0, ["other"])
