"""What runs tell their trace: real ones in which episodes fail, and simulated ones whose times are known."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from agentenv.timeline import RecordedTrace, shares, window_of


def _overlaps(trace: RecordedTrace) -> list[str]:
    """Spans that cross another one of their track."""
    found = []
    for group, tracks in trace.spans.items():
        for name, spans in tracks.items():
            open_ends: list[float] = []
            for span in spans:
                while open_ends and open_ends[-1] <= span.start_s + 1e-9:
                    open_ends.pop()
                if open_ends and span.end_s > open_ends[-1] + 1e-9:
                    found.append(f"{group}/{name}: {span} crosses the end {open_ends[-1]}")
                open_ends.append(span.end_s)
    return found


def _reasons(trace: RecordedTrace, *kinds: str) -> Counter[str]:
    return Counter(str(instant.arguments["reason"]) for instant in trace.instants if instant.name in kinds)


@pytest.mark.parametrize("mode", ["async", "batch"])
def test_spans_of_a_real_run_nest_and_each_failure_is_told_once(real_run: Any, mode: str) -> None:
    trace, counts = real_run(mode=mode)
    assert _overlaps(trace) == []
    of_training = [item for item in trace.instants if not item.arguments["episode"].startswith("eval")]
    told = Counter(str(item.arguments["reason"]) for item in of_training)
    assert told == counts["discarded"]
    failed = Counter(str(i.arguments["reason"]) for i in of_training if i.name == "failed")
    assert {"reset_OSError", "step_LookupError"} <= failed.keys()
    episodes = [item.arguments["episode"] for item in trace.instants]
    assert len(episodes) == len(set(episodes))
    # Of the evaluation's seeds 1, 2 and 5 the last fails.
    assert [item.arguments["reason"] for item in trace.instants if item not in of_training] == [
        "step_LookupError"
    ]


def test_every_episode_has_a_span_in_its_slot_with_its_stages_inside(real_run: Any) -> None:
    trace, counts = real_run()
    spans = [span for track in trace.spans["environments"].values() for span in track]
    episodes = [span for span in spans if span.name == "episode"]
    assert len(episodes) == len({span.arguments["episode"] for span in episodes}) == counts["produced"]
    names = Counter(span.name for span in spans)
    # Each episode is reset; seeds of 7 fail there, and all others sample a turn before each step.
    assert names["reset"] == names["episode"]
    assert names["generate"] >= names["step"] > names["episode"]
    for name, track in trace.spans["environments"].items():
        whole = [span for span in track if span.name == "episode"]
        for span in track:
            assert any(one.start_s <= span.start_s and span.end_s <= one.end_s for one in whole), (name, span)
    rewards = [span for track in trace.spans["rewards"].values() for span in track]
    assert len(rewards) >= counts["consumed"]
    assert trace.is_whole


def test_every_event_keeps_the_published_rules_of_the_trace_event_format(real_run: Any) -> None:
    trace, _ = real_run()
    named: set[int] = set()
    for event in json.loads(trace.path.read_text()):
        kind = event["ph"]
        assert isinstance(event["pid"], int) and isinstance(event["name"], str)
        if kind == "M":
            assert event["name"] in (
                "process_name",
                "process_labels",
                "process_sort_index",
                "thread_name",
                "thread_sort_index",
            )
            named.add(event["tid"] if event["name"] == "thread_name" else event["pid"])
            continue
        assert event["ts"] >= 0
        if kind == "X":
            assert event["dur"] >= 0 and event["tid"] in named
        elif kind == "i":
            assert event["s"] in ("g", "p", "t")
        else:
            assert kind == "C" and all(isinstance(value, int | float) for value in event["args"].values())
        assert event["pid"] in named


def test_a_simulated_run_is_told_in_its_own_time(simulated_run: Any) -> None:
    trace, outcome = simulated_run(mode="sync")
    assert _overlaps(trace) == []
    window = window_of(trace)
    found = shares(trace, window)
    assert window.steps == (1, 4)
    assert window.seconds == pytest.approx(outcome.total_s, abs=1e-4)
    trainer, environments = found.states["trainer"], found.states["environments"]
    assert trainer["waiting"] * window.seconds == pytest.approx(sum(outcome.wait_s), abs=1e-4)
    assert trainer["policy update"] * window.seconds == pytest.approx(4 * 30.0, abs=1e-4)
    slots_s = window.seconds * found.tracks["environments"]
    episodes = [episode for batch in outcome.batches for episode in batch]
    acted_s = sum(episode.info["latency_s"] for episode in episodes)
    assert environments["step"] * slots_s == pytest.approx(acted_s, abs=1e-3)
    assert environments["generate"] * slots_s == pytest.approx(
        sum(episode.duration_s for episode in episodes) - acted_s, abs=1e-3
    )
    assert found.weight_syncs == 4
    staleness = [value.values["max"] for value in trace.counters if value.name == "staleness"]
    assert staleness == [0.0] * 4


def test_asynchrony_shows_as_less_waiting_and_as_staleness(simulated_run: Any) -> None:
    sync, _ = simulated_run(mode="sync")
    ahead, _ = simulated_run(asynchrony=1.0)
    waiting = [shares(trace, window_of(trace)).states["trainer"]["waiting"] for trace in (sync, ahead)]
    assert waiting[1] < waiting[0] - 0.1
    assert max(value.values["max"] for value in ahead.counters if value.name == "staleness") == 1.0


def test_cancelled_redundant_environments_are_told_where_they_were_cancelled(simulated_run: Any) -> None:
    trace, outcome = simulated_run(redundant_groups=4, asynchrony=0.0)
    assert _overlaps(trace) == []
    assert outcome.counts["discarded"]["surplus"] > 0
    assert _reasons(trace, "cancelled", "discarded") == outcome.counts["discarded"]


def test_stale_episodes_are_told_once_whether_they_ran_or_had_ended(simulated_run: Any) -> None:
    trace, outcome = simulated_run(asynchrony=1.0, on_stale="abort", num_envs=8)
    assert outcome.counts["discarded"]["stale"] > 0
    assert _reasons(trace, "cancelled", "discarded") == outcome.counts["discarded"]


def test_the_counters_are_those_of_the_buffer(simulated_run: Any) -> None:
    trace, _ = simulated_run(mode="sync")
    values = [value.values for value in trace.counters if value.name == "environments"]
    assert max(value["running"] for value in values) == 8.0
    assert max(value["buffered"] for value in values) <= 8.0
    assert values[-1]["running"] == 0.0


def test_an_engines_work_ends_with_the_weights_that_did_it(simulated_run: Any) -> None:
    trace, _ = simulated_run(asynchrony=1.0)
    syncs = {round(span.start_s, 6) for span in trace.spans["trainer"]["weight syncs"]}
    for spans in trace.spans["engines"].values():
        assert [span.arguments["version"] for span in spans] == sorted(
            span.arguments["version"] for span in spans
        )
        for span in spans:
            assert not any(span.start_s < moment < span.end_s for moment in syncs)
