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
        return bool(verify(read(gold), read(answer), timeout_seconds=None))

    return equal


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
