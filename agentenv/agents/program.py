"""What runs one episode of an agent program: the call that it gets, the outcome that it returns, and a process to wait
for.

    def play(call: AgentCall) -> AgentOutcome:
        with open_task(call.seed) as task:
            result = run_program(["my-agent", task.text], call, cwd=task.folder)
            if call.is_over or result.timed_out:
                return AgentOutcome(0.0, truncated=True)
            return AgentOutcome(task.grade())

Invariants:

* :func:`run_program` returns by the call's deadline and soon after the call was cancelled, and nothing of the program's
  session runs then.
* A program never gets the environment of the trainer: it has what is named, and a few plain variables.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentenv.errors import EnvError, UsageError

__all__ = ["AgentCall", "AgentOutcome", "PlayFn", "ProgramResult", "run_program"]

_POLL_S = 0.05
_KILL_WAIT_S = 5.0
_PASSED_ON = ("HOME", "LANG", "LC_ALL", "PATH", "TERM", "TMPDIR", "TZ", "USER")


@dataclass(frozen=True)
class AgentCall:
    """One episode to be run."""

    seed: int
    """Names the task."""
    base_url: str
    """Of the episode's OpenAI-compatible endpoint, such as ``http://127.0.0.1:40000/episodes/ID/v1``."""
    api_key: str
    """Of the episode; worth nothing after it."""
    model: str
    """What to ask the endpoint for."""
    deadline: float
    """Of ``time.monotonic``: the program's time is over then. What remains is to grade."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """The episode is given up: return soon, whatever."""
    exhausted: Callable[[], str | None] = lambda: None
    """The budget that the latest request was refused for: max_turns or max_tokens; None: none."""

    @property
    def is_over(self) -> bool:
        """The time is over, a budget is used up, or the episode was given up: it ends without a grade."""
        return self.cancelled.is_set() or time.monotonic() >= self.deadline or self.exhausted() is not None

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, not below 0."""
        return max(0.0, self.deadline - time.monotonic())

    def variables(self) -> dict[str, str]:
        """Environment variables by which programs over OpenAI's client find the endpoint."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
        }


@dataclass(frozen=True)
class AgentOutcome:
    """How an episode ended.

    Raises:
        ValueError: the reward is not finite.
    """

    reward: float
    truncated: bool = False
    """It was cut off; else it came to its end."""
    info: dict[str, Any] = field(default_factory=dict)
    """JSON-able, as an environment's: task_id, success and the like."""

    def __post_init__(self) -> None:
        if not -1e300 < self.reward < 1e300:
            raise ValueError(f"AgentOutcome.reward is {self.reward}, must be finite")


PlayFn = Callable[[AgentCall], AgentOutcome]
"""Runs one episode; called in a thread. What it raises makes the episode a failure, which is no sample."""


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended."""

    exit_code: int
    """Negative: of the signal that ended it."""
    output: str
    """The end of what it wrote."""
    timed_out: bool
    duration_s: float


def run_program(
    argv: Sequence[str],
    call: AgentCall,
    *,
    cwd: Path | str,
    env: Mapping[str, str] | None = None,
    output_bytes: int = 20_000,
) -> ProgramResult:
    """Run a program against the call's endpoint, in a session of its own, to its end or the call's.

    Args:
        argv: the program, as ``subprocess`` takes it.
        call: gives deadline and endpoint.
        cwd: where it starts.
        env: more variables; :meth:`AgentCall.variables` are set, and of this process only PATH, HOME and the like.
        output_bytes: how much of its output, stdout and stderr together, is kept from the end.

    Raises:
        UsageError: there is no such program.
        EnvError: a word of ``argv`` is longer than the system takes, such as the text of a long task.
    """
    variables = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    variables |= {**call.variables(), **(env or {})}
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=variables,
                start_new_session=True,
            )
        except OSError as error:
            if error.errno == errno.E2BIG:
                longest = max(len(os.fsencode(word)) for word in argv)
                raise EnvError(
                    f"an argument of {longest} bytes is too long for {argv[0]!r}; write a text like that to a file"
                ) from error
            raise UsageError(f"the agent program {argv[0]!r} can't be started: {error}") from error
        try:
            timed_out = not _wait(process, call)
        finally:
            _kill_session(process)
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - output_bytes))
        text = output.read(output_bytes).decode("utf-8", "replace")
    return ProgramResult(int(process.returncode), text, timed_out, time.monotonic() - started)


def _wait(process: subprocess.Popen[bytes], call: AgentCall) -> bool:
    """Whether it ended by itself."""
    while not call.cancelled.is_set() and (left_s := call.left_s) > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(_POLL_S, left_s))
            return True
    return process.poll() is not None


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """End the program and what it left behind in its process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_WAIT_S)
