"""report.html: one run for a person to judge, in one file.

Invariants:
- Self-contained: no script, no font, no request; a content security policy in the page forbids them, so that
  text which a model wrote can't bring its own.
- Made from the run directory alone, at any moment: of an unfinished run it shows what is known.
- Where tasks ran without isolation the page says so first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from agentenv.report.charts import CHART_STYLE, PALETTE, Interval, Series, interval_chart, line_chart
from agentenv.report.progress import format_seconds
from agentenv.report.run_directory import PHASES, read_json, read_lines, write_text
from agentenv.report.transcripts import choose_pairs, render_pair, visible

UNISOLATED_WARNING = (
    "local-unisolated: the commands that the policy wrote ran on this machine without isolation. "
    "Such a run is for trying things out; its numbers are no benchmark."
)

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


class _Chart:
    """A curve of the report: the metrics it draws and what to say beside it."""

    def __init__(
        self,
        title: str,
        names: Mapping[str, str],
        text: str,
        *,
        y_range: tuple[float | None, float | None] = (None, None),
        percent: bool = False,
    ) -> None:
        self.title, self.names, self.text = title, names, text
        self.y_range, self.percent = y_range, percent

    def svg(self, metrics: Sequence[Mapping[str, Any]]) -> str:
        """The curves alone; empty where no line of metrics has a value for them."""
        series = []
        for name, label in self.names.items():
            lines = [line for line in metrics if name in line]
            if lines:
                series.append(Series(label, [line["step"] for line in lines], [line[name] for line in lines]))
        if not series:
            return ""
        return line_chart(series, y_range=self.y_range, percent=self.percent, label=self.title)

    def render(self, metrics: Sequence[Mapping[str, Any]]) -> str:
        """The curves with their caption."""
        svg = self.svg(metrics)
        caption = f"<b>{escape(self.title)}</b><span>{escape(self.text)}</span>"
        return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>" if svg else ""


CHARTS = (
    _Chart("Success", {"success": "success"}, "Share of the batch's episodes that solved their task.",
           y_range=(0.0, None), percent=True),
    _Chart("Reward", {"reward": "reward"}, "Mean reward of the batch."),
    _Chart("Explained variance", {"explained_variance": "explained variance"},
           "How much of the returns' variance the critic predicts; 0 or below: the critic knows nothing.",
           y_range=(None, 1.0)),
    _Chart("Masked share", {"masked_low": "ratio too low", "masked_high": "ratio too high"},
           "Tokens left out by the double-sided mask; a steep rise means the rollouts are too old.",
           y_range=(0.0, None), percent=True),
    _Chart("Staleness", {"staleness_mean": "mean", "staleness_max": "max"},
           "Weight updates between an episode's start and its use; bounded by the asynchrony setting.",
           y_range=(0.0, None)),
    _Chart("Response length", {"response_tokens": "tokens"},
           "Tokens the policy wrote per episode; a collapse often shows here first.", y_range=(0.0, None)),
    _Chart("Entropy", {"entropy": "entropy"}, "Of the policy, nats per token; near 0 it explores no more.",
           y_range=(0.0, None)),
    _Chart("Speed", {"episodes_per_s": "episodes/s"}, "Finished episodes per second.", y_range=(0.0, None)),
)  # fmt: skip


def write_report(run: str | Path) -> Path:
    """Write report.html of a run directory from what is there.

    Args:
        run: path of the directory.

    Returns:
        The path of the report.

    Raises:
        UsageError: the directory holds no run, or a file of it is broken.
    """
    path = Path(run)
    record = read_json(path / "run.json")
    summary = read_json(path / "summary.json") if (path / "summary.json").exists() else {}
    metrics = list(read_lines(path / "metrics.jsonl"))
    counts: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
    episodes: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    for line in read_lines(path / "trajectories.jsonl"):
        phase = line["phase"]
        counts[phase][_outcome(line)] += 1
        if phase in episodes:
            episodes[phase].append(line)
    report = path / "report.html"
    write_text(report, render(record, summary, metrics, counts, episodes))
    return report


def render(
    record: Mapping[str, Any],
    summary: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    counts: Mapping[str, Mapping[str, int]],
    episodes: Mapping[str, Sequence[Mapping[str, Any]]],
) -> str:
    """The page as text.

    Args:
        record: run.json.
        summary: summary.json; empty while the run is not finished.
        metrics: the lines of metrics.jsonl.
        counts: episodes per phase and outcome.
        episodes: lines of trajectories.jsonl of the phases before and after.
    """
    name = str(record.get("name", "run"))
    body = [
        _head(name, record, summary),
        _tiles(record, summary, metrics),
        _success(record, summary),
        _curves(metrics),
        _counts(summary, counts),
        _transcripts(episodes),
        _configuration(record),
    ]
    page_style = resources.files("agentenv.report").joinpath("style.css").read_text("utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{visible(name)} · agentenv</title><style>{PALETTE}{CHART_STYLE}{page_style}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _head(name: str, record: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    sandbox = summary.get("sandbox", record.get("sandbox"))
    status = str(summary.get("status", "unfinished"))
    badges = [f"status: {status}"]
    if sandbox:
        badges.append(f"sandbox: {sandbox}")
    text = "".join(f'<span class="badge">{visible(badge)}</span>' for badge in badges)
    parts = [
        f"<h1>{visible(name)}</h1>",
        f'<p class="soft">started {visible(str(record.get("started", "at an unknown time")))}</p>{text}',
    ]
    if sandbox == "local-unisolated":
        parts.append(f'<div class="warning">{escape(UNISOLATED_WARNING)}</div>')
    if summary.get("error"):
        parts.append(f'<div class="warning">The run failed: {visible(str(summary["error"]))}</div>')
    elif status == "interrupted":
        parts.append('<div class="warning">The run was interrupted; --resume goes on with it.</div>')
    return "".join(parts)


def _tiles(
    record: Mapping[str, Any], summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]
) -> str:
    tiles: list[tuple[str, str]] = []
    before, after = _result(record, summary, "before"), _result(record, summary, "after")
    if before:
        tiles.append((_percent(before["success"]), "success before training"))
    if after:
        tiles.append((_percent(after["success"]), "success after training"))
    if before and after:
        tiles.append((f"{(after['success'] - before['success']) * 100:+.1f}", "gain in percentage points"))
    if metrics:
        tiles.append((f"{metrics[-1]['step']}", "training steps"))
    episodes = summary.get("episodes") or {}
    if "consumed" in episodes:
        tiles.append((f"{episodes['consumed']:,}", "episodes trained on"))
    if summary.get("seconds") is not None:
        tiles.append((format_seconds(summary["seconds"]), "in all"))
    if summary.get("containers_left") is not None:
        tiles.append((f"{summary['containers_left']}", "containers left behind"))
    shown = "".join(
        f'<div class="tile"><b>{visible(value)}</b><span>{escape(text)}</span></div>' for value, text in tiles
    )
    return f'<div class="tiles">{shown}</div>' if tiles else ""


def _success(record: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    rows = []
    sizes = []
    for phase in ("before", "after"):
        result = _result(record, summary, phase)
        if result:
            low, high = result.get("interval") or (result["success"], result["success"])
            rows.append(Interval(phase, result["success"], low, high))
            sizes.append(f"{result['episodes']} episodes {phase}")
    if not rows:
        return ""
    chart = interval_chart(rows, label="success before and after training")
    return (
        "<h2>Success before and after</h2>"
        f'<figure class="wide"><figcaption><span>{visible(str(record.get("eval_tasks", "")))} '
        f"Sampled at temperature 1; {escape(', '.join(sizes))}. Bars: 95% Wilson intervals.</span></figcaption>"
        f"{chart}</figure>"
    )


def _curves(metrics: Sequence[Mapping[str, Any]]) -> str:
    charts = "".join(chart.render(metrics) for chart in CHARTS)
    if not charts:
        return '<h2>Training</h2><p class="soft">No training step is finished yet.</p>'
    return (
        '<h2>Training</h2><p class="soft">Faint: each step. Bold: mean over the steps around it. '
        f'The batch\'s episodes are training tasks.</p><div class="charts">{charts}</div>'
    )


def _counts(summary: Mapping[str, Any], counts: Mapping[str, Mapping[str, int]]) -> str:
    phases = [phase for phase in PHASES if counts.get(phase)]
    parts = ["<h2>Episodes</h2>"]
    if phases:
        names = sorted({name for phase in phases for name in counts[phase]})
        head = "".join(f'<th class="number">{phase}</th>' for phase in phases)
        rows = "".join(
            f"<tr><td>{visible(name)}</td>{''.join(_share(counts[phase], name) for phase in phases)}</tr>"
            for name in names
        )
        parts.append(f'<div class="scroll"><table><tr><th>outcome</th>{head}</tr>{rows}</table></div>')
    ledger = summary.get("episodes")
    if ledger:
        discarded = ledger.get("discarded") or {}
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(discarded.items())) or "none"
        parts.append(
            f"<p>Training rollouts: {ledger.get('produced', 0)} produced = "
            f"{ledger.get('consumed', 0)} consumed + {ledger.get('buffered', 0)} buffered + "
            f"{sum(discarded.values())} discarded ({visible(reasons)}).</p>"
        )
    return "".join(parts) if len(parts) > 1 else ""


def _share(counts: Mapping[str, int], name: str) -> str:
    number, total = counts.get(name, 0), sum(counts.values())
    return f'<td class="number">{number} <span class="soft">({number / total:.0%})</span></td>'


def _transcripts(episodes: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    pairs = choose_pairs(episodes.get("before", ()), episodes.get("after", ()))
    if not pairs:
        lone = list(episodes.get("before", ()))[:2]
        shown = "".join(render_pair(item, None) for item in lone)
        return f"<h2>Transcripts</h2>{shown}" if shown else ""
    parts = [
        "<h2>Transcripts</h2>",
        '<p class="soft">The same task before and after training. Chosen by rule: one that training '
        "mended, one that failed both times, one solved both times, one that training broke; "
        "as far as there are such.</p>",
    ]
    for index, (before, after) in enumerate(pairs):
        task = str(before.get("task_id") or f"seed {before['seed']}")
        parts.append(
            f"<details{' open' if index == 0 else ''}><summary>{visible(task)}: {_word(before)} before, "
            f"{_word(after)} after</summary>{render_pair(before, after)}</details>"
        )
    return "".join(parts)


def _configuration(record: Mapping[str, Any]) -> str:
    parts = ["<h2>Configuration</h2>"]
    parts.append(_table("Set by the recipe or on the command line", record.get("args") or {}, open_=True))
    if record.get("settings"):
        parts.append(_table("All settings", record["settings"]))
    parts.append(_table("Versions", record.get("versions") or {}))
    return "".join(parts)


def _table(title: str, values: Mapping[str, Any], *, open_: bool = False) -> str:
    rows = "".join(
        f'<tr><td>{visible(str(name))}</td><td class="mono">{visible(str(value))}</td></tr>'
        for name, value in values.items()
    )
    return (
        f"<details{' open' if open_ else ''}><summary>{escape(title)}</summary>"
        f'<div class="scroll"><table>{rows}</table></div></details>'
    )


def _result(record: Mapping[str, Any], summary: Mapping[str, Any], phase: str) -> Mapping[str, Any] | None:
    result = summary.get(phase) or record.get(phase)
    return result if isinstance(result, Mapping) and result.get("success") is not None else None


def _outcome(line: Mapping[str, Any]) -> str:
    if "failure" in (line.get("info") or {}):
        return f"failed: {line.get('end_reason') or 'unknown'}"
    return f"{_word(line)}, {line.get('end_reason') or 'ended'}"


def _word(episode: Mapping[str, Any]) -> str:
    return "solved" if episode["success"] else "not solved"


def _percent(share: float) -> str:
    return f"{share * 100:.1f}%"
