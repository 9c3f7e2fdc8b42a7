"""The program of one verifier process: JSON lines in, JSON lines out. `verifier` starts it; it imports nothing of ours.

Invariants:
- an answer costs at most `cpu_s` of processor time: the kernel ends this process by SIGPROF, also in the middle of one
  long operation of an integer, where a handler in Python would never run;
- memory is limited to `memory_mb` above what the libraries take;
- it ends when its stdin does, and when its parent is gone.
"""

import json
import os
import resource
import select
import signal
import sys
from typing import Any

_NOTHING = 1e-100
"""What is left of a difference of equal numbers is smaller."""
_SMALL = 1e-3
_ROUNDING = 1e-2
"""Of a number that small, the share by which a rounded one may differ from it."""
_LOOK_S = 10.0
"""How often an idle process looks whether its parent is still there."""


def main() -> None:
    """Serve until stdin ends. Arguments: memory_mb."""
    parent = os.getppid()
    # What the libraries print goes nowhere: the answers have a descriptor of their own.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        equal = _load()
        equal("1", "2")
    except Exception as error:
        _say(out, {"failed": f"{type(error).__name__}: {error}"})
        return
    _limit_memory(int(sys.argv[1]))
    _say(out, {"ready": True})
    while True:
        while not select.select([0], [], [], _LOOK_S)[0]:
            if os.getppid() != parent:
                return
        line = sys.stdin.buffer.readline()
        if not line:
            return
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["cpu_s"])
        try:
            reply: dict[str, Any] = {"equal": equal(asked["gold"], asked["answer"])}
        except MemoryError:
            reply = {"stopped": "memory"}
        except Exception as error:
            reply = {"equal": False, "error": type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _say(out, reply)
        if "stopped" in reply:
            return


def _load() -> Any:
    """The comparison, with the library imported."""
    import logging

    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    # As LaTeX, and only as a whole: the library's other way takes a number out of any text around it, and evaluates it
    # as Python.
    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str) -> Any:
        # Its own timers are off: they are alarms that Python serves late or never.
        return parse(
            rf"\boxed{{{text}}}", extraction_config=config, parsing_timeout=None, raise_on_error=False
        )

    def equal(gold: str, answer: str) -> bool:
        right, given = read(gold), read(answer)
        return bool(verify(right, given, timeout_seconds=None)) and not _apart(right[0], given[0])

    return equal


def _apart(right: Any, given: Any) -> bool:
    """Whether two numbers differ by more than rounding, though they are equal by the library's six decimals.

    So are all numbers below 0.0000005, and 0 with them.
    """
    import sympy

    if not all(isinstance(value, sympy.Expr) and value.is_number for value in (right, given)):
        return False
    one, two = (sympy.N(value, 15) for value in (right, given))
    if not (one.is_Float and two.is_number and _NOTHING < abs(one) < _SMALL):
        return False
    return bool(abs(one - two) > _ROUNDING * abs(one))


def _limit_memory(memory_mb: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + (memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _say(out: Any, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
