"""What every protocol of the SWE environment offers: how an agent is told, understood, served and answered.

Invariants:
- an action that can't be understood is `Malformed`, and what a call can't do is text: neither is an exception;
- a protocol object belongs to one episode: what it remembers (edits to undo) is of that episode alone;
- a `SandboxError` passes through: it is infrastructure, never an observation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from agentenv_envs.swe.sandbox import Sandbox

__all__ = [
    "AgentProtocol",
    "Call",
    "Limits",
    "Malformed",
    "after_thinking",
    "cut",
    "format_observation",
    "run_command",
]


_THOUGHT_ENDS: Final = "</think>"


@dataclass(frozen=True)
class Malformed:
    """An action that holds no call, or more than are allowed, or one that can't be understood."""

    reason: str


@dataclass(frozen=True)
class Call:
    """One thing that the agent wants done."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ends: bool = False
    """The agent is done: its work is graded."""


@dataclass(frozen=True)
class Limits:
    """What one call may cost."""

    timeout_s: float
    """Seconds for each command."""
    chars: int
    """Of its answer; beyond them it is head and tail, half each. Commands count bytes."""


class AgentProtocol(Protocol):
    """How an agent speaks with the environment in one episode."""

    @property
    def name(self) -> str:
        """As in `SWEEnv(protocol=...)`."""

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """JSON schemas of the functions that can be called, in the form that chat templates take as `tools`; empty
        where the protocol is no function calling."""

    def first_observation(self, issue: str, *, workdir: str, test_command: str | None) -> str:
        """What the agent is told at the start: the protocol and the issue."""

    def parse(self, action: str) -> list[Call] | Malformed:
        """The calls in an action, at least one; never raises. A call that ends the episode is the last one."""

    def run(self, call: Call, sandbox: Sandbox, limits: Limits) -> str:
        """Do what a call of `parse` says.

        Returns:
            its result, or what is wrong and allowed; within the limits.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """

    def observation(self, answers: Sequence[tuple[Call, str]]) -> str:
        """What the agent hears of a turn: the answers to its calls, in their order."""

    def refusal(self, malformed: Malformed) -> str:
        """What the agent hears after an action that was not understood."""


def format_observation(
    output: str, exit_code: int, *, timed_out: bool = False, timeout_s: float = 0.0
) -> str:
    """The answer to a command: its output, and the exit code where it is not 0."""
    parts = [output.rstrip("\n")] if output.strip() else []
    if timed_out:
        parts.append(f"[stopped after {timeout_s:g} s]")
    elif exit_code != 0:
        parts.append(f"[exit code {exit_code}]")
    return "\n".join(parts) or "(no output)"


def run_command(command: str, sandbox: Sandbox, limits: Limits) -> str:
    """Run a command for the agent and tell what came of it."""
    result = sandbox.run(command, timeout_s=limits.timeout_s, half_bytes=max(limits.chars // 2, 1))
    return format_observation(
        result.output, result.exit_code, timed_out=result.timed_out, timeout_s=limits.timeout_s
    )


def cut(text: str, chars: int) -> str:
    """Text of at most `chars` characters as it is; a longer one as head and tail with a count between them."""
    if len(text) <= chars:
        return text
    half = max(chars // 2, 1)
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def after_thinking(action: str) -> str:
    """What follows the reasoning of a model that marks its end: calls that are only thought of are none."""
    _, mark, rest = action.partition(_THOUGHT_ENDS)
    return rest if mark else action
