"""The state that a calibration goes on from."""

from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.errors import UsageError
from agentenv_envs.swe.calibrate import Calibration
from agentenv_envs.swe.calibration_state import CalibrationState, row_hash
from agentenv_envs.swe.data import SWETask, load_tasks

FIXTURE = Path(__file__).parent / "fixtures" / "package_rows.jsonl"


@pytest.fixture
def task() -> SWETask:
    return load_tasks(FIXTURE)[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.jsonl"


def open_state(path: Path, *tasks: SWETask, repeats: int = 2, sandbox: str = "docker") -> CalibrationState:
    return CalibrationState(path, tasks, repeats=repeats, sandbox=sandbox)


def test_a_verdict_is_found_by_the_next_process(path: Path, task: SWETask) -> None:
    result = Calibration(task.instance_id, 0, 1, "two\nlines, and \u2028")
    with open_state(path, task) as state:
        assert state.get(task) is None
        state.add(result)
    with open_state(path, task) as state:
        assert state.get(task) == result
    assert path.read_bytes().count(b"\n") == 1


def test_a_row_that_could_not_be_judged_is_not_kept(path: Path, task: SWETask) -> None:
    with open_state(path, task) as state:
        state.add(Calibration(task.instance_id, None, None, "no engine"))
        state.add(Calibration(task.instance_id, 1, None, "no engine"))
    assert path.read_bytes() == b""


def test_a_changed_row_is_another_row(path: Path, task: SWETask) -> None:
    with open_state(path, task) as state:
        state.add(Calibration(task.instance_id, 1, 0, ""))
    changed = replace(task, patch=task.patch + "\n")
    with open_state(path, changed) as state:
        assert state.get(changed) is None
    with open_state(path, task, sandbox="local-unisolated") as state:
        assert state.get(task) is None
    assert row_hash(task, "docker") == row_hash(load_tasks(FIXTURE)[0], "docker")


def test_a_row_that_calibrates_must_have_been_graded_often_enough(path: Path, task: SWETask) -> None:
    other = replace(task, instance_id="other")
    with open_state(path, task, other, repeats=2) as state:
        state.add(Calibration(task.instance_id, 1, 0, ""))
        state.add(Calibration("other", 0, 0, "it fails"))
    with open_state(path, task, other, repeats=3) as state:
        assert state.get(task) is None
        assert state.get(other) is not None, "more grades can't make a row better that failed once"
    with open_state(path, task, repeats=1) as state:
        assert state.get(task) is not None


@pytest.mark.parametrize("torn", [b"{", b'{"row": "0123', b'{"row": "01", "instance_id": "a", "gold'])
def test_a_torn_last_line_is_dropped_and_the_file_goes_on(path: Path, task: SWETask, torn: bytes) -> None:
    other = replace(task, instance_id="other")
    with open_state(path, task, other) as state:
        state.add(Calibration(task.instance_id, 1, 0, ""))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    with open_state(path, task, other) as state:
        assert state.get(task) is not None
        state.add(Calibration("other", 1, 0, ""))
    assert path.read_bytes().startswith(whole + b'{"row": "')
    with open_state(path, task, other) as state:
        assert state.get(task) is not None and state.get(other) is not None


@pytest.mark.parametrize(
    "text",
    [
        '{"instance_id": "a"}\n',
        '{"row": "a", "instance_id": "a", "gold": "1", "noop": 0, "reason": "", "repeats": 2}\n',
        "no JSON\n",
        "[1]\n",
        "[" * 100_000 + "\n",
        '{"a": 1}',
        "important",
        "\n",
    ],
)
def test_a_file_that_is_no_state_is_refused_and_stays_as_it_is(path: Path, task: SWETask, text: str) -> None:
    path.write_text(text)
    with pytest.raises(UsageError, match=r"state\.jsonl: .* state of `swe calibrate`"):
        open_state(path, task)
    assert path.read_text() == text


def test_two_calibrations_do_not_share_a_state(path: Path, task: SWETask) -> None:
    with open_state(path, task), pytest.raises(UsageError, match="another calibration is using it"):
        open_state(path, task)
    open_state(path, task).close()


def test_a_state_that_can_not_be_opened_is_a_usage_error(tmp_path: Path, task: SWETask) -> None:
    with pytest.raises(UsageError, match="can't be opened: Is a directory"):
        open_state(tmp_path, task)
