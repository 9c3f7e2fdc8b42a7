"""What a run's files cost: records of tokens while it trains, and the report of a long run.

    python benchmarks/run_files.py --json run_files.json --check

- Recording: an SAO trainer on a random Qwen3 of 4 million parameters, with what a recipe records by default. Figures
  are medians over the steps of the process's CPU time, which other work on the machine hardly changes: of the step, and
  of what the recorder does in it (without one, a trainer asks four times a step whether there is one). All tokens of
  a step are recorded; one of more tokens, or of a larger model, pays a smaller share.
- Records: their size, of random tokens, which no text makes smaller, and the time to find one of many episodes.
- Report: of a made run of 100,000 episodes, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentenv.report import RunDirectory
from agentenv.report.bars import Bar, print_bars
from agentenv.report.token_records import EpisodeTokens, SegmentTokens, TokenWriter, read_tokens

DEFAULT_TOKENS = 16_384
"""--token_records of the recipes."""


def recording(steps: int) -> dict[str, float]:
    """CPU seconds of a step and of the recorder in it, and bytes of a record per token."""
    import torch
    from trainer_step import UNEVEN_TOKENS, make_episodes, make_policy, tokenizer
    from transformers import PrinterCallback, TrainerCallback

    from agentenv_trainers import SAOConfig, SAOTrainer
    from agentenv_trainers.testing import ReplayController
    from agentenv_trainers.token_recorder import TokenRecorder

    torch.set_num_threads(1)
    rows = 8
    rng = random.Random(0)
    batches = [
        make_episodes([rng.randint(*UNEVEN_TOKENS) for _ in range(rows)], seed=seed) for seed in range(steps)
    ]
    step_s: list[float] = []
    recorder_s: list[float] = []

    class Timed(TokenRecorder):
        """Adds up what its calls take."""

        def _timed(self, call: Callable[[], None]) -> None:
            began = time.process_time()
            call()
            recorder_s[-1] += time.process_time() - began

        def begin(self, *args: Any) -> None:
            recorder_s.append(0.0)
            self._timed(lambda: super(Timed, self).begin(*args))

        def set_values(self, *args: Any) -> None:
            self._timed(lambda: super(Timed, self).set_values(*args))

        def add(self, *args: Any, **numbers: Any) -> None:
            self._timed(lambda: super(Timed, self).add(*args, **numbers))

        def finish(self, *args: Any) -> None:
            self._timed(lambda: super(Timed, self).finish(*args))

    class Clock(TrainerCallback):
        """CPU time of each step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._began = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step_s.append(time.process_time() - self._began)

    with tempfile.TemporaryDirectory() as folder:
        config = SAOConfig(
            output_dir=f"{folder}/checkpoints",
            per_device_train_batch_size=rows,
            max_steps=steps,
            critic_only_steps=0,
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            report_to=[],
        )
        source = ReplayController(lambda step: batches[step])
        trainer = SAOTrainer(make_policy(), config, source, tokenizer(), callbacks=[Clock()])
        trainer.remove_callback(PrinterCallback)
        run = RunDirectory.create(f"{folder}/run", {})
        trainer.token_recorder = Timed(run.log_tokens, tokenizer(), tokens_per_step=DEFAULT_TOKENS)
        trainer.train()
        run.close()
        size = (run.path / "tokens" / "records.bin").stat().st_size
    episodes = [episode for batch in batches for episode in batch]
    return {
        "step_s": statistics.median(step_s),
        "recorder_s": statistics.median(recorder_s),
        "tokens_per_step": sum(len(t.prompt_ids) + len(t.completion_ids) for t in episodes) / steps,
        "bytes_per_sampled_token": size / sum(t.num_action_tokens for t in episodes),
    }


def finding(episodes: int) -> float:
    """Median seconds to read one of so many recorded episodes."""
    count = 64
    rng = random.Random(0)
    numbers = [rng.random() for _ in range(count)]
    segment = SegmentTokens(
        token_ids=list(range(count)),
        texts=[" word"] * count,
        action_mask=[True] * count,
        policy_versions=[1] * count,
        rollout_logprobs=numbers,
        policy_logprobs=numbers,
        values=numbers,
        advantages=numbers,
        kept=[True] * count,
    )
    with tempfile.TemporaryDirectory() as folder:
        writer = TokenWriter(folder)
        names = [f"g{number}-0" for number in range(episodes)]
        for start in range(0, episodes, 1000):
            writer.append(EpisodeTokens(name, 1, [segment]) for name in names[start : start + 1000])
        seconds = []
        for name in rng.sample(names, 50):
            began = time.perf_counter()
            assert read_tokens(folder, name) is not None
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def report_of_a_long_run(episodes: int, steps: int) -> dict[str, float]:
    """Seconds, peak memory and size of the report; of its file, too."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.create(f"{folder}/run", {"name": "long", "settings": {"objective": "dis"}})
        rng = random.Random(0)
        with run.metrics_path.open("w", encoding="utf-8") as out:
            for step in range(1, steps + 1):
                line = {
                    "step": step,
                    "reward": rng.random(),
                    "success": rng.random(),
                    "entropy": rng.random(),
                }
                line |= {"explained_variance": 0.3, "response_tokens": 80 + rng.random(), "staleness/1": 33.0}
                out.write(json.dumps(line) + "\n")
        with run.trajectories_path.open("w", encoding="utf-8") as out:
            for number in range(episodes):
                phase = "before" if number < 256 else "after" if number >= episodes - 256 else "train"
                seed = number % 256 if phase != "train" else number
                text = " ".join(str(rng.random()) for _ in range(20))
                turns = [{"role": role, "content": text} for role in ("user", "assistant") * 2]
                line = {"phase": phase, "step": 1, "seed": seed, "task_id": str(seed), "turns": 2}
                line |= {"success": rng.random() < 0.5, "end_reason": "terminated", "action_tokens": 80}
                out.write(json.dumps({**line, "info": {}, "messages": turns}) + "\n")
        run.close()
        bytes_read = run.trajectories_path.stat().st_size
        program = "import sys; from agentenv.report import write_report; write_report(sys.argv[1])"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program, str(run.path)], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "file_mb": bytes_read / 1e6,
            "seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "peak_mb": after.ru_maxrss * 1024 / 1e6,
            "page_kb": (run.path / "report.html").stat().st_size / 1e3,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--steps", type=int, default=5, help="of the recorded training")
    parser.add_argument("--recorded", type=int, default=20_000, help="episodes among which one is found")
    parser.add_argument("--episodes", type=int, default=100_000, help="of the long run")
    args = parser.parse_args(argv)
    # First: the memory of a child process counts what its parent had when it was forked.
    long = report_of_a_long_run(args.episodes, steps=max(10, args.episodes // 33))
    found_s = finding(args.recorded)
    cost = recording(args.steps)
    sys.stdout.write(
        f"a step of {cost['tokens_per_step']:.0f} tokens: {cost['step_s']:.2f} s of one CPU, of which recording takes "
        f"{1000 * cost['recorder_s']:.1f} ms\n"
        f"a run of {args.episodes:,} episodes: {long['file_mb']:.0f} MB of trajectories\n"
    )
    bars = [
        Bar(
            "recording a step, share of its time",
            100 * cost["recorder_s"] / cost["step_s"],
            "<=",
            5,
            "%",
        ),
        Bar("records, per sampled token", cost["bytes_per_sampled_token"], "<=", 40, "bytes"),
        Bar(f"finding one of {args.recorded:,} recorded episodes", 1000 * found_s, "<=", 50, "ms"),
        Bar("report of the long run, CPU time", long["seconds"], "<=", 30, "s"),
        Bar("report of the long run, peak memory", long["peak_mb"], "<=", 200, "MB"),
        Bar("report of the long run, page", long["page_kb"], "<=", 1000, "kB"),
    ]
    if args.json is not None:
        figures = {
            "recording": cost,
            "finding_s": found_s,
            "report": long,
            "bars": [bar.as_dict() for bar in bars],
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if print_bars(bars) or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
