"""A followed file: each whole line once, in order, whatever happens to the file meanwhile."""

import os

import pytest

from agentenv.viewer import followed_file
from agentenv.viewer.followed_file import FollowedFile


class Reader:
    def __init__(self, path):
        self.lines = []
        self.restarts = 0
        self.file = FollowedFile(path, lambda offset, line: self.lines.append((offset, line)), self.restart)

    def restart(self):
        self.lines.clear()
        self.restarts += 1

    def read(self, **options):
        self.file.poll(**options)
        return [line for _, line in self.lines]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lines"


@pytest.fixture
def reader(path):
    return Reader(path)


def test_a_missing_file_has_no_lines_until_it_comes(reader, path):
    assert reader.read() == []
    path.write_bytes(b"one\n")
    assert reader.read() == [b"one"]
    assert reader.restarts == 0


def test_a_line_counts_when_its_end_is_written(reader, path):
    path.write_bytes(b"one\ntw")
    assert reader.read() == [b"one"]
    assert reader.file.complete
    with path.open("ab") as out:
        out.write(b"o\nthree\n")
    assert reader.read() == [b"one", b"two", b"three"]
    assert [offset for offset, _ in reader.lines] == [0, 4, 8]
    assert reader.restarts == 0


def test_a_replaced_file_is_read_from_its_start(reader, path):
    path.write_bytes(b"one\ntwo\n")
    reader.read()
    other = path.with_name("other")
    other.write_bytes(b"one\nother\nmore\n")
    os.replace(other, path)
    assert reader.read() == [b"one", b"other", b"more"]
    assert reader.restarts == 1


@pytest.mark.parametrize("text", [b"one\n", b"", b"one\nTWO\nthree\n"])
def test_a_file_that_was_cut_or_overwritten_in_place_is_read_from_its_start(reader, path, text):
    path.write_bytes(b"one\ntwo\n")
    reader.read()
    with path.open("r+b") as out:
        out.write(text)
        out.truncate()
    assert reader.read() == text.splitlines()
    assert reader.restarts == 1


def test_a_file_that_has_gone_leaves_no_lines(reader, path):
    path.write_bytes(b"one\n")
    reader.read()
    path.unlink()
    assert reader.read() == []
    assert reader.restarts == 1


def test_with_a_budget_reading_ends_and_goes_on_where_it_was(reader, path, monkeypatch):
    monkeypatch.setattr(followed_file, "_PART_BYTES", 8)
    lines = [b"line %d" % number for number in range(50)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    reader.read(budget_s=-1.0)  # at least one part is read
    assert 0 < len(reader.lines) < 50
    assert not reader.file.complete
    polls = 0
    while not reader.file.complete:
        reader.read(budget_s=-1.0)
        polls += 1
        assert polls < 100
    assert reader.read() == lines


def test_a_line_without_an_end_in_sight_is_handed_on_as_an_empty_one(reader, path, monkeypatch):
    monkeypatch.setattr(followed_file, "_PART_BYTES", 8)
    monkeypatch.setattr(followed_file, "MAX_LINE_BYTES", 20)
    path.write_bytes(b"one\n" + b"x" * 100 + b"\ntwo\n")
    assert reader.read() == [b"one", b"", b"two"]
    assert reader.lines[-1][0] == 105
    with path.open("ab") as out:
        out.write(b"y" * 30)
    reader.read()
    with path.open("ab") as out:
        out.write(b"y" * 30 + b"\nthree\n")
    assert reader.read() == [b"one", b"", b"two", b"", b"three"]


def test_a_named_pipe_and_a_folder_are_no_files_and_block_nothing(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert Reader(tmp_path / "pipe").read() == []
    assert Reader(tmp_path).read() == []
