"""The report: self-contained, escaped, complete, and loud where tasks ran unisolated."""

import re
from html.parser import HTMLParser

import pytest

from agentenv.errors import UsageError
from agentenv.report import RunDirectory, write_report
from agentenv.report.curve import main as curve
from agentenv.report.transcripts import choose_pairs, cut, visible
from agentenv.trajectory import Trajectory

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\u202egnp.exe\x1b[31m"


class Tags(HTMLParser):
    """Collects tags and attributes, and checks that they nest."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "line", "path", "circle", "rect"):
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


def episode(seed: int, success: bool, text: str = "echo ok", **changes) -> Trajectory:
    values = {
        "reward": float(success),
        "terminated": True,
        "end_reason": "terminated",
        "task_id": f"task-{seed}",
        "seed": seed,
        "turns": 1,
        "messages": [{"role": "user", "content": "fix it"}, {"role": "assistant", "content": text}],
        "info": {"success": success},
    }
    return Trajectory([1], [2], [-0.1], [True], [0], **(values | changes))


@pytest.fixture
def run(tmp_path):
    """A finished run whose policy wrote hostile text."""
    run = RunDirectory.create(
        tmp_path / "out", {"name": "swe_sao", "args": {"model": "<b>m</b>"}, "versions": {"torch": "2"}}
    )
    run.log_trajectories("before", 0, [episode(1, False, HOSTILE), episode(2, True)])
    for step in (1, 2, 3):
        run.log_metrics(
            step, {"reward": 0.1 * step, "success": 0.1 * step, "staleness_mean": 1.0, "entropy": 0.3}
        )
        run.log_trajectories(
            "train", step, [episode(10 + step, False, end_reason="max_turns", truncated=True)]
        )
    run.log_trajectories("after", 3, [episode(1, True, HOSTILE), episode(2, True)])
    run.write_summary(
        {
            "status": "finished",
            "before": {"success": 0.5, "episodes": 2, "interval": [0.1, 0.9]},
            "after": {"success": 1.0, "episodes": 2, "interval": [0.3, 1.0]},
            "sandbox": "docker",
            "seconds": 61.2,
            "episodes": {"produced": 7, "consumed": 3, "buffered": 2, "discarded": {"stale": 2}},
            "containers_left": 0,
            "args": {"model": "<b>m</b>"},
        }
    )
    yield run
    run.close()


def test_the_page_asks_for_nothing_and_runs_nothing(run):
    page = write_report(run.path).read_text()
    tags = Tags()
    tags.feed(page)
    names = {tag for tag, _ in tags.seen}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "a"}
    assert not [
        name for _, attributes in tags.seen for name in attributes if name.startswith("on") or name == "src"
    ]
    policy = next(a["content"] for t, a in tags.seen if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert "http" not in re.sub(r"http-equiv", "", page)


def test_what_a_model_wrote_is_shown_as_text(run):
    page = write_report(run.path).read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert r"\u{202e}gnp.exe\u{1b}[31m" in page
    assert "&lt;b&gt;m&lt;/b&gt;" in page
    assert "<b>m</b>" not in page


def test_the_page_holds_the_result_the_curves_the_counts_and_the_transcripts(run):
    page = write_report(run.path).read_text()
    for expected in (
        "50.0%",
        "100.0%",
        "+50.0",
        "sandbox: docker",
        "1m01s",
        "7 produced = 3 consumed + 2 buffered + 2 discarded (stale 2)",
        "not solved, max_turns",
        "task-1: not solved before, solved after",
        "Staleness",
        "torch",
    ):
        assert expected in page
    assert page.count('<svg class="chart"') == 5  # success interval, success, reward, staleness, entropy


def test_an_unisolated_run_says_so_first(run):
    page = write_report(run.path).read_text()
    assert "without isolation" not in page
    run.write_summary({"status": "finished", "sandbox": "local-unisolated"})
    page = write_report(run.path).read_text()
    assert page.index("without isolation") < page.index("<h2>")


def test_a_run_that_has_just_begun_has_a_report_too(tmp_path):
    run = RunDirectory.create(tmp_path / "out", {"name": "swe_sao"})
    page = write_report(run.path).read_text()
    assert "status: unfinished" in page
    assert "No training step is finished yet" in page
    run.close()


def test_a_failed_run_names_its_error(run):
    run.write_summary({"status": "failed", "error": "RolloutError: 60% of the episodes failed <here>"})
    assert "60% of the episodes failed &lt;here&gt;" in write_report(run.path).read_text()


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        write_report(tmp_path)


def test_pairs_are_chosen_by_rule_failures_included():
    def line(seed, success):
        return {"seed": seed, "task_id": str(seed), "success": success}

    before = [line(0, True), line(1, False), line(2, False), line(3, True), line(4, False), line(5, True)]
    after = [line(0, True), line(1, False), line(2, True), line(3, False), line(4, True)]
    assert [pair[0]["seed"] for pair in choose_pairs(before, after)] == [2, 1, 0, 3]
    assert [pair[0]["seed"] for pair in choose_pairs(before, after, count=9)] == [2, 1, 0, 3, 4]


def test_a_long_message_keeps_head_and_tail():
    text = cut("a" * 5000 + "b" * 5000, max_chars=100)
    assert text.startswith("a" * 50)
    assert text.endswith("b" * 50)
    assert "9900 characters left out" in text


def test_line_breaks_and_tabs_stay_other_control_characters_are_named():
    assert visible("a\n\tb\r\x00\u200b&") == "a\n\tb\\u{d}\\u{0}\\u{200b}&amp;"


def test_the_success_curve_is_written_as_a_file(run, tmp_path, capsys):
    assert curve([str(run.path), "--svg", str(tmp_path / "images" / "demo.svg")]) == 0
    svg = (tmp_path / "images" / "demo.svg").read_text()
    assert "evaluated before training: 50%" in svg
    assert curve([str(tmp_path / "nothing"), "--svg", str(tmp_path / "x.svg")]) == 2
    assert "no training step" in capsys.readouterr().err
