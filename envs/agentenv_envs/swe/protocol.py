"""What an agent of the SWE environment says and hears: one bash command a turn, and `submit`.

Invariants:
- an action that can't be understood is answered by an observation that says what is allowed; it is never an
  exception.
"""

import re
from dataclasses import dataclass
from typing import Final

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


@dataclass(frozen=True)
class Malformed:
    """An action that holds no command, or more than one."""

    reason: str


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
