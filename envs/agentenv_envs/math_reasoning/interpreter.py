"""Python in a sandbox: a new interpreter for each program, or one that keeps its variables.

Invariants:
- what a program does is text; only a `SandboxError` is raised;
- a folder in which nothing can be written any more is the work of the episode's own programs, and is told as such;
- a program that runs too long, or ends its interpreter, is told so, and also that the variables are lost;
- what an interpreter keeps ends with the sandbox: nothing of one episode is seen in another.
"""

from pathlib import Path
from typing import Final, Protocol

from agentenv_envs.swe.protocols import format_observation
from agentenv_envs.swe.sandbox import Sandbox

__all__ = ["FreshInterpreter", "Interpreter", "LastingInterpreter"]

_FILE: Final = "program.py"
# -I: neither variables nor files of the folder change what is imported.
_COMMAND: Final = f"python3 -I {_FILE}"

_KERNEL: Final = Path(__file__).with_name("kernel_program.py")
_LOST: Final = "[a new interpreter begins: its variables are lost]"
_SPOILT: Final = "[not run: earlier programs made it impossible to write a program into this folder]"
_DEAD, _LATE = 253, 254
# Sandboxes without isolation limit a process's processor time by this: here, that of all programs together.
_LIFE_S: Final = 1_800.0
_MARGIN_S: Final = 15.0
_START: Final = """\
rm -f .ask .done .out && mkfifo .ask .done || exit 1
setsid python3 -I .kernel.py </dev/null >/dev/null 2>&1 &
echo $! >.pid"""
# Asks the kernel, and waits until it answers, is dead, or is late. Pipes opened for both ends never block. A look may
# end in the middle of an answer: what it got is kept.
_ASK: Final = """\
pid=$(cat .pid); exec 3<>.ask 4<>.done; code=
alive() {{ kill -0 $pid 2>/dev/null && [ "$(cut -d' ' -f3 /proc/$pid/stat 2>/dev/null)" != Z ]; }}
look() {{ local part; read -r -t 0.1 part <&4; local got=$?; code=$code$part; return $got; }}
printf . >&3
end=$((${{EPOCHREALTIME/[.,]/}} + {microseconds}))
while ! look; do
  if ! alive; then look || code={dead}; break; fi
  if [ ${{EPOCHREALTIME/[.,]/}} -gt $end ]; then kill -9 $pid; code={late}; break; fi
done
cat .out 2>/dev/null
exit "${{code:-{dead}}}\""""


class Interpreter(Protocol):
    """What runs the programs of one episode."""

    def run(self, code: str, *, timeout_s: float, half_bytes: int) -> tuple[str, bool]:
        """Run a program.

        Args:
            code: its text, of any kind.
            timeout_s: seconds it may take.
            half_bytes: of its output, kept from the head and from the tail, each.

        Returns:
            what the agent hears, and whether the program ended well.

        Raises:
            SandboxError: the sandbox is gone or does not answer.
        """


class FreshInterpreter:
    """A new interpreter for each program."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def run(self, code: str, *, timeout_s: float, half_bytes: int) -> tuple[str, bool]:
        try:
            self._sandbox.write_files({_FILE: _encoded(code)})
        except OSError:
            return _SPOILT, False
        result = self._sandbox.run(_COMMAND, timeout_s=timeout_s, half_bytes=half_bytes)
        text = format_observation(
            result.output, result.exit_code, timed_out=result.timed_out, timeout_s=timeout_s
        )
        return text, result.exit_code == 0


class LastingInterpreter:
    """One interpreter for all programs of an episode, replaced where it ends or is stopped."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._running = False

    def run(self, code: str, *, timeout_s: float, half_bytes: int) -> tuple[str, bool]:
        files = {_FILE: _encoded(code)}
        try:
            self._sandbox.write_files(
                files if self._running else {**files, ".kernel.py": _KERNEL.read_bytes()}
            )
        except OSError:
            return _SPOILT, False
        if not self._running:
            self._sandbox.run(_START, timeout_s=_LIFE_S)
            self._running = True
        ask = _ASK.format(microseconds=round(timeout_s * 1e6), dead=_DEAD, late=_LATE)
        result = self._sandbox.run(ask, timeout_s=timeout_s + _MARGIN_S, half_bytes=half_bytes)
        late = result.timed_out or result.exit_code == _LATE
        if not late and result.exit_code != _DEAD:
            return format_observation(result.output, result.exit_code), result.exit_code == 0
        self._running = False
        parts = [result.output.rstrip("\n")] if result.output.strip() else []
        parts += [
            f"[stopped after {timeout_s:g} s]" if late else "[the program ended its interpreter]",
            _LOST,
        ]
        return "\n".join(parts), False


def _encoded(code: str) -> bytes:
    return code.encode("utf-8", "replace")
