"""The output directory: refused when used, consistent after a crash, one writer at a time."""

import json
import math
import subprocess
import sys

import pytest

from agentenv.errors import UsageError
from agentenv.report import RunDirectory
from agentenv.report.run_directory import is_being_written, read_lines
from agentenv.trajectory import Trajectory


def trajectory(**changes) -> Trajectory:
    """A short episode: two action tokens, one observation token, one action token."""
    values = {
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4, 5, 6],
        "rollout_logprobs": [-0.5, -0.1, 0.0, -0.2],
        "action_mask": [True, True, False, True],
        "policy_versions": [0, 0, -1, 0],
        "reward": 1.0,
        "terminated": True,
        "end_reason": "terminated",
        "episode_id": "e1",
        "task_id": "t1",
        "turns": 2,
        "messages": [{"role": "user", "content": "fix it"}],
        "info": {"success": True},
    }
    return Trajectory(**(values | changes))


@pytest.fixture
def run(tmp_path):
    """A new run directory."""
    run = RunDirectory.create(tmp_path / "out", {"args": {"seed": 1}})
    yield run
    run.close()


def steps(run: RunDirectory) -> list[int]:
    return [line["step"] for line in read_lines(run.metrics_path)]


def test_a_directory_in_use_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UsageError, match="already in use"):
        RunDirectory.create(tmp_path, {})
    assert [item.name for item in tmp_path.iterdir()] == ["mine.txt"]


def test_checking_a_new_directory_creates_nothing(tmp_path):
    RunDirectory.check(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match="out: is a file"):
        RunDirectory.create(tmp_path / "out", {})


def test_a_directory_that_cannot_be_made_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/out: cannot be written to \(Not a directory\)"):
        RunDirectory.create(tmp_path / "file" / "out", {})


def test_there_is_nothing_to_resume_in_a_foreign_directory(tmp_path):
    with pytest.raises(UsageError, match="no run to resume"):
        RunDirectory.resume(tmp_path)


def test_a_resumed_run_knows_its_record(run):
    run.record["before"] = {"success": 0.25, "episodes": 4}
    run.save_record()
    run.close()
    again = RunDirectory.resume(run.path)
    assert again.record["args"] == {"seed": 1}
    assert again.record["before"]["success"] == 0.25
    again.close()


def test_a_layout_of_another_version_is_refused_and_unlocked(run):
    run.record["format"] = 99
    run.save_record()
    run.close()
    for _ in range(2):
        with pytest.raises(UsageError, match="layout version 99"):
            RunDirectory.resume(run.path)


def test_a_second_process_is_refused_while_the_first_writes(run):
    program = f"from agentenv.report import RunDirectory; RunDirectory.resume({str(run.path)!r})"
    refused = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "another process is writing" in refused.stderr
    run.close()
    subprocess.run([sys.executable, "-c", program], check=True)


def test_it_is_seen_whether_a_process_writes_without_being_in_its_way(run):
    assert is_being_written(run.path)
    run.close()
    assert not is_being_written(run.path)
    assert not is_being_written(run.path / "nothing")


def test_a_metric_that_is_not_finite_becomes_null_so_that_the_line_stays_json(run):
    run.log_metrics(1, {"reward": 0.5, "explained_variance": math.nan, "loss": math.inf})
    line = json.loads(run.metrics_path.read_text())
    assert line == {"step": 1, "reward": 0.5, "explained_variance": None, "loss": None}


def test_an_episode_is_written_as_text_with_its_counts_but_without_ids(run):
    run.log_trajectories("train", 3, [trajectory(messages=[{"role": "user", "content": "\ud800 \u202e"}])])
    [line] = read_lines(run.trajectories_path)
    assert line["phase"] == "train"
    assert line["step"] == 3
    assert line["action_tokens"] == 3
    assert line["completion_tokens"] == 4
    assert line["success"] is True
    assert line["messages"][0]["content"] == "\ud800 \u202e"
    assert "completion_ids" not in line


def test_an_unknown_phase_is_refused(run):
    with pytest.raises(ValueError, match="phase is 'during'"):
        run.log_trajectories("during", 0, [])


def test_rewinding_drops_everything_after_the_checkpoint(run):
    run.log_trajectories("before", 0, [trajectory()])
    for step in range(1, 6):
        run.log_metrics(step, {"reward": 0.1})
        run.log_trajectories("train", step, [trajectory()])
    run.log_trajectories("after", 5, [trajectory()])
    run.write_summary({"status": "interrupted"})
    run.rewind(3)
    assert steps(run) == [1, 2, 3]
    phases = [(line["phase"], line["step"]) for line in read_lines(run.trajectories_path)]
    assert phases == [("before", 0), ("train", 1), ("train", 2), ("train", 3)]
    assert not run.summary_path.exists()


def test_a_line_torn_by_a_crash_is_dropped_and_the_next_one_is_whole(run):
    run.log_metrics(1, {"reward": 0.1})
    run.log_metrics(2, {"reward": 0.2})
    run.metrics_path.write_bytes(run.metrics_path.read_bytes()[:-7])
    run.rewind(2)
    run.log_metrics(2, {"reward": 0.3})
    assert [(line["step"], line["reward"]) for line in read_lines(run.metrics_path)] == [(1, 0.1), (2, 0.3)]


def test_a_broken_line_in_the_middle_is_an_error_not_a_shorter_file(run):
    run.metrics_path.write_text('{"step": 1}\n{"step\n{"step": 3}\n')
    with pytest.raises(UsageError, match="not valid JSON"):
        run.rewind(3)
    assert run.metrics_path.read_text().count("\n") == 3


def test_a_phase_that_did_not_finish_can_be_dropped(run):
    run.log_trajectories("before", 0, [trajectory()])
    run.log_trajectories("train", 1, [trajectory()])
    run.drop_phase("before")
    assert [line["phase"] for line in read_lines(run.trajectories_path)] == ["train"]


def test_a_failed_write_leaves_the_old_summary_and_no_temporary_file(run):
    run.write_summary({"status": "finished"})
    with pytest.raises(ValueError, match="JSON compliant"):
        run.write_summary({"seconds": math.nan})
    assert json.loads(run.summary_path.read_text()) == {"status": "finished"}
    assert sorted(item.name for item in run.path.iterdir()) == [".lock", "run.json", "summary.json"]
