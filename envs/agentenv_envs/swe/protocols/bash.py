"""The default protocol: one bash block a turn, and the command `submit`.

Invariants:
- an action that can't be understood is answered by an observation that says what is allowed; it is never an
  exception;
- the embedded policy was trained on these texts: they change only together with it.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from agentenv_envs.swe.sandbox import Sandbox

from .base import Call, Limits, Malformed, run_command

__all__ = ["INSTRUCTIONS", "SUBMIT", "BashProtocol", "as_action", "first_observation", "parse_action"]

INSTRUCTIONS: Final = """\
You repair a bug in the repository in {workdir}. Each turn, answer with one bash block:
```bash
COMMAND
```
Its output comes back. {tests}Edit the files in place. When the bug is gone, answer with the command submit.

Issue: """

#: Ends the episode: the work is graded.
SUBMIT: Final = "submit"

_BLOCK = re.compile(r"```(?:bash|sh)[ \t]*\n(.*?)\n?```", re.DOTALL)


def first_observation(issue: str, *, workdir: str, test_command: str | None) -> str:
    """What the agent is told at the start: the protocol and the issue."""
    tests = f"Its tests are run by: {test_command}. " if test_command else ""
    return INSTRUCTIONS.format(workdir=workdir, tests=tests) + issue


def as_action(command: str) -> str:
    """The action that runs a command."""
    return f"```bash\n{command}\n```"


def parse_action(action: str) -> str | Malformed:
    """The command in an action; SUBMIT where the agent is done.

    Text around the block is allowed (a model may think aloud), a second block is not.
    """
    blocks = _BLOCK.findall(action)
    if len(blocks) != 1:
        return Malformed(
            f"{len(blocks)} bash blocks in the answer; write exactly one: {as_action('COMMAND')}"
        )
    command: str = blocks[0].strip()
    if not command:
        return Malformed("the bash block is empty")
    return command


class BashProtocol:
    """See the module; see `AgentProtocol` for the methods."""

    name = "bash"
    tools: Sequence[dict[str, Any]] = ()

    def first_observation(self, issue: str, *, workdir: str, test_command: str | None) -> str:
        return first_observation(issue, workdir=workdir, test_command=test_command)

    def parse(self, action: str) -> list[Call] | Malformed:
        command = parse_action(action)
        if isinstance(command, Malformed):
            return command
        return [Call("bash", {"command": command}, ends=command == SUBMIT)]

    def run(self, call: Call, sandbox: Sandbox, limits: Limits) -> str:
        return run_command(call.arguments["command"], sandbox, limits)

    def observation(self, answers: Sequence[tuple[Call, str]]) -> str:
        return "\n".join(answer for _, answer in answers)

    def refusal(self, malformed: Malformed) -> str:
        return f"Not understood: {malformed.reason}"
