"""What looks bad in the numbers of a run, in plain sentences.

    for finding in diagnose(metrics, settings):
        print(finding.sentence, finding.advice)

Each rule compares the last fifth of the steps (at least five) with a limit or with the first fifth. Where the limits
come from stands in :data:`RULES`. "The recipes' runs" are the 15 learning runs of docs/learning.md (five recipes, three
seeds), "the controls" those with shuffled rewards, in which nothing can be learned.

Invariants:
- A number that the run does not log is no finding; nor is anything in a run of fewer than :data:`LEAST_STEPS` steps.
- A falling or rising number is bad only where success did not rise with it: a policy that solves more with fewer words
  is a better one.
- None of the recipes' runs has a finding (tests/agentenv/report/test_diagnosis.py has their numbers).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEAST_STEPS = 10
"""Fewer tell nothing: the embedded recipes take 60 to 90."""


@dataclass(frozen=True)
class Finding:
    """Something that looks bad."""

    name: str
    """Of its rule; docs/reading-a-run.md has a section of this name."""
    sentence: str
    advice: str


class Numbers:
    """The metrics of a run as rules ask for them; everything is None where it was not logged.

    Args:
        metrics: the lines of metrics.jsonl.
        settings: ``settings`` of run.json.
    """

    def __init__(self, metrics: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self._metrics = metrics
        self._window = max(5, len(metrics) // 5)

    def all(self, name: str) -> list[float]:
        """The finite numbers of a metric."""
        return _finite(self._metrics, name)

    def first(self, name: str) -> float | None:
        """Mean over the first steps that have the metric: a critic's warm-up has none of the policy."""
        found = self.all(name)[: self._window]
        return statistics.fmean(found) if found else None

    def last(self, name: str) -> float | None:
        """Mean over the last steps."""
        found = _finite(self._metrics[-self._window :], name)
        return statistics.fmean(found) if found else None

    def not_finite(self, name: str) -> int:
        """Steps at which the metric had no finite value: it is written as null then."""
        return sum(name in line and line[name] is None for line in self._metrics)

    @property
    def episodes_per_step(self) -> float | None:
        """Mean size of the batch."""
        sizes = [
            sum(sum(_finite([line], name)) for name in line if name.startswith("staleness/"))
            for line in self._metrics
        ]
        sizes = [size for size in sizes if size]
        return statistics.fmean(sizes) if sizes else None

    def success_change(self) -> tuple[float, float] | None:
        """Last success less first, and its standard error from the episodes of both windows."""
        first, last, size = self.first("success"), self.last("success"), self.episodes_per_step
        if first is None or last is None or size is None:
            return None
        episodes = self._window * size
        variance = (first * (1.0 - first) + last * (1.0 - last)) / episodes
        return last - first, math.sqrt(max(variance, 0.0))

    @property
    def success_rose(self) -> bool:
        """By more than twice the standard error of the difference."""
        change = self.success_change()
        return change is not None and change[0] > 2.0 * change[1]


Check = Callable[[Numbers, float], Mapping[str, Any] | None]
"""The numbers of the sentence where the rule's limit is passed, else None."""


@dataclass(frozen=True)
class Rule:
    """One thing that can look bad."""

    name: str
    check: Check
    limit: float
    why: str
    """Where the limit comes from."""
    sentence: str
    advice: str


def diagnose(metrics: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[Finding]:
    """What looks bad, in the order of :data:`RULES`.

    Args:
        metrics: the lines of metrics.jsonl.
        settings: ``settings`` of run.json; empty where they are not known.
    """
    if len(metrics) < LEAST_STEPS:
        return []
    numbers = Numbers(metrics, settings)
    findings = []
    for rule in RULES:
        found = rule.check(numbers, rule.limit)
        if found is not None:
            findings.append(Finding(rule.name, rule.sentence.format(limit=rule.limit, **found), rule.advice))
    return findings


def _finite(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = (line.get(name) for line in lines)
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _below(name: str) -> Check:
    def check(numbers: Numbers, limit: float) -> Mapping[str, Any] | None:
        last = numbers.last(name)
        # Adding zero makes 0.0 of a -0.0 that rounding left.
        return {"last": round(last, 6) + 0.0} if last is not None and last <= limit else None

    return check


def _above(name: str) -> Check:
    def check(numbers: Numbers, limit: float) -> Mapping[str, Any] | None:
        last = numbers.last(name)
        return {"last": last} if last is not None and last >= limit else None

    return check


def _changed(name: str) -> Check:
    """By the factor ``limit`` (a fall where it is below 1), without success having risen."""

    def check(numbers: Numbers, limit: float) -> Mapping[str, Any] | None:
        first, last = numbers.first(name), numbers.last(name)
        if first is None or last is None or first <= 0.0 or numbers.success_rose:
            return None
        passed = last <= first * limit if limit < 1.0 else last >= first * limit
        return {"first": first, "last": last} if passed else None

    return check


def _not_finite(numbers: Numbers, limit: float) -> Mapping[str, Any] | None:
    steps = max(numbers.not_finite(name) for name in ("loss", "policy_grad_norm", "critic_grad_norm"))
    return {"steps": steps} if steps > limit else None


def _success_fell(numbers: Numbers, limit: float) -> Mapping[str, Any] | None:
    change = numbers.success_change()
    if change is None or change[0] >= -limit * change[1] or change[1] == 0.0:
        return None
    return {"first": numbers.first("success"), "last": numbers.last("success")}


def _success_at(value: float) -> Check:
    def check(numbers: Numbers, limit: float) -> Mapping[str, Any] | None:
        last = numbers.last("success")
        return {"last": last} if last is not None and abs(last - value) <= limit else None

    return check


def _masked(objectives: Sequence[str]) -> Check:
    def check(numbers: Numbers, limit: float) -> Mapping[str, Any] | None:
        if numbers.settings.get("objective", "dis") not in objectives:
            return None
        return _above("masked_share")(numbers, limit)

    return check


def _entropy_gone(numbers: Numbers, limit: float) -> Mapping[str, Any] | None:
    first, last = numbers.first("entropy"), numbers.last("entropy")
    if first is None or last is None or last > limit or last > first / 5.0:
        return None
    return {"first": first, "last": last}


def _truncated(numbers: Numbers, limit: float) -> Mapping[str, Any] | None:
    first, last = numbers.first("truncation_rate"), numbers.last("truncation_rate")
    if first is None or last is None or last < limit or last < first + 0.1:
        return None
    return {"first": first, "last": last}


def _spikes(name: str) -> Check:
    def check(numbers: Numbers, limit: float) -> Mapping[str, Any] | None:
        found = [value for value in numbers.all(name) if value > 0.0]
        if not found:
            return None
        usual, largest = statistics.median(found), max(found)
        return {"usual": usual, "largest": largest} if largest >= limit * usual else None

    return check


def _untrained(numbers: Numbers, limit: float) -> Mapping[str, Any] | None:
    last, size = numbers.last("untrained_trajectories"), numbers.episodes_per_step
    if last is None or size is None or last / size < limit:
        return None
    return {"share": last / size}


def _fewer_engines(numbers: Numbers, limit: float) -> Mapping[str, Any] | None:
    found, last = numbers.all("engines_in_service"), numbers.last("engines_in_service")
    if last is None or last > max(found) - limit:
        return None
    return {"last": last, "most": max(found)}


RULES: tuple[Rule, ...] = (
    Rule(
        "not-finite", _not_finite, 0,
        "A loss or a gradient that is no number trains nothing, or destroys the weights.",
        "Loss or gradient was not a finite number at {steps} of the steps.",
        "Lower the learning rate, set max_grad_norm, and look at the episodes of those steps.",
    ),
    Rule(
        "nonfinite-tokens", _above("masked_nonfinite"), 1e-6,
        "A log-prob of a token that was sampled is finite, in engine and trainer; docs/metrics.md.",
        "{last:.2%} of the tokens have a log-prob that is not finite, in the engine or the trainer.",
        "Look whether the engine samples with other settings (top_p, top_k, a penalty) than it reports.",
    ),
    Rule(
        "success-fell", _success_fell, 4.0,
        "Four standard errors: chance makes such a fall once in 30,000 runs. None of the recipes' runs fell.",
        "Training made it worse: success of the batches fell from {first:.0%} to {last:.0%}.",
        "Compare episodes of early and late steps; lower the learning rate, or stop at the best checkpoint.",
    ),
    Rule(
        "nothing-solved", _success_at(0.0), 0.0,
        "Where no episode of the last steps is solved, their rewards tell the policy nothing.",
        "No episode of the last steps was solved.",
        "Start with easier tasks, a better model or a reward that grows with progress.",
    ),
    Rule(
        "all-solved", _success_at(1.0), 0.01,
        "What is left to learn from is a hundredth of the episodes; tasks of use are those solved now and then.",
        "{last:.0%} of the last steps' episodes were solved: there is little left to learn from these tasks.",
        "Take harder tasks.",
    ),
    Rule(
        "critic", _below("explained_variance"), 0.05,
        "0 is what a constant explains. The controls, whose returns nobody can predict, end at 0.01 at most, the "
        "recipes' runs at 0.18 to 0.58.",
        "The critic explains nothing: {last:.1%} of the returns' variance over the last steps.",
        "Pretrain it on more episodes (value_pretrain_episodes), raise critic_learning_rate, or ask whether the "
        "reward can be foreseen at all.",
    ),
    Rule(
        "mask", _masked(("dis",)), 0.01,
        "SAO's mask share stays under 0.006 (arXiv 2607.07508); docs/metrics.md.",
        "The double-sided mask leaves out {last:.1%} of the tokens; in the paper it stays under 0.6%.",
        "Rollouts are too old, or engine and trainer disagree: lower asynchrony, and compare the log-probs of one "
        "version in engine and trainer.",
    ),
    Rule(
        "clip", _masked(("ppo_clip", "decoupled_ppo")), 0.3,
        "Our choice: with a third of the tokens clipped a step is no longer small; a recipe's run begins at 0.05.",
        "The clip stops {last:.0%} of the tokens.",
        "Lower the learning rate or policy_updates, or lower asynchrony.",
    ),
    Rule(
        "zero-variance", _above("zero_variance_share"), 0.8,
        "Our choice: of such groups nothing is learned, so a batch is then a fifth of what it costs.",
        "In {last:.0%} of the groups all rewards are equal: nothing is learned from them.",
        "Tasks are too easy or too hard; filter_zero_variance plays others in their place.",
    ),
    Rule(
        "no-advantage", _below("advantage_std"), 1e-4,
        "Rewards are of the order of 1, and so are advantages; the smallest of the recipes' runs is 0.2.",
        "The advantages are all but zero (standard deviation {last:.1e}): nothing is learned from the batches.",
        "All episodes get the same reward, or the critic foresees it: look at the rewards.",
    ),
    Rule(
        "shorter", _changed("response_tokens"), 0.5,
        "Our choice: half. In a public rebuild of SAO a collapse showed in the length alone; the recipes' runs keep "
        "within 0.85 and 1.2 of their first length.",
        "The answers became shorter, from {first:.0f} to {last:.0f} tokens an episode, and success did not rise.",
        "Read some: a policy that gives up early or answers nothing is found there before the reward shows it.",
    ),
    Rule(
        "longer", _changed("response_tokens"), 2.0,
        "Our choice: twice; see above. A control that came apart went to 2.2.",
        "The answers became longer, from {first:.0f} to {last:.0f} tokens an episode, and success did not rise.",
        "Read some: repetition is the usual cause; a truncated episode should not earn what a finished one does.",
    ),
    Rule(
        "truncated", _truncated, 0.8,
        "Our choice: four of five, and a tenth more than at the start. Two controls end at 0.81 and 0.95.",
        "{last:.0%} of the episodes were cut off by a limit, after {first:.0%} at the start.",
        "The policy no longer ends its episodes: raise max_turns and max_tokens_per_episode, or give truncated "
        "episodes no reward.",
    ),
    Rule(
        "entropy-gone", _entropy_gone, 0.02,
        "Our choice: at 0.02 nats a token, 35 tokens long answers are two in number. The recipes' runs end at 0.08 "
        "and above.",
        "The policy's entropy fell from {first:.2f} to {last:.3f} nats a token: it explores no more.",
        "Stop here if success is what you want; else lower the learning rate or take more tasks.",
    ),
    Rule(
        "entropy-rising", _changed("entropy"), 2.0,
        "Our choice: twice. A control that came apart went to 2.3; in the recipes' runs it falls.",
        "The policy's entropy rose from {first:.2f} to {last:.2f} nats a token, and success did not.",
        "The policy dissolves into noise: lower the learning rate; advantages may be noise, too.",
    ),
    Rule(
        "gradient-spikes", _spikes("policy_grad_norm"), 10.0,
        "Our choice: ten times the median; the largest of the recipes' runs is 3.",
        "The policy's gradient reached a norm of {largest:.3g}, where {usual:.3g} is usual.",
        "Set max_grad_norm, and look at the episodes of that step.",
    ),
    Rule(
        "critic-gradient-spikes", _spikes("critic_grad_norm"), 10.0,
        "Our choice: as for the policy; the largest of the recipes' runs is 5.",
        "The critic's gradient reached a norm of {largest:.3g}, where {usual:.3g} is usual.",
        "Lower critic_learning_rate, and look at the rewards of that step.",
    ),
    Rule(
        "stale", _above("staleness_mean"), 4.0,
        "ROLL Flash (arXiv 2510.11345) finds an asynchrony of 2 to be enough nearly everywhere; twice that.",
        "The episodes of a batch are {last:.1f} weight updates old.",
        "Lower asynchrony; if training then waits, add environments or engines.",
    ),
    Rule(
        "failures", _above("failure_rate"), 0.1,
        "Our choice: a tenth of the work is lost. The recipes' runs have none.",
        "{last:.0%} of the last episodes failed for reasons outside the policy.",
        "The reasons are listed below under episodes: environments, sandboxes or engines are ill.",
    ),
    Rule(
        "engines-away", _fewer_engines, 0.5,
        "Our choice: one server was away for half of the last steps. The recipes' runs have one engine each.",
        "{last:.1f} engines sampled in the last steps, of {most:.0f}.",
        "A server has died or hangs: the log of the run has its address; start it there again while the run goes on.",
    ),
    Rule(
        "untrained", _untrained, 0.2,
        "Our choice: a fifth of what was played and paid for. The recipes' runs have none.",
        "{share:.0%} of the batches' episodes were not trained on: failed, empty, or dropped as truncated.",
        'See the failures below; with truncation="drop" raise the limits of an episode.',
    ),
)  # fmt: skip
"""What can look bad, with the limit, where it comes from, what is said and what to do."""
