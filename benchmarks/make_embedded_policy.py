"""Make the policies that the recipes start from, and that ship in the package.

    python benchmarks/make_embedded_policy.py swe --output_dir envs/agentenv_envs/swe/policy
    python benchmarks/make_embedded_policy.py math --output_dir envs/agentenv_envs/math_reasoning/policy
    python benchmarks/make_embedded_policy.py alfworld --output_dir envs/agentenv_envs/alfworld/policy
    python benchmarks/make_embedded_policy.py shop --output_dir envs/agentenv_envs/shop/policy

A small Qwen3 with a tokenizer trained on the environment's own texts learns from scripted demonstrations on training
tasks. First it learns to read: the demonstrators' mistakes are shown but not imitated. Then it imitates a mediocre
demonstrator in everything, so that the right action keeps a real probability and reinforcement learning has something
to raise. Everything is drawn from --seed. A line every hundred steps says how it goes; after each phase comes what it
does on held-out tasks, and what that was is kept in made.json. It takes five minutes or so. Each environment's own
part is in embedded_ENV.py.
"""

import argparse
import importlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from warm_start import Course, Phase, build_model, train

COURSES = ("swe", "math", "alfworld", "shop")


def parse(argv: Sequence[str] | None) -> tuple[Course, argparse.Namespace]:
    """The environment's course, and the options over its defaults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("env", choices=COURSES, help="whose policy")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--vocab_size", type=int, help="this and the following: the environment's own by default"
    )
    parser.add_argument("--hidden_size", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--reading_steps", type=int)
    parser.add_argument("--mediocre_steps", type=int)
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--learning_rate", type=float, help="of AdamW, in the first phase")
    parser.add_argument("--muon_learning_rate", type=float, help="in the first phase")
    parser.add_argument("--evaluation_tasks", type=int)
    args = parser.parse_args(argv)
    course: Course = importlib.import_module(f"embedded_{args.env}").COURSE
    for name, value in course.defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return course, args


def main(argv: Sequence[str] | None = None) -> None:
    """Build, train in two phases, evaluate, save."""
    course, args = parse(argv)
    started = time.monotonic()
    torch.manual_seed(args.seed)
    tokenizer = course.build_tokenizer(args.seed, args.vocab_size)
    model = build_model(tokenizer, args.hidden_size, args.layers)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(tokenizer)} tokens")
    phases: dict[Phase, tuple[int, float]] = {
        "reading": (args.reading_steps, 1.0),
        "mediocre": (args.mediocre_steps, 0.25),
    }
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for phase, (steps, scale) in phases.items():
        train(
            model,
            course.lessons(tokenizer, phase, seed=args.seed),
            steps=steps,
            batch_size=args.batch_size,
            lr=scale * args.learning_rate,
            muon_lr=scale * args.muon_learning_rate,
        )
        results[phase] = course.evaluate(model, tokenizer, args)
        print(f"held-out tasks after {phase}: {json.dumps(results[phase])}", flush=True)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    made = {
        "arguments": {k: v for k, v in vars(args).items() if k != "output_dir"},
        "parameters": parameters,
        "seconds": round(time.monotonic() - started),
        course.results: results,
    }
    (args.output_dir / "made.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
