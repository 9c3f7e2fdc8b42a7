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

# What the module prints and what Python warns of go nowhere; the answers come out on a descriptor that is kept aside.
_PROBE = """\
import json, os

report = os.dup(1)
nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1)
os.dup2(nowhere, 2)
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
        # Compared as JSON text: True is not 1, and no object of the module's decides what it is equal to.
        texts = [json.dumps(answer) for answer in answers] if isinstance(answers, list) else []
    except (ValueError, RecursionError):
        return {"resolved": False, "passed": 0, "checks": checks, "reason": "the module can't be used"}
    if len(texts) != checks:
        return {"resolved": False, "passed": 0, "checks": checks, "reason": "not one answer for each call"}
    passed = sum(text == json.dumps(right) for text, right in zip(texts, task.expected, strict=True))
    reason = "" if passed == checks else f"{checks - passed} of {checks} checks fail"
    return {"resolved": passed == checks, "passed": passed, "checks": checks, "reason": reason}
