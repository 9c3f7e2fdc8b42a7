"""The report: self-contained, escaped, complete, and loud where tasks ran unisolated."""

import html
import json
import re
import shlex
import tracemalloc
from html.parser import HTMLParser

import pytest

from agentenv.cli import main
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
        "<td>not solved</td><td>max_turns</td><td>0 (0%)</td><td>3 (100%)</td>",
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
    assert "status: running" in page
    assert "No training step is finished yet" in page
    run.close()
    assert "status: stopped" in write_report(run.path).read_text()


def test_lines_that_are_cut_short_or_broken_cost_nothing_but_themselves(run):
    whole = write_report(run.path).read_text()
    for path in (run.metrics_path, run.trajectories_path):
        with path.open("a") as out:
            out.write('{"step": 4, "phase": "train", "succ')
    assert write_report(run.path).read_text() == whole
    for path in (run.metrics_path, run.trajectories_path):
        with path.open("ab") as out:
            out.write(b'\n[1]\n\xff\n{"step": "x", "phase": 7}\n')
    page = write_report(run.path).read_text()
    assert "3 lines of metrics.jsonl could not be read and were left out" in page
    assert "3 lines of trajectories.jsonl could not be read and were left out" in page
    assert page.count('<svg class="chart"') == whole.count('<svg class="chart"')


def test_a_run_of_another_layout_is_shown_as_far_as_it_is_understood(tmp_path):
    (tmp_path / "run.json").write_text('{"name": "old", "args": {"seed": 1}}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (tmp_path / "trajectories.jsonl").write_text(
        '{"phase": "before", "messages": "none", "end_reason": 3}\n{"phase": "after", "seed": 2, "info": []}\n'
    )
    page = write_report(tmp_path).read_text()
    assert "layout version None, this program writes 1" in page
    assert "old" in page
    assert "1 training steps" not in page and "training steps" in page


def test_an_interrupted_run_tells_how_to_go_on(run):
    run.write_summary({"status": "interrupted"})
    assert "--resume goes on with it" in write_report(run.path).read_text()


def test_failed_episodes_are_listed_by_reason_with_an_example(run):
    broken = {"failure": "reset_timeout", "error": "the container <b>did not</b> start"}
    run.log_trajectories("before", 0, [episode(8, False, info=broken), episode(9, False, info=broken)])
    run.log_metrics(4, {"discarded/step_OSError": 3.0, "discarded/surplus": 5.0})
    page = write_report(run.path).read_text()
    assert (
        "<td>reset_timeout</td><td>2 before</td><td>the container &lt;b&gt;did not&lt;/b&gt; start</td>"
        in page
    )
    assert "<td>step_OSError</td><td>3 of training</td>" in page
    assert "surplus" not in page


def test_an_environment_that_ends_every_episode_in_its_own_way_does_not_make_the_page_long(run):
    ends = [episode(n, False, end_reason=f"<i>{n}</i>" + "x" * 5000) for n in range(60)]
    run.log_trajectories("train", 3, ends)
    page = write_report(run.path).read_text()
    assert "and 23 more" in page  # of these 60 and the fixture's 3 kinds 40 are shown
    assert "<i>" not in page
    assert len(page) < 100_000


def test_what_looks_bad_is_said_and_a_short_run_is_not_judged(run):
    assert "Fewer than 10 steps tell nothing yet" in write_report(run.path).read_text()
    for step in range(4, 20):
        run.log_metrics(step, {"explained_variance": 0.0, "success": 0.2})
    page = write_report(run.path).read_text()
    assert "The critic explains nothing" in page
    assert "docs/reading-a-run.md#critic" in page


def test_a_control_run_says_that_it_is_one(tmp_path):
    run = RunDirectory.create(tmp_path / "out", {"settings": {"control": "shuffled_rewards"}})
    for step in range(1, 20):
        run.log_metrics(step, {"explained_variance": 0.0})
    page = write_report(run.path).read_text()
    run.close()
    assert "control run" in page
    assert "In a control run nothing can be learned" in page


def test_the_command_to_repeat_a_run_can_be_pasted_into_a_shell(tmp_path):
    given = {"seed": 3, "env_kwargs": '{"levels": [1]}', "smoke": True, "layers": ["q", "k"], "resume": True}
    given["hub_token"] = "hf_secret"  # as runs of before wrote it
    run = RunDirectory.create(tmp_path / "out", {"name": "swe_sao", "given": given})
    run.close()
    page = write_report(run.path).read_text()
    assert "hf_secret" not in page
    command = html.unescape(re.search("<pre>(python .*?)</pre>", page)[1])
    assert shlex.split(command) == [
        *("python", "recipes/swe_sao.py", "--seed", "3", "--env_kwargs", '{"levels": [1]}'),
        *("--smoke", "True", "--layers", "q", "k"),
    ]


def test_the_page_of_a_long_run_is_no_longer_than_that_of_a_short_one(tmp_path):
    sizes, peaks = [], []
    for steps in (500, 5000):
        run = RunDirectory.create(tmp_path / str(steps), {"name": "long"})
        line = {"success": 0.5, "reward": 0.5, "staleness/1": 8.0, "policy_grad_norm": 1.0, "entropy": 0.3}
        with run.metrics_path.open("w") as out:
            out.writelines(json.dumps({"step": step, **line}) + "\n" for step in range(1, steps + 1))
        with run.trajectories_path.open("w") as out:
            for number in range(steps):
                text = [{"role": "assistant", "content": f"{number} " + "word " * 200}]
                out.write(
                    json.dumps(
                        {"phase": "train", "step": 1, "success": False, "messages": text, "end_reason": "x"}
                    )
                    + "\n"
                )
        run.close()
        tracemalloc.start()
        sizes.append(write_report(run.path).stat().st_size)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert sizes[1] < sizes[0] * 1.05
    # Ten times the episodes, 5 MB of text, cost what ten times the steps do: 1 kB each, numbers and their names.
    assert peaks[1] < peaks[0] + 4500 * 1000


def test_the_command_writes_the_report_and_prints_its_path(run, capsys):
    assert main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{run.path / 'report.html'}\n"
    assert main(["report", str(run.path / "nowhere")]) == 2
    assert "no such file" in capsys.readouterr().err


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
