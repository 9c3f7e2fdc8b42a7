"""Drawing by matplotlib, which is an extra: nothing here is imported before a plot is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OURS, PAPER = "#0b6bcb", "#c2410c"


def paired_bars(axes: Any, groups: Mapping[str, Mapping[str, Any]], *, y_label: str) -> None:
    """Ours (with its interval) beside the paper's, for each setting.

    Args:
        axes: of matplotlib.
        groups: setting -> ``ours``, an estimate as a dict, and ``paper``, a number or None.
        y_label: what is shown.
    """
    places = range(len(groups))
    ours = [group["ours"] for group in groups.values()]
    means = [estimate["mean"] for estimate in ours]
    half = [0.0 if item["high"] is None else item["high"] - item["mean"] for item in ours]
    axes.bar(
        [place - 0.2 for place in places], means, 0.38, yerr=half, capsize=3, color=OURS, label="agentenv"
    )
    told = [
        (place, group["paper"])
        for place, group in zip(places, groups.values(), strict=True)
        if group["paper"]
    ]
    axes.bar(
        [place + 0.2 for place, _ in told],
        [value for _, value in told],
        0.38,
        color=PAPER,
        label="ROLL Flash",
    )
    axes.set_xticks(list(places), list(groups))
    axes.set_ylabel(y_label)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
