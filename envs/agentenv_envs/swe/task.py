"""The record that a row of any data set becomes, and the record of a row that was refused.

Invariants:
- What a task needs to run and to be graded stands in it; nothing is looked up in the row again.
- A task is graded in one of two ways: by the JUnit file of our own pytest run (`log_parser` is empty), or by the log of
  `eval_script` (`log_parser` names the parser).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PACKAGE_TIMEOUT_S", "RefusedRow", "SWETask", "file_of"]

PACKAGE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class SWETask:
    """One task on a real repository.

    Attributes:
        instance_id: unique in its file.
        problem_statement: what the agent is told.
        patch: the gold fix, a unified diff; read by calibration alone.
        test_patch: a unified diff that brings the hidden tests, "" where the image has them; applied while grading.
        fail_to_pass: ids of tests that fail before the fix and pass after it.
        pass_to_pass: ids of tests that pass before and after it.
        test_files: files that a grading run hands to pytest, in this order; an agent's changes of them are undone.
        repo: name of the repository, for reports.
        base_commit: commit that the image holds; empty for package rows.
        image: name of a published image; None for package rows.
        package: "name==version"; None for image rows.
        source_archive: path of a source distribution that is taken instead of the package index's; None for that.
        bug_patch: a unified diff that brings the bug into the release or into the image's repository (SWE-smith); the
            one commit has it applied. "" where what is to be repaired is there already.
        install: requirements that the tests of a package row need.
        source_root: directory, relative to the repository, from which a package row's code is imported.
        workdir: where the repository lies in the sandbox.
        setup: shell command run before the tests; may change the shell's environment.
        timeout_s: seconds that one run of the tests may take.
        schema: kind of row that it was made from, see `schemas.SCHEMAS`.
        log_parser: name in `log_parsers.PARSERS` for the log of `eval_script`; "" for a task that is graded by JUnit.
        eval_script: bash that runs the tests between the two marker lines of `test_commands`.
        expected: (test id, status) of the whole log after the fix, where it must match exactly (R2E-Gym); else empty.
        hidden: paths in the image, relative to the repository or absolute, that only a grading run may see.
    """

    instance_id: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_files: tuple[str, ...]
    repo: str = ""
    base_commit: str = ""
    image: str | None = None
    package: str | None = None
    source_archive: str | None = None
    bug_patch: str = ""
    install: tuple[str, ...] = ()
    source_root: str = "."
    workdir: str = "/testbed"
    setup: str = ""
    timeout_s: float = PACKAGE_TIMEOUT_S
    schema: str = "swe-bench"
    log_parser: str = ""
    eval_script: str = ""
    expected: tuple[tuple[str, str], ...] = ()
    hidden: tuple[str, ...] = ()

    @property
    def test_ids(self) -> tuple[str, ...]:
        """FAIL_TO_PASS and PASS_TO_PASS together."""
        return self.fail_to_pass + self.pass_to_pass

    @property
    def foreign_ids(self) -> tuple[str, ...]:
        """Test ids that are not of pytest's form `path.py::name`: a run graded by JUnit can't hold these."""
        return tuple(i for i in self.test_ids if file_of(i) is None)


@dataclass(frozen=True)
class RefusedRow:
    """A row that can't become a task.

    Attributes:
        instance_id: of the row; its place in the file ("line 3") where it has none.
        reason: what is wrong with it, and what is allowed.
    """

    instance_id: str
    reason: str


def file_of(test_id: str) -> str | None:
    """File part of a pytest id, None where the id is not of that form."""
    file, separator, _ = test_id.partition("::")
    return file if separator and file.endswith(".py") else None
