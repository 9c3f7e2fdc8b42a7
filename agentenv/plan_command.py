"""`agentenv plan`: memory by model size, and how to share out a machine's GPUs, with the commands.

Invariants:

* Loads no model and no torch.
* What it prints is what docs/deployment.md shows (tested).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agentenv.errors import UsageError
from agentenv.planning import (
    MODELS,
    Redundancy,
    Split,
    StepTimes,
    Workload,
    best_split,
    least_redundancy,
    read_shape,
    ready_share,
)
from agentenv.planning.split import GIB

__all__ = ["add_parser", "run"]

_ALPHAS = (0.0, 1.0, 2.0, 4.0, 8.0)
_NEAR = 1.05
"""A step of at most so many times the shortest is near enough: each version of staleness costs something, too."""


def add_parser(subparsers: Any) -> None:
    """Add `plan`.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "plan",
        description="Without --gpus: memory by model size. With it: how to share out a machine's GPUs. Estimates, "
        "not measurements: docs/deployment.md.",
    )
    parser.add_argument(
        "--model",
        help=f"a model's folder, or a size: {', '.join(MODELS)} (default: all sizes; with --gpus 7B)",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="of the machine, or of each")
    parser.add_argument(
        "--machines",
        type=int,
        default=1,
        metavar="N",
        help="of several, each trains or samples as a whole (default: %(default)s)",
    )
    parser.add_argument(
        "--gpu-gib", type=float, default=80.0, metavar="GIB", help="of each (default: %(default)g)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the policy's weights, and so of the engine's (default: %(default)s)",
    )
    parser.add_argument(
        "--context", type=int, default=16_384, help="tokens of an episode (default: %(default)s)"
    )
    parser.add_argument("--num-envs", type=int, default=32, help="episodes in flight (default: %(default)s)")
    parser.add_argument("--reference", action="store_true", help="with a reference policy (beta above 0)")
    parser.add_argument("--lora", action="store_true", help="adapters of policy and critic alone are trained")
    parser.add_argument("--rollout-s", type=float, help="an episode's GPU-seconds in the engines, measured")
    parser.add_argument("--train-s", type=float, help="an episode's GPU-seconds in the trainer, measured")
    parser.add_argument("--longest-s", type=float, default=0.0, help="the longest episode, in seconds")
    parser.add_argument("--batch", type=int, default=32, help="episodes of a step (default: %(default)s)")
    parser.add_argument(
        "--asynchrony", type=float, default=1.0, help="alpha of the run (default: %(default)g)"
    )
    parser.add_argument("--group-size", type=int, default=1, help="episodes of a task (default: %(default)s)")
    parser.add_argument(
        "--slow-share",
        type=float,
        metavar="P",
        help="share of the episodes that take far longer: print the redundancy that a batch needs",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a table or a plan.

    Raises:
        UsageError: bad input, or nothing fits.
    """
    times = _times(args)
    names = [args.model] if args.model else ["7B"] if args.gpus is not None else list(MODELS)
    works = {
        name: Workload(read_shape(name), args.dtype, args.context, args.num_envs, args.reference, args.lora)
        for name in names
    }
    result: dict[str, Any] = {"assumed": _assumed(args), "models": [_row(*item) for item in works.items()]}
    lines = [*result["assumed"], "", *_table(result["models"])]
    redundancy = _redundancy(args)
    if args.gpus is not None:
        ((_, work),) = works.items()
        split = best_split(work, args.gpus, args.gpu_gib, times, machines=args.machines)
        commands = _commands(work, split) if args.machines == 1 else _commands_of_machines(work, split, args)
        result |= {"split": dataclasses.asdict(split), "commands": commands}
        gpus = args.gpus * args.machines
        lines += ["", *_split_lines(work, split, gpus, args.gpu_gib), "", *commands]
        if times is not None:
            result["asynchrony"] = by_alpha = _by_alpha(work, args, times)
            lines += ["", *_alpha_lines(by_alpha)]
    if redundancy is not None:
        result["redundancy"] = dataclasses.asdict(redundancy)
        lines += ["", *_redundancy_lines(args, redundancy)]
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--json {args.json}: {error.strerror}") from None
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    return 0


def _times(args: argparse.Namespace) -> StepTimes | None:
    given = [name for name in ("rollout_s", "train_s") if getattr(args, name) is not None]
    if not given:
        return None
    if args.gpus is None:
        raise UsageError("--rollout-s and --train-s are for a split: --gpus is needed")
    if len(given) == 1:
        raise UsageError("--rollout-s and --train-s are needed together")
    return StepTimes(args.rollout_s, args.train_s, args.batch, args.longest_s, args.asynchrony)


def _assumed(args: argparse.Namespace) -> list[str]:
    trained = "adapters alone" if args.lora else "all weights"
    return [
        f"GiB; {trained} trained, policy and engine in {args.dtype}, critic in float32, {args.num_envs} episodes of "
        f"{args.context:,} tokens in flight"
    ]


def _row(name: str, work: Workload) -> dict[str, Any]:
    memory = work.memory
    parts = {field.name: getattr(memory, field.name) / GIB for field in dataclasses.fields(memory)}
    everything = sum(parts.values())
    return {"model": name, "parameters": work.shape.parameters, **parts, "sum": everything}


def _table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """In the form of Markdown."""
    titles = {
        "policy": "policy, gradients, Adam",
        "critic": "critic, gradients, Adam",
        "reference": "reference",
        "activations": "activations",
        "engine": "engine's weights",
        "kv": "keys and values",
        "sum": "sum",
    }
    lines = [f"| model | {' | '.join(titles.values())} |", "|---" * (len(titles) + 1) + "|"]
    lines += [
        f"| {Path(row['model']).name} | {' | '.join(_gib(row[name]) for name in titles)} |" for row in rows
    ]
    return lines


def _gib(value: float) -> str:
    return "-" if value == 0 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _split_lines(work: Workload, split: Split, gpus: int, gpu_gib: float) -> list[str]:
    if split.shared:
        first = f"1 GPU of {gpu_gib:g} GiB trains and samples: {split.trainer_bytes / GIB:.0f} GiB"
    else:
        width = f", each over {split.tensor_parallel} GPUs" if split.tensor_parallel > 1 else ""
        idle = gpus - split.trainer_gpus - split.engine_gpus
        first = (
            f"{gpus} GPUs of {gpu_gib:g} GiB: {split.trainer_gpus} train "
            f"({split.trainer_bytes / GIB:.0f} GiB on each), {split.engines} engine(s){width} "
            f"({split.engine_bytes / GIB:.0f} GiB on each GPU)" + (f", {idle} idle" if idle else "")
        )
    whole = work.num_envs * work.context
    lines = [
        first,
        f"keys and values of {split.kv_tokens:,} tokens fit, of {whole:,} if all episodes were at their longest",
    ]
    if split.step_s is not None:
        lines.append(f"a step takes at most {split.step_s:,.0f} s (Proposition 2)")
    return lines


def _recipe(work: Workload) -> str:
    name = work.shape.name
    recipe = f"recipes/swe_sao.py --model {name} --num_envs {work.num_envs} --max_tokens_per_episode {work.context}"
    if work.precision != "float32":
        recipe += f' --model_init_kwargs \'{{"dtype": "{work.precision}"}}\''
    if work.lora:
        recipe += " --use_peft true --critic_use_peft true"
    if work.reference:
        recipe += " --beta 0.001"
    return recipe


def _server(work: Workload, split: Split, place: int, port: int, *, host: str | None = None) -> str:
    """The command of an engine on the GPUs from ``place`` on."""
    devices = _join(str(place + number) for number in range(split.tensor_parallel))
    # So that adapters are sent alone; 16 is the recipes' --lora_r.
    allow = " VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" if work.lora else ""
    adapters = "--enable-lora --max-lora-rank 16 " if work.lora else ""
    width = f"--tensor-parallel-size {split.tensor_parallel} " if split.tensor_parallel > 1 else ""
    listen = f"--host {host} " if host else ""
    return (
        f"CUDA_VISIBLE_DEVICES={devices} VLLM_SERVER_DEV_MODE=1{allow} python -m vllm.entrypoints.openai.api_server "
        f"--model {work.shape.name} --dtype {work.precision} --max-model-len {work.context} "
        f"--logprobs-mode processed_logprobs --generation-config vllm {width}{adapters}{listen}--port {port} &"
    )


def _commands(work: Workload, split: Split) -> list[str]:
    recipe = _recipe(work)
    if split.shared:
        share = (split.engine_bytes) / split.trainer_bytes * 0.9
        return [f"python {recipe} --engine vllm --vllm_args '--gpu-memory-utilization {share:.2f}'"]
    trainers = ",".join(map(str, range(split.trainer_gpus)))
    launch = "python"
    if split.trainer_gpus > 1:
        launch = f"accelerate launch --config_file fsdp2.yaml --num_processes {split.trainer_gpus}"
    first = split.trainer_gpus
    if split.engines == 1:
        devices = _join(str(first + number) for number in range(split.tensor_parallel))
        wide = split.tensor_parallel > 1
        more = f" --vllm_args '--tensor-parallel-size {split.tensor_parallel}'" if wide else ""
        return [
            f"CUDA_VISIBLE_DEVICES={trainers} {launch} {recipe} --engine vllm --vllm_devices {devices}{more}"
        ]
    servers = [
        _server(work, split, first + number * split.tensor_parallel, 8001 + number)
        for number in range(split.engines)
    ]
    urls = _join(f"http://127.0.0.1:{8001 + number}" for number in range(split.engines))
    return [*servers, f"CUDA_VISIBLE_DEVICES={trainers} {launch} {recipe} --engine vllm --vllm_url {urls}"]


def _commands_of_machines(work: Workload, split: Split, args: argparse.Namespace) -> list[str]:
    """Each machine's, under its name; SHARED is a folder that all of them mount."""
    trainers = split.trainer_gpus // args.gpus
    hosts = [f"HOST{number}" for number in range(1, args.machines + 1)]
    ports = [8001 + number for number in range(args.gpus // split.tensor_parallel)]
    urls = _join(f"http://{host}:{port}" for host in hosts[trainers:] for port in ports)
    tail = (
        f"{_recipe(work)} --engine vllm --vllm_url {urls} --weight_transfer filesystem --weight_folder SHARED/weights "
        "--output_dir SHARED/run"
    )
    launch = "python"
    if split.trainer_gpus > 1:
        launch = f"accelerate launch --config_file fsdp2.yaml --num_processes {split.trainer_gpus}"
    lines: list[str] = []
    for host in hosts[trainers:]:
        lines.append(f"# {host}")
        lines += [
            _server(work, split, number * split.tensor_parallel, port, host=host)
            for number, port in enumerate(ports)
        ]
    for rank, host in enumerate(hosts[:trainers]):
        meeting = f" --num_machines {trainers} --machine_rank {rank} --main_process_ip HOST1 --main_process_port 29500"
        lines += [f"# {host}", f"{launch}{meeting if trainers > 1 else ''} {tail}"]
    return lines


def _by_alpha(work: Workload, args: argparse.Namespace, times: StepTimes) -> list[dict[str, Any]]:
    rows = []
    for alpha in sorted({*_ALPHAS, times.asynchrony}):
        times = dataclasses.replace(times, asynchrony=alpha)
        split = best_split(work, args.gpus, args.gpu_gib, times, machines=args.machines)
        rows.append({"asynchrony": alpha, "trainer_gpus": split.trainer_gpus, "step_s": split.step_s})
    return rows


def _alpha_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    least = min(row["step_s"] for row in rows)
    enough = next(row["asynchrony"] for row in rows if row["step_s"] <= _NEAR * least)
    lines = ["| asynchrony (alpha) | GPUs that train | a step takes at most, s |", "|---|---|---|"]
    for row in rows:
        name = f"{row['asynchrony']:g}" + ("" if row["asynchrony"] else ", in turns")
        lines.append(f"| {name} | {row['trainer_gpus']} | {row['step_s']:,.0f} |")
    return [*lines, "", f"least alpha within {_NEAR - 1:.0%} of the shortest: --asynchrony {enough:g}"]


def _redundancy(args: argparse.Namespace) -> Redundancy | None:
    if args.slow_share is None:
        return None
    return least_redundancy(batch=args.batch, size=args.group_size, slow_share=args.slow_share)


def _redundancy_lines(args: argparse.Namespace, found: Redundancy) -> list[str]:
    groups = args.batch // args.group_size
    without = ready_share(groups=groups, size=args.group_size, slow_share=args.slow_share)
    return [
        f"{without:.1%} of the batches of {groups} x {args.group_size} need no slow episode, and "
        f"{found.ready_share:.1%} with",
        f"--group_size {args.group_size} --redundant_groups {found.groups} --redundant_members {found.members}",
        f"which starts {found.cost:.2f} times the episodes and cancels the surplus; that slow ones are independent of "
        "each other is assumed",
    ]


def _join(texts: Iterable[str] | Sequence[str]) -> str:
    return ",".join(texts)
