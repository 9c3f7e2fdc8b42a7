"""report.html: one run for a person to judge, in one file.

Invariants:
- Self-contained: no script, no font, no request; a content security policy in the page forbids them, so that
  text which a model wrote can't bring its own.
- Made from the run directory alone, at any moment: of an unfinished run it shows what is known.
- Where tasks ran without isolation, or the run did not end well, the page says so first; then what looks bad.
- Its size is bounded: curves are thinned out, tables and texts are cut, and say so.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from agentenv.report.charts import CHART_STYLE, PALETTE, Interval, interval_chart
from agentenv.report.diagnosis import LEAST_STEPS, RULES, diagnose
from agentenv.report.progress import format_seconds
from agentenv.report.run_data import RunData, read_run
from agentenv.report.run_directory import PHASES, write_text
from agentenv.report.training_curves import render_curves
from agentenv.report.transcripts import cut, render_pair, visible, word

UNISOLATED_WARNING = (
    "local-unisolated: the commands that the policy wrote ran on this machine without isolation. "
    "Such a run is for trying things out; its numbers are no benchmark."
)

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MOST_ROWS = 40
_MOST_CHARS = 600
"""Of a setting, a reason or an error."""


def write_report(run: str | Path) -> Path:
    """Write report.html of a run directory from what is there.

    Args:
        run: path of the directory.

    Returns:
        The path of the report.

    Raises:
        UsageError: the directory holds no run, or its run.json or summary.json is broken.
    """
    report = Path(run) / "report.html"
    write_text(report, render(read_run(run)))
    return report


def render(run: RunData) -> str:
    """The page as text."""
    name = str(run.record.get("name", "run"))
    body = [
        _head(name, run),
        _tiles(run),
        _diagnoses(run),
        _success(run),
        _curves(run),
        _episodes(run),
        _failures(run),
        _transcripts(run),
        _configuration(run.record),
        _repeat(run.record),
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


_STATES = {
    "interrupted": "The run was interrupted; --resume goes on with it.",
    "running": "The run is going on: this is what was known when the page was made.",
    "stopped": "The run ended without a word (killed, or the machine went down); --resume goes on with it.",
}


def _head(name: str, run: RunData) -> str:
    record, summary = run.record, run.summary
    sandbox = summary.get("sandbox", record.get("sandbox"))
    badges = [f"status: {run.status}"]
    if sandbox:
        badges.append(f"sandbox: {sandbox}")
    if _is_control(record):
        badges.append("control run: its rewards are shuffled")
    text = "".join(f'<span class="badge">{visible(badge)}</span>' for badge in badges)
    warnings = [UNISOLATED_WARNING] if sandbox == "local-unisolated" else []
    if summary.get("error"):
        warnings.append(f"The run failed: {_short(summary['error'])}")
    elif run.status in _STATES:
        warnings.append(_STATES[run.status])
    return "".join(
        [
            f"<h1>{visible(name)}</h1>",
            f'<p class="soft">started {visible(str(record.get("started", "at an unknown time")))}</p>{text}',
            *(f'<div class="warning">{visible(warning)}</div>' for warning in [*warnings, *run.notes]),
        ]
    )


def _tiles(run: RunData) -> str:
    summary = run.summary
    tiles: list[tuple[str, str]] = []
    before, after = run.result("before"), run.result("after")
    if before:
        tiles.append((_percent(before["success"]), "success before training"))
    if after:
        tiles.append((_percent(after["success"]), "success after training"))
    if before and after:
        tiles.append((f"{(after['success'] - before['success']) * 100:+.1f}", "gain in percentage points"))
    if run.metrics:
        tiles.append((f"{run.metrics[-1]['step']}", "training steps"))
    episodes = summary.get("episodes") or {}
    if "consumed" in episodes:
        tiles.append((f"{episodes['consumed']:,}", "episodes trained on"))
    seconds = summary.get("seconds") or (run.metrics[-1].get("seconds") if run.metrics else None)
    if seconds is not None:
        tiles.append((format_seconds(seconds), "in all" if summary else "so far"))
    if summary.get("containers_left") is not None:
        tiles.append((f"{summary['containers_left']}", "containers left behind"))
    shown = "".join(
        f'<div class="tile"><b>{visible(value)}</b><span>{escape(text)}</span></div>' for value, text in tiles
    )
    return f'<div class="tiles">{shown}</div>' if tiles else ""


def _diagnoses(run: RunData) -> str:
    if not run.metrics:
        return ""
    title = "<h2>What looks bad</h2>"
    if len(run.metrics) < LEAST_STEPS:
        return f'{title}<p class="soft">Fewer than {LEAST_STEPS} steps tell nothing yet.</p>'
    findings = diagnose(run.metrics, run.record.get("settings") or {})
    if not findings:
        return (
            f'{title}<p class="soft">Nothing, by the {len(RULES)} rules of docs/reading-a-run.md. '
            "Whether the run learned is what the intervals below say.</p>"
        )
    control = (
        '<p class="soft">In a control run nothing can be learned: what stands here is what that looks like.</p>'
        if _is_control(run.record)
        else ""
    )
    rows = "".join(
        f"<li><b>{visible(item.sentence)}</b> {visible(item.advice)} "
        f'<span class="soft">docs/reading-a-run.md#{escape(item.name)}</span></li>'
        for item in findings
    )
    return f'{title}{control}<ul class="findings">{rows}</ul>'


def _success(run: RunData) -> str:
    rows = []
    sizes = []
    for phase in ("before", "after"):
        result = run.result(phase)
        if result:
            low, high = result.get("interval") or (result["success"], result["success"])
            rows.append(Interval(phase, result["success"], low, high))
            sizes.append(f"{result.get('episodes', '?')} episodes {phase}")
    if not rows:
        return ""
    chart = interval_chart(rows, label="success before and after training")
    return (
        "<h2>Success before and after</h2>"
        f'<figure class="wide"><figcaption><span>{visible(str(run.record.get("eval_tasks", "")))} '
        f"Sampled at temperature 1; {escape(', '.join(sizes))}. Bars: 95% Wilson intervals.</span></figcaption>"
        f"{chart}</figure>{_families(run)}"
    )


def _families(run: RunData) -> str:
    shares = {phase: (run.result(phase) or {}).get("families") or {} for phase in ("before", "after")}
    names = sorted({name for found in shares.values() for name in found})
    if len(names) < 2:
        return ""
    rows = [
        [name, *(_percent(found[name]) if name in found else "" for found in shares.values())]
        for name in names
    ]
    return f"<details><summary>By family of tasks</summary>{_rows(['family', *shares], rows)}</details>"


def _curves(run: RunData) -> str:
    charts = render_curves(run.metrics)
    if not charts:
        return '<h2>Training</h2><p class="soft">No training step is finished yet.</p>'
    return (
        '<h2>Training</h2><p class="soft">Faint: each step. Bold: mean over the steps around it. '
        f'The batch\'s episodes are training tasks.</p><div class="charts">{charts}</div>'
    )


def _episodes(run: RunData) -> str:
    phases = [phase for phase in PHASES if run.ends.get(phase)]
    parts = ["<h2>Episodes</h2>"]
    if phases:
        totals = {phase: sum(run.ends[phase].values()) for phase in phases}
        all_ends = sum((run.ends[phase] for phase in phases), Counter[tuple[str, str]]())
        order = {"solved": 0, "not solved": 1, "failed": 2}
        ends = sorted(all_ends, key=lambda end: (order[end[0]], -all_ends[end], end[1]))
        rows = [
            [kind, reason, *(_share(run.ends[phase][kind, reason], totals[phase]) for phase in phases)]
            for kind, reason in ends
        ]
        parts.append(_rows(["outcome", "ended by", *phases], rows))
        parts.append('<p class="soft">Of training those that trajectories.jsonl keeps.</p>')
    ledger = run.summary.get("episodes")
    if ledger:
        discarded = ledger.get("discarded") or {}
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(discarded.items())) or "none"
        parts.append(
            f"<p>Training rollouts: {ledger.get('produced', 0)} produced = "
            f"{ledger.get('consumed', 0)} consumed + {ledger.get('buffered', 0)} buffered + "
            f"{sum(discarded.values())} discarded ({visible(_short(reasons))}).</p>"
        )
    return "".join(parts) if len(parts) > 1 else ""


def _failures(run: RunData) -> str:
    """Failed evaluation episodes, and those of training, which are discarded and only counted."""
    rows = [
        [reason, ", ".join(f"{number} {phase}" for phase, number in failure.phases.items()), failure.example]
        for reason, failure in sorted(run.failures.items(), key=lambda item: -sum(item[1].phases.values()))
    ]
    last = run.metrics[-1] if run.metrics else {}
    for name, number in last.items():
        reason = name.removeprefix("discarded/")
        if reason != name and reason not in _NO_FAILURES and number:
            rows.append([reason, f"{number:g} of training", ""])
    if not rows:
        return ""
    return (
        "<h2>Failures</h2><p>Episodes that ended for reasons outside the policy; nothing is learned from them, and "
        f"no success is counted.</p>{_rows(['reason', 'episodes', 'such as'], rows)}"
    )


_NO_FAILURES = {"surplus", "stale", "filtered", "stopped"}
"""Reasons for which a sound episode is discarded; see docs/metrics.md."""


def _transcripts(run: RunData) -> str:
    if not run.pairs:
        shown = "".join(render_pair(item, None) for item in run.lone)
        return f"<h2>Transcripts</h2>{shown}" if shown else ""
    parts = [
        "<h2>Transcripts</h2>",
        '<p class="soft">The same task before and after training. Chosen by rule: one that training '
        "mended, one that failed both times, one solved both times, one that training broke; "
        "as far as there are such. <code>agentenv view</code> shows all of them.</p>",
    ]
    for index, (before, after) in enumerate(run.pairs):
        task = _short(before.get("task_id") or f"seed {before.get('seed')}")
        parts.append(
            f"<details{' open' if index == 0 else ''}><summary>{visible(task)}: {word(before)} before, "
            f"{word(after)} after</summary>{render_pair(before, after)}</details>"
        )
    return "".join(parts)


def _configuration(record: Mapping[str, Any]) -> str:
    parts = ["<h2>Configuration</h2>"]
    parts.append(_table("Set by the recipe or on the command line", record.get("args") or {}, open_=True))
    if record.get("settings"):
        parts.append(_table("All settings", record["settings"]))
    parts.append(_table("Versions", record.get("versions") or {}))
    return "".join(parts)


def repeat_command(record: Mapping[str, Any]) -> str | None:
    """What repeats a run, for a shell; None where its run.json does not tell.

    Args:
        record: run.json.
    """
    given = record.get("given")
    if not isinstance(given, Mapping):
        return None
    words = ["python", str(record.get("program") or f"recipes/{record.get('name', 'run')}.py")]
    for option, value in given.items():
        if value is not None and option != "resume" and not option.endswith("_token"):
            words += [f"--{option}", *_option(value)]
    return shlex.join(words)


def _repeat(record: Mapping[str, Any]) -> str:
    command = repeat_command(record)
    if command is None:
        return ""
    return (
        "<h2>The same again</h2><p>With the versions above, in a new output directory:</p>"
        f"<pre>{visible(command)}</pre>"
    )


def _option(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    return [json.dumps(value) if isinstance(value, Mapping) else str(value)]


def _is_control(record: Mapping[str, Any]) -> bool:
    return (record.get("settings") or record.get("args") or {}).get("control") == "shuffled_rewards"


def _table(title: str, values: Mapping[str, Any], *, open_: bool = False) -> str:
    rows = "".join(
        f'<tr><td>{visible(str(name))}</td><td class="mono">{visible(_short(value))}</td></tr>'
        for name, value in values.items()
    )
    return (
        f"<details{' open' if open_ else ''}><summary>{escape(title)}</summary>"
        f'<div class="scroll"><table>{rows}</table></div></details>'
    )


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; of very many rows the first."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{visible(_short(cell))}</td>' for cell in row)}</tr>"
        for row in rows[:_MOST_ROWS]
    )
    left = len(rows) - _MOST_ROWS
    more = f'<p class="soft">and {left} more</p>' if left > 0 else ""
    return f'<div class="scroll"><table><tr>{titles}</tr>{body}</table></div>{more}'


def _share(number: int, total: int) -> str:
    return f"{number:,} ({number / total:.0%})"


def _percent(share: float) -> str:
    return f"{share * 100:.1f}%"


def _short(value: Any) -> str:
    return cut(str(value), max_chars=_MOST_CHARS)
