"""The report of an evaluation, as JSON and as text.

Invariants:

* Rates and means are over the episodes that count; those that infrastructure ended are counted apart, by reason.
* The same records give the same report, but for the key "timing".
* What is not known is null and never 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from agentenv.evaluation.rates import wilson_interval
from agentenv.evaluation.records import EpisodeRecord

__all__ = ["CONFIDENCE", "make_report", "report_text"]

CONFIDENCE: Final = 0.95


def make_report(
    records: Iterable[EpisodeRecord], settings: Mapping[str, Any], extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the records say.

    Args:
        records: of the episodes, in any order.
        settings: copied into the report.
        extra: more to say, such as fields that a server did not know.

    Returns:
        JSON-able: success, interval, episodes, steps, invalid_action_share, tokens, families and more.
    """
    ordered = sorted(records, key=lambda record: record.index)
    families: dict[str, list[EpisodeRecord]] = {}
    for record in ordered:
        families.setdefault(record.family, []).append(record)
    failed = [record for record in ordered if record.failed]
    valid = [record for record in ordered if not record.failed]
    names = sorted({name for record in valid for name in record.metrics})
    report = {
        **_numbers(ordered),
        "confidence": CONFIDENCE,
        "failed": len(failed),
        "failures": dict(sorted(Counter(record.end_reason for record in failed).items())),
        "ends": dict(sorted(Counter(record.end_reason for record in valid).items())),
        "tokens": {
            "prompt": _mean(valid, lambda record: record.prompt_tokens),
            "completion": _mean(valid, lambda record: record.completion_tokens),
        },
        "metrics": {name: _mean(valid, lambda record, name=name: record.metrics.get(name)) for name in names},
        # Those of failed episodes are not known: a reset that failed told none.
        "families": {
            name: _numbers(families[name])
            for name in sorted(families)
            if any(not record.failed for record in families[name])
        },
        "settings": dict(settings),
        **(extra or {}),
    }
    seconds = [record.seconds for record in valid]
    report["timing"] = {"seconds_per_episode": math.fsum(seconds) / len(seconds) if seconds else None}
    return report


def _numbers(records: Sequence[EpisodeRecord]) -> dict[str, Any]:
    valid = [record for record in records if not record.failed]
    successes = sum(record.success for record in valid)
    counted = [record for record in valid if record.invalid_actions is not None]
    actions = sum(record.steps for record in counted)
    invalid = sum(record.invalid_actions or 0 for record in counted)
    return {
        "success": successes / len(valid) if valid else None,
        "interval": list(wilson_interval(successes, len(valid), confidence=CONFIDENCE)),
        "episodes": len(valid),
        "successes": successes,
        "reward": _mean(valid, lambda record: record.reward),
        "steps": _mean(valid, lambda record: record.steps),
        "invalid_action_share": invalid / actions if actions else None,
    }


def _mean(records: Sequence[EpisodeRecord], value: Callable[..., float | None]) -> float | None:
    """Over the records that have the value; None where none has."""
    values = [number for record in records if (number := value(record)) is not None]
    return math.fsum(values) / len(values) if values else None


def report_text(report: Mapping[str, Any]) -> str:
    """The report for a person: a line of the whole, then a table by family."""
    lines = [
        f"success  {_rate(report)}",
        f"episodes {report['episodes']}" + _failures(report),
        f"steps    {_number(report['steps'], '.1f')}",
        f"invalid actions {_number(report['invalid_action_share'], '.1%')}",
        f"tokens of an episode: {_number(report['tokens']['completion'], '.0f')} written, "
        f"{_number(report['tokens']['prompt'], '.0f')} read",
    ]
    families = report["families"]
    if len(families) > 1:
        width = max(len(name) for name in families)
        lines += ["", f"{'family':<{width}}  success"]
        lines += [f"{name:<{width}}  {_rate(numbers)}" for name, numbers in families.items()]
    return "\n".join(lines)


def _rate(numbers: Mapping[str, Any]) -> str:
    low, high = numbers["interval"]
    return (
        f"{_number(numbers['success'], '.3f')} [{low:.3f}, {high:.3f}] "
        f"({numbers['successes']}/{numbers['episodes']})"
    )


def _failures(report: Mapping[str, Any]) -> str:
    if not report["failed"]:
        return ""
    reasons = ", ".join(f"{times} {reason}" for reason, times in report["failures"].items())
    return f", and {report['failed']} that infrastructure ended: {reasons}"


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)
