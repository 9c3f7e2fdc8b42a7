"""Does SAO make the embedded policy better at repairing code? Seeds, a control, baselines, intervals.

    python benchmarks/learning_swe.py --seeds 3 --control --json learning_swe.json

Runs `recipes/swe_sao.py` with its defaults once per seed, and with --control once more per seed with the rewards of
each batch shuffled among its episodes: nothing can be learned from those, so what still moves is drift. Then, on the
same held-out tasks: the greedy policy before and after, how often the first edit is right, held-out families, and a
scripted agent that guesses and tests without reading the issue. Finished runs in --work_dir are not run again.
"""

import argparse
import json
import logging
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentenv_envs.swe
from agentenv.evaluation import wilson_interval
from agentenv.inference import LLMProxy
from agentenv.inference.transformers_engine import TransformersEngine
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.trajectory import Trajectory
from agentenv_envs.swe import SWEEnv
from agentenv_envs.swe.embedded.demonstrations import GUESS_AND_TEST, demonstrate, first_edit
from agentenv_envs.swe.embedded.tasks import generate_task
from agentenv_envs.swe.protocols import as_action
from agentenv_envs.swe.sandbox import open_backend
from agentenv_trainers.recipe.experiment import EVALUATION_SEED

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "swe_sao.py"
POLICY = Path(agentenv_envs.swe.__file__).parent / "policy"
NUM_ENVS = 12
BARS = {"gain": 0.30, "control": 0.07, "containers_left": 0}
"""Least mean gain in held-out success, greatest drift of the control's mean, containers left over."""


def train(seed: int, control: bool, work_dir: Path, extra: Sequence[str]) -> dict[str, Any]:
    """The summary of a run of the recipe, from its directory if it has finished already."""
    run = work_dir / f"{'control' if control else 'sao'}-{seed}"
    summary = run / "summary.json"
    if not summary.exists() or json.loads(summary.read_text()).get("status") != "finished":
        command = [sys.executable, str(RECIPE), "--seed", str(seed), "--output_dir", str(run), *extra]
        command += ["--control", "shuffled_rewards"] if control else []
        command += ["--resume", "true"] if (run / "run.json").exists() else []
        subprocess.run(command, check=True)
    return {**json.loads(summary.read_text()), "model": run / "model"}


def play(model: Path, split: str, episodes: int, *, greedy: bool, sandbox: str) -> dict[str, Any]:
    """A policy on held-out tasks."""
    engine = TransformersEngine(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        AutoTokenizer.from_pretrained(model),
        max_batch=NUM_ENVS,
        max_length=640,
    )
    settings = RolloutConfig(
        num_envs=NUM_ENVS, max_turns=12, max_tokens_per_turn=48, max_tokens_per_episode=640, batch_size=32
    )
    controller = AsyncController(
        lambda: SWEEnv(split=split, sandbox=sandbox),
        LLMProxy([engine]),
        AutoTokenizer.from_pretrained(model),
        settings,
    )
    with controller:
        seeds = range(EVALUATION_SEED, EVALUATION_SEED + episodes)
        played = controller.evaluate(None, seeds, greedy=greedy)
    return summarise(played, split)


def summarise(played: Sequence[Trajectory], split: str) -> dict[str, Any]:
    """Success, its 95 % Wilson interval, and the share of episodes whose first edit is a right one."""
    valid = [episode for episode in played if not episode.failed]
    solved = sum(episode.success for episode in valid)
    return {
        "success": solved / len(valid),
        "interval": wilson_interval(solved, len(valid)),
        "episodes": len(valid),
        "first_guess": sum(first_guess_is_right(episode, split) for episode in valid) / len(valid),
    }


def first_guess_is_right(episode: Trajectory, split: str) -> bool:
    """Whether the first command that edits is one of the task's right edits."""
    task = generate_task(episode.seed, split=split)
    said = [message["content"] for message in episode.messages if message["role"] == "assistant"]
    edits = [text for text in said if "sed" in text]
    return bool(edits) and edits[0] in {as_action(first_edit(edit)) for edit in task.gold_edits}


def chance_of_a_first_guess(split: str, episodes: int) -> float:
    """How often a blind choice among the edits of a module's sites is right."""
    tasks = [generate_task(EVALUATION_SEED + i, split=split) for i in range(episodes)]
    return statistics.mean(len(task.gold_edits) / len(task.candidate_edits) for task in tasks)


def guess_and_test(episodes: int, sandbox: str) -> dict[str, Any]:
    """The scripted baseline: tries edits without reading, runs the tests after each, at most four of them."""

    def one(number: int) -> bool:
        seed = EVALUATION_SEED + number
        agent = demonstrate(generate_task(seed, split="heldout"), GUESS_AND_TEST, random.Random(seed))
        env = SWEEnv(split="heldout", sandbox=sandbox)
        try:
            env.reset(seed=seed)
            action, ended, info = next(agent), False, dict[str, Any]()
            while True:
                observation, _, ended, _, info = env.step(action)
                if ended:
                    return bool(info["success"])
                action = agent.send(observation)
        finally:
            env.close()

    # One more handle keeps the sandboxes warm between episodes.
    backend = open_backend(sandbox)
    try:
        with ThreadPoolExecutor(NUM_ENVS // 2) as pool:
            solved = sum(pool.map(one, range(episodes)))
    finally:
        backend.close()
    return {"success": solved / episodes, "interval": wilson_interval(solved, episodes), "episodes": episodes}


def mean_interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean over seeds with a 95 % t-interval; no interval for a single seed."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return {"mean": mean, "interval": None, "values": list(values)}
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "interval": [mean - half, mean + half], "values": list(values)}


def compare(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Held-out success (temperature 1) before and after, and the difference, over seeds."""
    before = [run["before"]["success"] for run in runs]
    after = [run["after"]["success"] for run in runs]
    return {
        "before": mean_interval(before),
        "after": mean_interval(after),
        "gain": mean_interval([b - a for a, b in zip(before, after, strict=True)]),
        "episodes_each": runs[0]["before"]["episodes"],
        "seconds": [run["seconds"] for run in runs],
        "sandbox": sorted({run["sandbox"] for run in runs}),
        "containers_left": sum(run["containers_left"] or 0 for run in runs),
    }


def main() -> int:
    """Run what is missing, write the figures, print them against their bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--control", action="store_true", help="one run more per seed with shuffled rewards")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--work_dir", type=Path, default=Path("runs/learning_swe"))
    parser.add_argument(
        "--episodes", type=int, default=256, help="held-out episodes of each further evaluation"
    )
    parser.add_argument("--sandbox", default="docker", choices=("docker", "local-unisolated"))
    parser.add_argument("recipe_options", nargs="*", help="after --: further options of the recipe")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    extra = ["--sandbox", args.sandbox, *args.recipe_options]
    seeds = range(args.seeds)
    runs = [train(seed, False, args.work_dir, extra) for seed in seeds]
    results: dict[str, Any] = {
        "assumed": {"recipe_options": extra, "num_envs": NUM_ENVS},
        "sao": compare(runs),
    }
    if args.control:
        controls = [train(seed, True, args.work_dir, extra) for seed in seeds]
        results["control"] = compare(controls)
    policies = {"before": [POLICY], "after": [run["model"] for run in runs]}
    for when, models in policies.items():
        for name, split, greedy in (
            ("sampled", "heldout", False),
            ("greedy", "heldout", True),
            ("heldout_families", "heldout_families", False),
        ):
            played = [play(m, split, args.episodes, greedy=greedy, sandbox=args.sandbox) for m in models]
            results[f"{name}_{when}"] = {
                "success": mean_interval([result["success"] for result in played]),
                "first_guess": mean_interval([result["first_guess"] for result in played]),
            }
    results["guess_and_test"] = guess_and_test(args.episodes, args.sandbox)
    results["first_guess_by_chance"] = chance_of_a_first_guess("heldout", args.episodes)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    return report(results, args.check)


def report(results: dict[str, Any], check: bool) -> int:
    """Print each figure, with its bar where it has one; 1 where `check` and a bar is missed."""
    sao = results["sao"]
    lines = [("gain in held-out success", sao["gain"]["mean"], f">= {BARS['gain']}")]
    held = sao["gain"]["mean"] >= BARS["gain"]
    lines += [(f"gain, seed {i}", gain, f">= {BARS['gain']}") for i, gain in enumerate(sao["gain"]["values"])]
    held &= min(sao["gain"]["values"]) >= BARS["gain"]
    if "control" in results:
        drift = results["control"]["gain"]["mean"]
        lines.append(("change with shuffled rewards", drift, f"within {BARS['control']}"))
        held &= abs(drift) <= BARS["control"]
    left = sao["containers_left"]
    lines.append(("containers left", float(left), f"== {BARS['containers_left']}"))
    held &= left == BARS["containers_left"]
    for name in ("sampled", "greedy", "heldout_families"):
        for when in ("before", "after"):
            result = results[f"{name}_{when}"]
            lines.append((f"{name}, {when}: success", result["success"]["mean"], ""))
            lines.append((f"{name}, {when}: first guess right", result["first_guess"]["mean"], ""))
    lines.append(("first guess right by chance", results["first_guess_by_chance"], ""))
    lines.append(("guess-and-test baseline: success", results["guess_and_test"]["success"], ""))
    for name, value, bar in lines:
        print(f"{name:45} {value:7.3f}  {bar}")
    print("every bar held" if held else "a bar was missed")
    return 1 if check and not held else 0


if __name__ == "__main__":
    sys.exit(main())
