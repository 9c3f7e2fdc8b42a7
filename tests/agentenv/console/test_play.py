"""`agentenv play`: by hand, and watching."""

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

import agentenv
from agentenv import cli, registration

SECRET_ACTIONS = "19\n27\n32\n34\n33\n"
"""Bisection of the range of seed 7 to its number."""


class Hostile(agentenv.BaseEnv):
    """Writes what would clear a terminal and turn the direction of text around."""

    closed = 0

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        return "\x1b[2Jcleared\x07\u202egpj.exe\r\nnext", {}

    def step(self, action):  # type: ignore[no-untyped-def]
        if action == "raise":
            raise ValueError("I broke\x1b[2J")
        return f"got {action!r}", 0.5, False, False, {}

    def close(self) -> None:
        type(self).closed += 1


class Later(agentenv.AsyncEnv):
    """Ends at once, by coroutines."""

    async def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def,override]
        return "later", {}

    async def step(self, action):  # type: ignore[no-untyped-def,override]
        return "done", 1.0, True, False, {}


class Unisolated(Hostile):
    """Says that it runs commands on this machine."""

    sandbox_kind = "local-unisolated"

    def __init__(self, sandbox: str = "auto") -> None:
        self.sandbox = sandbox


@pytest.fixture(autouse=True)
def environments() -> None:
    for kind in (Hostile, Later, Unisolated):
        if f"agentenv/{kind.__name__}-v0" not in registration.registered_ids():
            agentenv.register(f"{kind.__name__}-v0", kind)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Runs the command with these lines as its input; returns exit code, stdout and stderr."""

    def run(*arguments: object, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        code = cli.main(["play", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def test_an_episode_is_played_from_piped_lines(play, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "episode.json"
    code, out, err = play("GuessNumber-v0", "--seed", 7, "--json", file, typed=SECRET_ACTIONS)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "GuessNumber-v0, seed 7"
    assert lines[2:5] == ["[1] > 19", "higher", "    turn 1 of at most 6, reward 0"]
    assert lines[-1] == "solved after 5 turns, reward 1 (terminated)"
    kept = json.loads(file.read_text())
    assert kept["settings"] == {"environment": "GuessNumber-v0", "env_options": {}, "policy": "by hand"}
    assert (kept["seed"], kept["steps"], kept["success"], kept["end_reason"]) == (7, 5, True, "terminated")
    assert [message["content"] for message in kept["messages"][1::2]] == SECRET_ACTIONS.split()


def test_the_transcript_of_the_oracle_is_that_of_the_same_actions_by_hand(play, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    by_hand, watched = tmp_path / "hand.json", tmp_path / "oracle.json"
    code, shown, _ = play("GuessNumber-v0", "--seed", 7, "--policy", "oracle", "--json", watched)
    assert code == 0
    kept = json.loads(watched.read_text())
    actions = [message["content"] for message in kept["messages"] if message["role"] == "assistant"]
    _, same, _ = play("GuessNumber-v0", "--seed", 7, "--json", by_hand, typed="\n".join(actions))
    assert same == shown
    assert json.loads(by_hand.read_text()) | {"settings": None} == kept | {"settings": None}


def test_leaving_is_no_error_and_keeps_what_was_played(play, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "episode.json"
    for typed in ("19\n/quit\n20\n", "19\n", '19\n"""\ncut short\n'):
        code, out, _ = play("GuessNumber-v0", "--seed", 7, "--json", file, typed=typed)
        assert code == 0 and out.endswith("left after 1 turn, reward so far 0\n")
        kept = json.loads(file.read_text())
        assert (kept["end_reason"], kept["steps"], kept["success"]) == ("left", 1, False)


def test_blocks_are_one_action_and_program_commands_none(play) -> None:  # type: ignore[no-untyped-def]
    typed = '/help\n\n"""\n/quit\n  b\n"""\n```bash\nls\n```\n```one line```\n/usr/bin/ls\n/look\n'
    code, out, _ = play("Hostile-v0", "--seed", 1, typed=typed)
    assert code == 0
    for number, action in enumerate(("/quit\n  b", "```bash\nls\n```", "```one line```", "/usr/bin/ls"), 1):
        separator = "\n" if "\n" in action else " "
        assert f"[{number}] >{separator}{action}\ngot {action!r}\n" in out
    assert "Ctrl-D and Ctrl-C leave" in out and out.count("got '/usr/bin/ls'") == 2  # /look shows it again


def test_what_an_environment_writes_steers_no_terminal(play) -> None:  # type: ignore[no-untyped-def]
    _, out, err = play("Hostile-v0", "--seed", 1, typed="raise\n")
    assert "\\u{1b}[2Jcleared\\u{7}\\u{202e}gpj.exe\nnext" in out
    assert not {"\x1b", "\x07", "\u202e"} & {*out, *err}


def test_an_environment_that_raises_is_closed_and_one_line_says_so(play, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for policy in ((), ("--policy", f"{__name__}:Raiser")):
        before, file = Hostile.closed, tmp_path / "episode.json"
        code, out, err = play("Hostile-v0", "--seed", 1, "--json", file, *policy, typed="x\nraise\nx\n")
        assert code == 1 and err.splitlines()[-1].startswith("agentenv: error: ") and "I broke" in err
        assert out.endswith("after 1 turn, reward so far 0.5\n")
        assert Hostile.closed > before
        assert "I broke" in json.loads(file.read_text())["error"]


class Raiser:
    """Acts as the test above types."""

    def __init__(self, env: object, seed: int) -> None:
        self.actions = iter(("x", "raise"))

    def begin(self, observation: str, info: object) -> None:
        pass

    def act(self, observation: str) -> str:
        return next(self.actions)


def test_an_environment_of_coroutines_is_played_too(play) -> None:  # type: ignore[no-untyped-def]
    for options, typed in (((), "x\n"), (("--policy", f"{__name__}:Raiser"), "")):
        code, out, _ = play("Later-v0", "--seed", 1, *options, typed=typed)
        assert code == 0
        assert out.endswith(
            "[1] > x\ndone\n    turn 1, reward 1\nsolved after 1 turn, reward 1 (terminated)\n"
        )


def test_the_turn_limit_cuts_an_episode(play) -> None:  # type: ignore[no-untyped-def]
    for options in ((), ("--policy", f"{__name__}:Raiser")):
        code, out, _ = play("Hostile-v0", "--seed", 1, "--max-turns", 1, *options, typed="x\ny\n")
        assert code == 0 and out.endswith("solved after 1 turn, reward 0.5 (max_turns)\n")


def test_without_isolation_only_what_was_asked_for(play) -> None:  # type: ignore[no-untyped-def]
    code, out, err = play("Unisolated-v0", "--seed", 1, typed="x\n")
    assert code == 2 and out == ""
    assert "without isolation" in err and "--env-option sandbox=local-unisolated" in err
    code, out, _ = play("Unisolated-v0", "--seed", 1, "--kwargs", "sandbox=local-unisolated", typed="x\n")
    assert code == 0 and out.startswith("sandbox: local-unisolated, commands run on this machine as you\n")


def test_a_block_typed_by_hand_runs_in_the_sandbox_of_a_code_task(play) -> None:  # type: ignore[no-untyped-def]
    options = ("--env-option", "sandbox=local-unisolated", "--env-option", "levels=[1]", "--seed", 3)
    code, out, _ = play("SWE-v0", *options, typed="```bash\nls\n```\n/quit\n")
    assert code == 0 and "[1] >\n```bash\nls\n```\napp.py\ntest.py\n" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Nowhere-v0"], "unknown environment 'Nowhere-v0'"),
        (["Echo-v0", "--policy", "orcale"], "did you mean 'oracle'?"),
        (["Echo-v0", "--kwargs", "turns=3"], "did you mean 'max_turns'?"),
        (["Echo-v0", "--json", "absent/x.json"], "must be a file in a folder that exists"),
    ],
)
def test_bad_input_is_one_line(play, arguments: list[str], said: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = play(*arguments)
    assert (code, out.count("[1]")) == (2, 0)
    assert err.startswith("agentenv: error: ") and said in err and err.count("\n") == 1


def test_on_a_terminal_ctrl_c_ends_with_130_and_the_transcript_is_there(tmp_path: Path) -> None:
    """In a process of its own: only a real terminal makes SIGINT of a key."""
    file = tmp_path / "episode.json"
    ours, theirs = pty.openpty()
    program = (
        "import fcntl, sys, termios\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "from agentenv.cli import main\n"
        f"sys.exit(main(['play', 'GuessNumber-v0', '--seed', '7', '--json', {str(file)!r}]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        shown = _read_until(ours, b"[1] > ")
        os.write(ours, b"19\n")
        shown += _read_until(ours, b"[2] > ")
        shown += _read_until(ours, b"agentenv: interrupted", key=b"\x03")
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        os.close(ours)
    assert b"[1] > 19" in shown.replace(b"\r", b"") and b"interrupted after 1 turn" in shown
    assert json.loads(file.read_text())["end_reason"] == "interrupted"


def _read_until(descriptor: int, wanted: bytes, *, key: bytes = b"") -> bytes:
    """What is shown to the wanted text, while a key is pressed every second: readline forgets a signal that comes just
    before it begins to wait."""
    shown, deadline = b"", time.monotonic() + 60
    while wanted not in shown:
        assert time.monotonic() < deadline, shown
        if key:
            os.write(descriptor, key)
        if select.select([descriptor], [], [], 1)[0]:
            shown += os.read(descriptor, 4096)  # EIO where the process ends without it
            key = b"" if wanted in shown or b"interrupted" in shown else key
    return shown


def test_sigterm_ends_it_like_ctrl_c_with_its_own_code(tmp_path: Path) -> None:
    file = tmp_path / "episode.json"
    command = [sys.executable, "-m", "agentenv", "play", "GuessNumber-v0", "--seed", "7", "--json", str(file)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.readline()  # the first observation: the episode has begun
        process.terminate()
        assert process.wait(timeout=60) == 143
        assert process.stderr.read() == b"agentenv: terminated\n"
    assert json.loads(file.read_text())["end_reason"] == "interrupted"
