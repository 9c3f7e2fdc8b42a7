"""What a grading run of pytest left behind: its JUnit file and the runner's own record, read without trust.

Both files were written inside the sandbox by a process that ran the agent's code.

Invariants:
- A test's status is the worst that any of its entries reports: a test that passed and failed in its
  teardown failed.
- A file that is too large, declares entities or isn't JUnit gives a `ValueError`, never a status.
- An id is mapped to its JUnit name in the direction in which pytest does it; the way back is ambiguous.
"""

from __future__ import annotations

import hmac
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["RunRecord", "TestKey", "TestStatus", "junit_key", "parse_junit", "parse_record", "seal_of"]

MAX_JUNIT_BYTES = 32_000_000
MAX_RECORD_BYTES = 16_000_000

TestStatus = Literal["passed", "failed", "error", "skipped", "xfailed"]
TestKey = tuple[str, str]
"""JUnit's class name and name of a test."""

_RANK: Mapping[TestStatus, int] = {"passed": 0, "xfailed": 1, "skipped": 2, "error": 3, "failed": 4}
# Characters that pytest writes as #xNN (junitxml.bin_xml_escape): those that XML 1.0 can't hold, DEL, and
# by an accident of its pattern all above U+FFFF.
_ILLEGAL = re.compile("[^\\t\\n\\r\\x20-\\x7e\\x80-\\ud7ff\\ue000-\\ufffd]")


@dataclass(frozen=True)
class RunRecord:
    """What the runner inside the sandbox wrote after pytest had returned.

    Attributes:
        seal: what `seal_of` makes of the rest with the secret of this run.
        exit_code: what pytest returned.
        reported: ids of all tests that reported a result.
        failures: ids of those that failed.
        changes: functions of pytest that were replaced, and test files whose tests came from elsewhere.
    """

    seal: str
    exit_code: int
    reported: tuple[str, ...]
    failures: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


def seal_of(record: RunRecord, token: str) -> str:
    """What seals a record: nobody who does not know the token can write it."""
    body = [record.exit_code, record.reported, record.failures, record.changes]
    return hmac.new(token.encode(), json.dumps(body).encode(), "sha256").hexdigest()


def junit_key(test_id: str) -> TestKey:
    """Class name and name under which pytest files a test id in JUnit.

        >>> junit_key("tests/test_a.py::TestB::test_c[/-/bar::x.py]")
        ('tests.test_a.TestB', 'test_c[/-/bar::x.py]')

    Source: `_pytest.junitxml.mangle_test_address` and `bin_xml_escape` (pytest 5 to 8).
    """
    path, bracket, parameters = test_id.partition("[")
    names = path.split("::")
    names[0] = re.sub(r"\.py$", "", names[0].replace("/", "."))
    names[-1] += bracket + parameters
    return _escaped(".".join(names[:-1])), _escaped(names[-1])


def parse_junit(content: bytes) -> dict[TestKey, TestStatus]:
    """Status of each test in a JUnit file; what failed to be collected is left out.

    Raises:
        ValueError: the content is too large, declares entities, or is not JUnit.
    """
    if len(content) > MAX_JUNIT_BYTES:
        raise ValueError(f"the JUnit file has more than {MAX_JUNIT_BYTES} bytes")
    if b"<!DOCTYPE" in content or b"<!ENTITY" in content:
        raise ValueError("the JUnit file declares entities")
    try:
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError) as error:
        raise ValueError(f"the JUnit file can't be parsed: {error}") from None
    if root.tag not in ("testsuites", "testsuite"):
        raise ValueError(f"the JUnit file's root is {root.tag!r}, expected 'testsuites'")
    statuses: dict[TestKey, TestStatus] = {}
    for case in root.iter("testcase"):
        status = _status_of(case)
        if status is None:
            continue
        key = _escaped(case.get("classname", "")), _escaped(case.get("name", ""))
        if key not in statuses or _RANK[status] > _RANK[statuses[key]]:
            statuses[key] = status
    return statuses


def parse_record(content: bytes) -> RunRecord:
    """Read the runner's record.

    Raises:
        ValueError: it is not of the form that the runner writes.
    """
    if len(content) > MAX_RECORD_BYTES:
        raise ValueError(f"the runner's record has more than {MAX_RECORD_BYTES} bytes")
    try:
        record = json.loads(content)
        seal, exit_code = record["seal"], record["exit_code"]
        lists = [record[name] for name in ("reported", "failures", "changes")]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the runner's record can't be read: {error!r}") from None
    if (
        not isinstance(seal, str)
        or not isinstance(exit_code, int)
        or not all(isinstance(items, list) for items in lists)
        or not all(isinstance(item, str) for items in lists for item in items)
    ):
        raise ValueError("the runner's record has fields of wrong types")
    return RunRecord(seal, exit_code, *map(tuple, lists))


def _status_of(case: ElementTree.Element) -> TestStatus | None:
    """Worst status of one entry; None where a file or a class, not a test, reports that it can't be
    collected."""
    worst: TestStatus = "passed"
    for child in case:
        if child.get("message", "").startswith("collection ") and child.tag in ("error", "skipped"):
            return None
        status: TestStatus
        if child.tag == "failure":
            status = "failed"
        elif child.tag == "error":
            status = "error"
        elif child.tag == "skipped":
            status = "xfailed" if child.get("type") == "pytest.xfail" else "skipped"
        else:
            continue
        if _RANK[status] > _RANK[worst]:
            worst = status
    return worst


def _escaped(text: str) -> str:
    def code(match: re.Match[str]) -> str:
        number = ord(match[0])
        return f"#x{number:02X}" if number <= 0xFF else f"#x{number:04X}"

    return _ILLEGAL.sub(code, text)
