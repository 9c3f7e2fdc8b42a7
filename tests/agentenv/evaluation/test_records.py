"""The file of an evaluation: whatever texts it holds, it is read back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.errors import UsageError
from agentenv.evaluation.records import EpisodeLog, EpisodeRecord
from agentenv.evaluation.report import make_report
from agentenv.trajectory import Trajectory

# Line separators of Unicode, a lone surrogate as undecodable bytes become, and what JSON escapes.
ODD = 'a\u2028b\u2029c\x85d\x1ce\nf\udcffg"h\\i\x00'


def _record(index: int, **values: object) -> EpisodeRecord:
    known = {"seed": index, "task_id": ODD, "family": ODD, "success": True, "reward": 1.0, "steps": 2}
    return EpisodeRecord(
        index=index,
        **{**known, "end_reason": "terminated", "failed": False, **values},  # type: ignore[arg-type]
        messages=[{"role": "user", "content": ODD}],
    )


def test_any_text_is_written_and_read_back_and_the_report_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with EpisodeLog(path, {"system_prompt": ODD}) as log:
        for index in (2, 0, 1):
            log.add(_record(index, success=index != 1))
        first = make_report(log.records.values(), {})
    assert path.read_bytes().count(b"\n") == 4
    with EpisodeLog(path, {"system_prompt": ODD}) as log:
        assert sorted(log.records) == [0, 1, 2]
        assert make_report(log.records.values(), {}) == first
        assert log.records[0].family == ODD
    lines = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    assert lines[1]["messages"] == [{"role": "user", "content": ODD}]


def test_messages_stay_in_the_file_and_not_in_memory(tmp_path: Path) -> None:
    for path in (tmp_path / "log.jsonl", None):
        with EpisodeLog(path, {}) as log:
            log.add(_record(0))
            assert log.records[0].messages == []


def test_a_line_that_is_cut_off_in_the_middle_of_a_character_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with EpisodeLog(path, {}) as log:
        log.add(_record(0))
    whole = path.read_bytes()
    path.write_bytes(whole + '{"index": 1, "task_id": "世'.encode()[:-1])
    with EpisodeLog(path, {}) as log:
        assert sorted(log.records) == [0]
        log.add(_record(1))
    with EpisodeLog(path, {}) as log:
        assert sorted(log.records) == [0, 1]


def test_a_damaged_line_in_the_middle_is_told_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with EpisodeLog(path, {}) as log:
        log.add(_record(0))
        log.add(_record(1))
    lines = path.read_text(errors="surrogateescape").split("\n")
    lines[1] = lines[1][:20]
    path.write_text("\n".join(lines), errors="surrogateescape")
    with pytest.raises(UsageError, match="line 2: not a line of an evaluation"):
        EpisodeLog(path, {})


@pytest.mark.parametrize(
    "values",
    [
        {"success": "yes"},
        {"index": "1"},
        {"index": 2},
        {"index": -1},
        {"steps": None},
        {"metrics": None},
        {"metrics": {"turns": "x"}},
        {"seconds": "x"},
        {"family": ["x"]},
        {"prompt_tokens": 1.5},
    ],
    ids=str,
)
def test_a_line_with_another_kind_of_value_is_told_by_its_number(
    tmp_path: Path, values: dict[str, object]
) -> None:
    path = tmp_path / "log.jsonl"
    with EpisodeLog(path, {"episodes": 2}) as log:
        log.add(_record(0))
    good = json.loads(path.read_bytes().split(b"\n")[1])
    with path.open("a") as file:
        file.write(f"{json.dumps({**good, 'index': 1, **values})}\n")
    with pytest.raises(UsageError, match=r"log\.jsonl, line 3: not a line of an evaluation"):
        EpisodeLog(path, {"episodes": 2})


def test_a_full_disk_is_one_error_and_what_was_written_is_gone_on_from(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    program = """if True:
        import resource, sys
        from pathlib import Path
        from agentenv.errors import UsageError
        from agentenv.evaluation.records import EpisodeLog, EpisodeRecord
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with EpisodeLog(Path(sys.argv[1]), {}) as log:
            try:
                for index in range(100):
                    log.add(EpisodeRecord(index, 0, "t", "f", True, 1.0, 2, "terminated", False))
            except UsageError as error:
                print(len(log.records), error)
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    kept, _, said = done.stdout.partition(" ")
    assert said.strip() == f"--json: {path} cannot be written: File too large"
    with EpisodeLog(path, {}) as log:
        assert sorted(log.records) == list(range(int(kept)))
        log.add(_record(int(kept)))


def test_invalid_actions_are_read_wherever_an_environment_counts_them() -> None:
    def counted(**info: object) -> int | None:
        trajectory = Trajectory([], [], [], [], [], info=dict(info))
        return EpisodeRecord.of(0, trajectory).invalid_actions

    assert counted() is None
    assert counted(invalid_actions=2) == 2
    assert counted(malformed_actions=1) == 1
    assert counted(metrics={"invalid_actions": 3.0}, invalid_actions=2) == 3
    assert counted(metrics={"invalid_actions": float("nan")}, invalid_actions=2) == 2
    assert counted(metrics="none") is None
