"""The verdict on a patch, and the steps that every way of grading begins with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .repository import apply_agent_patch, patched_paths, restore_hidden
from .sandbox import Sandbox
from .task import SWETask

__all__ = ["Grade", "invalid", "lay_out", "verdict"]

_MAX_REASONS = 20


@dataclass(frozen=True)
class Grade:
    """The verdict on one patch.

    Attributes:
        resolved: whether the patch earns a reward of 1.
        status: "resolved", "failed" (a reward of 0), or "invalid" (no reward: nobody's patch was judged).
        evidence: what the verdict rests on, JSON-able: `reason` (the first, "" where resolved), `reasons`,
            statuses of tests, return codes, head and tail of the output.
    """

    resolved: bool
    status: Literal["resolved", "failed", "invalid"]
    evidence: dict[str, Any] = field(default_factory=dict)


def verdict(reasons: list[str], evidence: dict[str, Any]) -> Grade:
    """Resolved where there is no reason against it, else failed."""
    if not reasons:
        return Grade(True, "resolved", {"reason": "", "reasons": [], **evidence})
    shown = reasons[:_MAX_REASONS]
    if len(reasons) > len(shown):
        shown.append(f"and {len(reasons) - len(shown)} more")
    return Grade(False, "failed", {"reason": shown[0], "reasons": shown, **evidence})


def invalid(reason: str) -> Grade:
    """Nobody's patch was judged."""
    return Grade(False, "invalid", {"reason": reason, "reasons": [reason]})


def lay_out(
    sandbox: Sandbox, task: SWETask, patch: str, scratch: str, stash: str
) -> tuple[Grade | None, dict[str, Any]]:
    """Apply an agent's patch and then the hidden tests to a fresh workspace.

    Args:
        sandbox: from `open_workspace(..., stash=stash)`, untouched since.
        task: the row.
        patch: the agent's.
        scratch: from `scratch_folder`.
        stash: where `open_workspace` put the hidden files.

    Returns:
        a grade where it ends here, and the evidence so far.
    """
    apply_tests = f"git apply --whitespace=nowarn {scratch}/test.patch"
    patched: list[str] = []
    if task.test_patch:
        sandbox.write_files({f"{scratch}/test.patch": task.test_patch.rstrip("\n") + "\n"})
        # What can be wrong with row or image is found out before any of the agent's code is there.
        check = sandbox.run(f"{apply_tests} --check", timeout_s=60.0)
        if check.exit_code != 0:
            return invalid(f"test_patch does not apply to the repository: {check.output.strip()[-500:]}"), {}
        patched = patched_paths(sandbox, f"{scratch}/test.patch")
    problem, restored = apply_agent_patch(
        sandbox, patch, [*task.test_files, *patched], setup=task.setup or ""
    )
    evidence: dict[str, Any] = {"restored": restored}
    if problem is not None:
        return verdict([problem], evidence), evidence
    if task.test_patch:
        applied = sandbox.run(apply_tests, timeout_s=60.0)
        if applied.exit_code != 0:
            reason = f"with the patch, test_patch does not apply: {applied.output.strip()[-500:]}"
            return verdict([reason], evidence), evidence
    restore_hidden(sandbox, task, stash)
    return None, evidence
