"""Records of tokens: what is written is read, one episode at a time; a crash or a rewind leaves no half of one."""

import math
import os
import subprocess
import sys

import pytest

from agentenv.errors import UsageError
from agentenv.report import RunDirectory, token_records
from agentenv.report.token_records import (
    EpisodeTokens,
    SegmentTokens,
    TokenWriter,
    read_tokens,
    recorded_episodes,
)


def segment(**changes) -> SegmentTokens:
    """A prompt token, two sampled ones of which the second was masked, and an observation."""
    values = {
        "token_ids": [5, 6, 7, 8],
        "texts": ["Do", " it", "", "é\n"],
        "action_mask": [False, True, True, False],
        "policy_versions": [-1, 3, 4, -1],
        "rollout_logprobs": [None, -0.5, -0.25, None],
        "policy_logprobs": [None, -0.75, -2.5, None],
        "values": [None, 0.5, 0.625, None],
        "advantages": [None, 0.25, -0.125, None],
        "kept": [None, True, False, None],
    }
    return SegmentTokens(**(values | changes))


def episode(name: str = "g0-0", step: int = 1, **changes) -> EpisodeTokens:
    return EpisodeTokens(**({"episode_id": name, "step": step, "segments": [segment()]} | changes))


@pytest.fixture
def run(tmp_path):
    """A new run directory."""
    run = RunDirectory.create(tmp_path / "out", {})
    yield run
    run.close()


def ids(run: RunDirectory) -> list[str]:
    return [entry["episode_id"] for entry in recorded_episodes(run.path)]


def test_what_was_written_is_read_again_segment_by_segment(run):
    long = episode("g1-0", 2, segments=[segment(), segment(token_ids=[1, 2, 3, 4])])
    run.log_tokens([episode(), long])
    assert read_tokens(run.path, "g0-0") == episode()
    assert read_tokens(run.path, "g1-0") == long
    assert read_tokens(run.path, "g2-0") is None


def test_the_ratio_is_that_of_the_two_log_probs(run):
    run.log_tokens([episode()])
    found = read_tokens(run.path, "g0-0").segments[0].ratios
    assert found == [None, pytest.approx(math.exp(-0.25)), pytest.approx(math.exp(-2.25)), None]


def test_numbers_that_are_not_finite_are_read_as_none(run):
    broken = segment(policy_logprobs=[None, -math.inf, math.nan, None], values=[None, math.inf, 0.5, None])
    run.log_tokens([episode(segments=[broken])])
    found = read_tokens(run.path, "g0-0").segments[0]
    assert found.policy_logprobs == [None] * 4
    assert found.ratios == [None] * 4
    assert found.values == [None, None, 0.5, None]


def test_a_ratio_beyond_the_largest_number_is_none():
    far = segment(policy_logprobs=[None, 0.0, 0.0, None], rollout_logprobs=[None, -9999.0, 0.0, None])
    assert far.ratios == [None, None, 1.0, None]


def test_a_run_without_records_has_none(run, tmp_path):
    assert read_tokens(run.path, "g0-0") is None
    assert list(recorded_episodes(tmp_path / "nowhere")) == []


def test_ids_that_begin_alike_or_hold_quotes_are_told_apart(run):
    names = ["g1-0", "g1-00", 'a", "step": 1', "ü-1", "1-0"]
    run.log_tokens([episode(name, step) for step, name in enumerate(names)])
    assert [read_tokens(run.path, name).step for name in names] == [0, 1, 2, 3, 4]
    assert read_tokens(run.path, "g1") is None


def test_an_episode_written_twice_is_the_later_one(run):
    run.log_tokens([episode(step=1), episode(step=2)])
    assert read_tokens(run.path, "g0-0").step == 2


def test_lists_of_unequal_length_are_refused_and_nothing_of_the_batch_is_written(run):
    with pytest.raises(ValueError, match=r"lengths differ.*'values': 1"):
        run.log_tokens([episode(), episode("g1-0", segments=[segment(values=[0.5])])])
    assert ids(run) == []


def test_a_torn_line_of_the_index_is_not_seen_and_the_next_writer_goes_on_behind_it(run):
    run.log_tokens([episode("a"), episode("b")])
    index = run.path / "tokens" / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-5])
    assert ids(run) == ["a"]
    assert read_tokens(run.path, "b") is None
    TokenWriter(run.path).append([episode("c")])
    assert ids(run) == ["a", "c"]
    assert read_tokens(run.path, "a") == episode("a")
    assert read_tokens(run.path, "c") == episode("c")


def test_a_record_that_a_crash_cut_short_is_dropped_by_the_next_writer(run):
    run.log_tokens([episode("a"), episode("b")])
    records = run.path / "tokens" / "records.bin"
    records.write_bytes(records.read_bytes()[:-3])
    with pytest.raises(UsageError, match="episode 'b' is damaged"):
        read_tokens(run.path, "b")
    TokenWriter(run.path).append([episode("c")])
    assert ids(run) == ["a", "c"]
    assert read_tokens(run.path, "c") == episode("c")


def test_bytes_that_no_line_points_to_are_written_over(run):
    run.log_tokens([episode("a")])
    with (run.path / "tokens" / "records.bin").open("ab") as records:
        records.write(b"half of a record")
    writer = TokenWriter(run.path)
    writer.append([episode("b")])
    assert read_tokens(run.path, "b") == episode("b")
    assert (run.path / "tokens" / "records.bin").stat().st_size == writer.size_bytes


def test_rewinding_drops_the_records_of_later_steps_and_goes_on(run):
    run.log_tokens([episode("eval0-0", 0, phase="before")])
    for step in (1, 2, 3):
        run.log_tokens([episode(f"g{step}-0", step)])
    run.log_tokens([episode("eval1-0", 3, phase="after")])
    run.rewind(2)
    assert ids(run) == ["eval0-0", "g1-0", "g2-0"]
    run.log_tokens([episode("again", 3)])
    assert read_tokens(run.path, "again") == episode("again", 3)
    assert read_tokens(run.path, "g2-0") == episode("g2-0", 2)


def test_dropping_a_phase_leaves_the_others(run):
    run.log_tokens([episode("eval0-0", 0, phase="before"), episode("g1-0", 1)])
    run.drop_phase("before")
    assert ids(run) == ["g1-0"]
    assert read_tokens(run.path, "g1-0") == episode("g1-0")


def test_nothing_is_written_beyond_the_room_for_records(run):
    assert run.log_tokens([episode("a")], max_bytes=10_000)
    assert not run.log_tokens([episode("b")], max_bytes=200)
    assert not run.log_tokens([episode("c")], max_bytes=200)
    assert ids(run) == ["a", "b"]


def test_records_of_another_layout_are_refused(run):
    run.log_tokens([episode()])
    records = run.path / "tokens" / "records.bin"
    records.write_bytes(records.read_bytes().replace(b"tokens 1", b"tokens 9"))
    with pytest.raises(UsageError, match="another version"):
        read_tokens(run.path, "g0-0")


def test_records_are_read_without_torch(run):
    run.log_tokens([episode()])
    program = (
        "import sys; from agentenv.report.token_records import read_tokens; "
        f"assert read_tokens({str(run.path)!r}, 'g0-0').step == 1; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["index.jsonl", "records.bin"])
def test_reading_never_waits_for_a_named_pipe(run, name):
    run.log_tokens([episode()])
    (run.path / "tokens" / name).unlink()
    os.mkfifo(run.path / "tokens" / name)
    if name == "index.jsonl":
        assert read_tokens(run.path, "g0-0") is None
    else:
        with pytest.raises(FileNotFoundError, match="not a regular file"):
            read_tokens(run.path, "g0-0")


def test_a_record_that_would_fill_the_memory_is_damaged(run, monkeypatch):
    run.log_tokens([episode()])
    run.log_tokens([episode("g1-0", segments=[segment(texts=["a" * 100_000, "", "", ""])])])
    monkeypatch.setattr(token_records, "_MOST_BYTES", 1000)
    with pytest.raises(UsageError, match="'g1-0' is damaged"):
        read_tokens(run.path, "g1-0")
    assert read_tokens(run.path, "g0-0") is not None
