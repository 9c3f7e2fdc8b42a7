"""What looks bad is said, each thing by its own rule; a run that learns is left in peace."""

import json
import re
from pathlib import Path

import pytest

from agentenv.report.diagnosis import LEAST_STEPS, RULES, diagnose

RUNS = json.loads(Path(__file__).with_name("learning_runs.json").read_text())
"""Numbers of runs of docs/learning.md, rounded to three digits, one value where it never changed; last-named are
controls, whose rewards were shuffled."""
HEALTHY = {
    "loss": -0.01,
    "success": 0.4,
    "staleness/1": 32.0,
    "staleness_mean": 1.0,
    "masked_share": 0.001,
    "masked_nonfinite": 0.0,
    "explained_variance": 0.4,
    "entropy": 0.4,
    "response_tokens": 80.0,
    "truncation_rate": 0.3,
    "zero_variance_share": 0.2,
    "policy_grad_norm": 0.2,
    "critic_grad_norm": 1.5,
    "advantage_std": 0.3,
    "failure_rate": 0.0,
    "engines_in_service": 2.0,
    "untrained_trajectories": 0.0,
}


def lines_of(name: str) -> list[dict]:
    """Lines of metrics.jsonl of one of the runs."""
    run = RUNS[name]
    columns = {
        metric: values if isinstance(values, list) else [values] * run["steps"]
        for metric, values in run["metrics"].items()
    }
    return [
        {"step": step + 1, **{metric: values[step] for metric, values in columns.items()}}
        for step in range(run["steps"])
    ]


def found(metrics: list[dict], **settings: str) -> list[str]:
    return [finding.name for finding in diagnose(metrics, settings)]


def made(steps: int = 50, **changes: object) -> list[dict]:
    """A healthy run in which some metrics go evenly from one value to another, or have a value at each step."""
    lines = []
    for index in range(steps):
        line: dict = {"step": index + 1, **HEALTHY}
        for name, change in changes.items():
            name = name.replace("__", "/")
            if isinstance(change, tuple):
                start, end = change
                line[name] = start + (end - start) * index / (steps - 1)
            else:
                line[name] = change(index) if callable(change) else change
        lines.append(line)
    return lines


@pytest.mark.parametrize("name", [name for name in RUNS if "control" not in name])
def test_nothing_looks_bad_in_a_run_that_learned(name):
    assert found(lines_of(name), objective=RUNS[name]["objective"]) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("alfworld_grpo-control-0", ["success-fell", "truncated", "entropy-rising"]),
        ("alfworld_sao-control-0", ["success-fell", "critic", "longer", "truncated"]),
        ("math_tir_sao-control-2", ["critic"]),
    ],
)
def test_what_went_wrong_in_a_run_with_shuffled_rewards_is_said(name, expected):
    assert found(lines_of(name), objective=RUNS[name]["objective"]) == expected


def test_the_healthy_numbers_of_these_tests_are_healthy():
    assert found(made()) == []


CASES = {
    "not-finite": {"policy_grad_norm": lambda step: None if step == 7 else 0.2},
    "nonfinite-tokens": {"masked_nonfinite": (0.0, 0.001)},
    "success-fell": {"success": (0.6, 0.3)},
    "nothing-solved": {"success": 0.0},
    "all-solved": {"success": lambda step: 0.6 if step < 30 else 1.0},
    "critic": {"explained_variance": (0.3, -0.1)},
    "mask": {"masked_share": (0.0, 0.03)},
    "zero-variance": {"zero_variance_share": (0.1, 1.0)},
    "no-advantage": {"advantage_std": lambda step: 0.3 if step < 30 else 1e-6},
    "shorter": {"response_tokens": (80.0, 5.0)},
    "longer": {"response_tokens": (80.0, 300.0)},
    "truncated": {"truncation_rate": (0.3, 0.95)},
    "entropy-gone": {"entropy": (0.5, -0.04)},
    "entropy-rising": {"entropy": (0.4, 1.6)},
    "gradient-spikes": {"policy_grad_norm": lambda step: 9.0 if step == 20 else 0.2},
    "critic-gradient-spikes": {"critic_grad_norm": lambda step: 99.0 if step == 20 else 1.5},
    "stale": {"staleness_mean": (1.0, 7.0)},
    "failures": {"failure_rate": (0.0, 0.4)},
    "engines-away": {"engines_in_service": lambda step: 2.0 if step < 45 else 1.0},
    "untrained": {"untrained_trajectories": (0.0, 16.0)},
}


@pytest.mark.parametrize(("name", "changes"), CASES.items())
def test_each_thing_is_found_alone(name, changes):
    assert found(made(**changes)) == [name]


def test_the_clip_of_the_other_objectives_may_stop_more_tokens_than_the_mask():
    assert found(made(masked_share=0.1), objective="ppo_clip") == []
    assert found(made(masked_share=0.5), objective="ppo_clip") == ["clip"]
    assert found(made(masked_share=0.5), objective="topr") == []


def test_a_server_that_came_back_is_not_missed():
    assert found(made(engines_in_service=lambda step: 1.0 if 10 < step < 40 else 2.0)) == []


def test_every_rule_has_a_case():
    assert {*CASES, "clip"} == {rule.name for rule in RULES}


def test_a_policy_that_solves_more_may_write_less_and_be_surer():
    better = {"success": (0.3, 0.8)}
    assert found(made(response_tokens=(80.0, 20.0), **better)) == []
    assert found(made(response_tokens=(80.0, 300.0), entropy=(0.3, 1.2), **better)) == []


def test_a_fall_of_success_that_chance_explains_is_none():
    # 4 episodes a step, 40 in each window: 0.5 and 0.35 differ by 1.4 standard errors.
    assert found(made(success=(0.52, 0.33), staleness__1=4.0)) == []
    assert found(made(success=(0.52, 0.33), staleness__1=400.0)) == ["success-fell"]


def test_a_short_run_and_numbers_that_were_not_logged_are_not_judged():
    assert found(made(LEAST_STEPS - 1, success=0.0)) == []
    assert found(made(LEAST_STEPS, success=0.0)) == ["nothing-solved"]
    assert found([{"step": step} for step in range(50)]) == []
    assert found([{"step": step, "success": None, "staleness/0": "?"} for step in range(50)]) == []


def test_a_finding_has_numbers_and_advice():
    (finding,) = diagnose(made(response_tokens=(80.0, 5.0)), {})
    assert finding.sentence == (
        "The answers became shorter, from 73 to 12 tokens an episode, and success did not rise."
    )
    assert finding.advice.startswith("Read some")


def test_the_guide_has_a_section_for_every_rule_with_its_limit():
    guide = (Path(__file__).parents[3] / "docs" / "reading-a-run.md").read_text()
    assert re.findall(r"^### ([a-z-]+)$", guide, re.MULTILINE) == [rule.name for rule in RULES]
