"""The index of a run's episodes: what a list shows, for any file that may stand there."""

import json

import pytest

from agentenv.report.run_directory import episode_head, episode_record
from agentenv.viewer.episode_index import EpisodeIndex

from .conftest import episode


def index_of(path):
    index = EpisodeIndex(path)
    index.refresh()
    return index


def test_a_row_has_what_the_file_says_of_an_episode(make_run):
    index = index_of(make_run(8).trajectories_path)
    assert len(index.rows) == 8
    row = index.rows[5]
    assert row.key == ("train", 2, "g5-0")
    assert (row.task_id, row.reward, row.outcome, row.end_reason) == (
        "task-0",
        0.0,
        "not solved",
        "terminated",
    )
    assert (row.turns, row.prompt_tokens, row.completion_tokens, row.action_tokens) == (2, 2, 2, 2)
    assert index.outcomes == {"solved": 4, "not solved": 4}
    assert index.read(row)["messages"][-1]["content"] == "turn the lamp on 5"


def test_staleness_is_that_of_the_metrics_updates_between_start_and_use(make_run):
    run = make_run(4)
    # Step 3 trains the weights of version 2: an episode of version 2 is fresh.
    run.log_trajectories("train", 3, [episode(9, start_version=2), episode(10, start_version=0)])
    run.log_trajectories("after", 3, [episode(11, start_version=3)])
    assert [row.staleness for row in index_of(run.trajectories_path).rows[4:]] == [0, 2, None]


def test_an_episode_that_infrastructure_ended_is_neither_solved_nor_not(make_run):
    run = make_run(0)
    run.log_trajectories(
        "before", 0, [episode(0, terminated=False, end_reason="reset", info={"failure": "reset"})]
    )
    assert index_of(run.trajectories_path).rows[0].outcome == "failed"


@pytest.mark.parametrize("text", ['", "info": {', '\\", "info": ', ', "info": ', "\\", "info"])
def test_no_text_of_an_episode_is_taken_for_the_end_of_its_head(text):
    item = episode(
        1, task_id=text, episode_id=text, end_reason=text, info={"a": text}, messages=[{"content": text}]
    )
    record = episode_record("train", 1, item)
    line = json.dumps(record).encode()
    long = {"info", "messages"}
    assert json.loads(episode_head(line)) == {
        name: value for name, value in record.items() if name not in long
    }
    assert len(episode_head(line)) < len(line)


def test_lines_in_another_order_or_spacing_are_read_whole(tmp_path):
    record = episode_record("train", 1, episode(1))
    path = tmp_path / "t.jsonl"
    reordered = {"messages": record["messages"], **record}
    compact = json.dumps(record, separators=(",", ":"))
    path.write_text(json.dumps(reordered) + "\n" + compact + "\n")
    index = index_of(path)
    assert [row.key for row in index.rows] == [("train", 1, "g1-0")] * 2
    assert index.unreadable == 0


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b'"a string"',
        b"[1, 2]",
        b'{"phase": "elsewhere", "step": 1}',
        b'{"phase": ["train"], "step": 1}',
        b'{"phase": "train", "step": "one"}',
        b'{"phase": "train", "step": true}',
        b'{"phase": "train", "step": 1' + b"0" * 5000 + b"}",
        b'{"phase": ' + b"[" * 100_000,
        b"\xff\xfe",
        b"",
    ],
)
def test_a_line_that_is_no_episode_is_counted_and_costs_no_other(tmp_path, line):
    path = tmp_path / "t.jsonl"
    good = json.dumps(episode_record("train", 1, episode(1))).encode()
    path.write_bytes(line + b"\n" + good + b"\n")
    index = index_of(path)
    assert [row.episode_id for row in index.rows] == ["g1-0"]
    assert index.unreadable == 1


def test_values_of_a_wrong_type_are_left_out_and_long_texts_cut(tmp_path):
    path = tmp_path / "t.jsonl"
    strange = {
        "reward": "much",
        "turns": [1],
        "seed": 1e400,
        "start_version": True,
        "duration_s": float("nan"),
    }
    path.write_text(
        json.dumps({"phase": "train", "step": 1, "task_id": {"a": 1}, "episode_id": "e" * 2000, **strange})
        + "\n"
    )
    (row,) = index_of(path).rows
    assert (row.task_id, row.episode_id) == ("", "e" * 1000)
    assert {row.reward, row.turns, row.seed, row.start_version, row.staleness, row.duration_s} == {None}


def test_an_index_grows_with_its_file(make_run):
    run = make_run(4)
    index = index_of(run.trajectories_path)
    generation = index.generation
    run.log_trajectories("train", 2, [episode(50)])
    index.refresh()
    assert [row.episode_id for row in index.rows[4:]] == ["g50-0"]
    assert index.generation == generation


def test_after_a_rewind_no_row_is_left_of_what_was_dropped(make_run):
    run = make_run(12)
    index = index_of(run.trajectories_path)
    stale = index.rows[-1]
    generation = index.generation
    run.rewind(1)
    run.log_trajectories("train", 2, [episode(70, messages=[{"role": "user", "content": "x" * 3000}])])
    assert index.read(stale) is None  # also before the index has seen that
    index.refresh()
    assert [row.episode_id for row in index.rows] == ["g0-0", "g1-0", "g2-0", "g3-0", "g70-0"]
    assert index.generation > generation
    assert index.find("train", 3, stale.episode_id) is None
