"""Grading of embedded tasks: the agent's module is run in a clean sandbox, what is right stays here.

Invariants:
- only the module's text leaves the agent's sandbox; hidden calls enter it only after everything of the agent's
  is gone (processes killed, files removed);
- the expected answers never enter a sandbox: the probe reports answers as JSON, and this process compares them,
  so that no exit code, no `__eq__` and no patched test runner can speak for the module;
- a module that hangs, ends the interpreter or prints rubbish has failed; only a broken sandbox is an error.
"""

import json
from typing import Any, Final

from agentenv_envs.swe.sandbox import Sandbox

from .tasks import MODULE, EmbeddedTask

PROBE_TIMEOUT_S: Final = 10.0
MAX_MODULE_BYTES: Final = 100_000
_MAX_REPORT_BYTES = 64_000

# The module's own output goes nowhere; its answers come out on a descriptor that is kept aside.
_PROBE = """\
import json, os

report = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
calls = json.load(open("calls.json"))
os.remove("calls.json")
import app


def answer(name, arguments):
    try:
        return getattr(app, name)(*arguments)
    except Exception as error:
        return {"error": type(error).__name__}


text = json.dumps([answer(name, arguments) for name, arguments in calls])
os.write(report, text.encode())
os._exit(0)
"""


def grade(task: EmbeddedTask, module: str, sandbox: Sandbox) -> dict[str, Any]:
    """Run the hidden checks on a module's text; the sandbox is reset before and holds nothing of the agent's.

    Returns:
        {"resolved": bool, "passed": number of hidden checks passed, "checks": their number, "reason": str}

    Raises:
        SandboxError: the sandbox broke; the module has not been graded.
    """
    checks = len(task.expected)
    sandbox.reset({MODULE: module, "probe.py": _PROBE, "calls.json": json.dumps(task.hidden_calls)})
    result = sandbox.run("python probe.py", timeout_s=PROBE_TIMEOUT_S, half_bytes=_MAX_REPORT_BYTES // 2)
    if result.timed_out:
        return {"resolved": False, "passed": 0, "checks": checks, "reason": "timed out"}
    try:
        answers = json.loads(result.output)
    except ValueError:
        return {"resolved": False, "passed": 0, "checks": checks, "reason": "the module can't be used"}
    if not isinstance(answers, list) or len(answers) != checks:
        return {"resolved": False, "passed": 0, "checks": checks, "reason": "not one answer for each call"}
    # Compared as JSON text: True is not 1, and no object of the module's decides what it is equal to.
    passed = sum(json.dumps(a) == json.dumps(b) for a, b in zip(answers, task.expected, strict=True))
    reason = "" if passed == checks else f"{checks - passed} of {checks} checks fail"
    return {"resolved": passed == checks, "passed": passed, "checks": checks, "reason": reason}
