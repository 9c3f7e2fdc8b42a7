"""The model card of a run: README.md and curve.svg in its folder model/, as the Hugging Face hub shows them.

Invariants:
- Made from the run directory alone; what the run does not tell is left out.
- That a run was a control or a smoke run, ended early, or ran commands without isolation stands before its numbers.
- Text of the run (names of tasks' families, of models) is shown, not interpreted as Markdown or HTML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError
from agentenv.report.curve import success_curve
from agentenv.report.page import UNISOLATED_WARNING, repeat_command
from agentenv.report.progress import format_seconds
from agentenv.report.run_data import RunData, read_run
from agentenv.report.text_files import write_text
from agentenv.report.transcripts import revealed

__all__ = ["model_card", "write_model_card"]

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|<>~&-])")
_MOST_FAMILIES = 20
_MOST_CHARS = 200
_ALGORITHMS = {
    "SAO": "[SAO](https://arxiv.org/abs/2607.07508)",
    "GRPO": "[GRPO](https://arxiv.org/abs/2402.03300)",
}


def write_model_card(run: str | Path, *, name: str | None = None) -> Path:
    """Write README.md and curve.svg of a run's folder model/.

    Args:
        run: path of a run directory.
        name: that the model can be loaded by; None: where it lies is not said.

    Returns:
        The folder.

    Raises:
        UsageError: there is no run, or it has saved no model.
    """
    folder = Path(run) / "model"
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder}: no model there; a run saves it when training has ended")
    curve = None
    with suppress(UsageError):  # a run without a step has none
        curve = success_curve(run)
    if curve is not None:
        write_text(folder / "curve.svg", curve)
    write_text(folder / "README.md", model_card(read_run(run), name=name, has_curve=curve is not None))
    return folder


def model_card(run: RunData, *, name: str | None, has_curve: bool) -> str:
    """The card as text; see :func:`write_model_card`."""
    record = run.record
    settings: Mapping[str, Any] = record.get("settings") or record.get("args") or {}
    algorithm = str(record.get("algorithm") or "reinforcement learning")
    environment = str(record.get("env") or record.get("name") or "an environment")
    lines = [*_front_matter(settings, algorithm, environment)]
    lines += ["", f"# {_shown(environment)} by {_shown(algorithm)}", ""]
    lines += [f"> **{warning}**\n" for warning in _warnings(run, settings)]
    base = str(settings.get("model") or "embedded")
    started = "a small policy that ships with agentenv" if base == "embedded" else _shown(base)
    lines += [
        f"A language-model agent, trained from {started} by {_ALGORITHMS.get(algorithm, _shown(algorithm))} "
        f"in the environment {_shown(environment)} with agentenv.",
        "",
    ]
    if has_curve:
        lines += ["![Success by training step](curve.svg)", ""]
    lines += ["## Evaluation", "", *_evaluation(run), ""]
    lines += ["## Training", "", *_training(run, settings, algorithm), ""]
    lines += ["## Use", "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [f"name = {json.dumps(name or 'PATH')}", "model = AutoModelForCausalLM.from_pretrained(name)"]
    lines += ["tokenizer = AutoTokenizer.from_pretrained(name)", "```", ""]
    return "\n".join(lines)


def _front_matter(settings: Mapping[str, Any], algorithm: str, environment: str) -> Iterator[str]:
    """What the hub files the model under; strings as JSON, which YAML reads."""
    yield "---"
    yield "library_name: transformers"
    yield "pipeline_tag: text-generation"
    base = settings.get("model")
    if isinstance(base, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists():
        yield f"base_model: {json.dumps(base)}"
    yield f"tags: {json.dumps(['agentenv', 'reinforcement-learning', algorithm.lower(), environment])}"
    yield "---"


def _warnings(run: RunData, settings: Mapping[str, Any]) -> Iterator[str]:
    if settings.get("control") == "shuffled_rewards":
        yield "A control: its rewards were shuffled, and it can have learned nothing."
    if settings.get("smoke"):
        yield "Of a smoke run: a try of the way at a tiny size; its numbers mean nothing."
    if run.status != "finished":
        yield f"The run is not complete: {_shown(run.status)}."
    if _sandbox(run) == "local-unisolated":
        yield UNISOLATED_WARNING


def _evaluation(run: RunData) -> Iterator[str]:
    before, after = run.result("before"), run.result("after")
    found = [(phase, result) for phase, result in (("before", before), ("after", after)) if result]
    if not found:
        yield "The run was not evaluated."
        return
    yield _shown(str(run.record.get("eval_tasks") or "Tasks from seeds that training never uses."))
    yield ""
    yield "| training | success | 95 % interval | episodes | mean reward |"
    yield "|---|---|---|---|---|"
    for phase, result in found:
        low, high = result.get("interval") or (None, None)
        interval = "" if low is None else f"{low:.3f} to {high:.3f}"
        reward = result.get("reward")
        mean = "" if reward is None else f"{reward:.3f}"
        yield f"| {phase} | {result['success']:.3f} | {interval} | {result.get('episodes', '')} | {mean} |"
    yield ""
    yield "Sampled at temperature 1; episodes that infrastructure ended are not counted."
    families = dict((after or before or {}).get("families") or {})
    if len(families) > 1:
        yield ""
        yield f"| family of tasks | success {'after' if after else 'before'} training |"
        yield "|---|---|"
        for name, rate in sorted(families.items())[:_MOST_FAMILIES]:
            yield f"| {_shown(str(name))} | {rate:.3f} |"
        if len(families) > _MOST_FAMILIES:
            yield f"| {len(families) - _MOST_FAMILIES} more | |"


def _training(run: RunData, settings: Mapping[str, Any], algorithm: str) -> Iterator[str]:
    facts: dict[str, Any] = {
        "algorithm": algorithm,
        "environment": run.record.get("env"),
        "its arguments": settings.get("env_kwargs"),
        "sandbox of the agent's commands": _sandbox(run) or "none: the environment runs no commands",
        "steps": run.summary.get("steps"),
        "episodes": (run.summary.get("episodes") or {}).get("consumed"),
        "learning rate": settings.get("learning_rate"),
        "seed": settings.get("seed"),
    }
    seconds = run.summary.get("seconds")
    facts["time"] = None if seconds is None else format_seconds(seconds)
    facts |= {f"version of {name}": version for name, version in (run.record.get("versions") or {}).items()}
    yield "| | |"
    yield "|---|---|"
    for name, value in facts.items():
        if value is not None:
            yield f"| {_shown(name)} | {_shown(str(value))} |"
    command = repeat_command(run.record)
    if command is not None:
        yield ""
        yield "The same again:"
        yield ""
        # Indented, so that nothing in it can end the block.
        yield from (f"    {line}" for line in revealed(command).splitlines())


def _sandbox(run: RunData) -> str | None:
    found = run.summary.get("sandbox") or run.record.get("sandbox")
    return str(found) if found else None


def _shown(text: str) -> str:
    """Text as Markdown that shows it."""
    line = " ".join(revealed(text).split())
    return _SPECIAL.sub(r"\\\1", line[:_MOST_CHARS] + ("..." if len(line) > _MOST_CHARS else ""))
