"""The progress line: what it says, and how often where nobody redraws it."""

import io

import pytest

from agentenv.report import Progress, format_seconds


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def out():
    return io.StringIO()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (200, "3m20s"), (3900, "1h05m")]
)
def test_durations_read_as_a_person_says_them(seconds, text):
    assert format_seconds(seconds) == text


def test_a_line_tells_stage_count_values_and_time_left(out, clock):
    progress = Progress(out, clock=clock)
    progress.stage("training", unit="step", total=70)
    clock.now = 24.0
    progress.update(12, {"reward": "0.41", "staleness": "0.8"})
    assert out.getvalue() == "training  step 12/70  reward 0.41  staleness 0.8  1m56s left\n"


def test_the_time_left_of_a_resumed_run_counts_only_its_own_steps(out, clock):
    progress = Progress(out, clock=clock)
    progress.stage("training", unit="step", total=70, done=60)
    clock.now = 10.0
    progress.update(65)
    assert "10s left" in out.getvalue()


def test_a_log_gets_a_line_per_interval_and_always_the_last_one(out, clock):
    progress = Progress(out, clock=clock, interval_s=10.0)
    progress.stage("training", unit="step", total=50)
    for step in range(1, 51):
        clock.now = float(step)
        progress.update(step)
    printed = [line.split()[2] for line in out.getvalue().splitlines()]
    assert printed == ["1/50", "11/50", "21/50", "31/50", "41/50", "50/50"]


def test_every_stage_begins_with_a_line_of_its_own(out, clock):
    progress = Progress(out, clock=clock)
    progress.stage("before", unit="episode", total=2)
    progress.update(1)
    progress.stage("after", unit="episode", total=2)
    progress.update(1)
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["before", "after"]


def test_on_a_terminal_markup_in_a_note_is_text(clock):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with Progress(terminal, clock=clock) as progress:
        progress.stage("training", unit="step", total=2)
        progress.update(1, {"reward": "[red]0.5[/red]"})
        progress.note("[bold]written[/bold]")
    assert "[bold]written[/bold]" in terminal.getvalue()
