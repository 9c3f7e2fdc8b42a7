"""Does an agent program as it is released yield episodes that can be trained on? mini-swe-agent and OpenHands.

    python benchmarks/agent_programs.py --json agent_programs.json --check
    python benchmarks/agent_programs.py --command VENV/bin/mini --sandbox local-unisolated --check
    python benchmarks/agent_programs.py --agent openhands --command VENV/bin/python --check
    python benchmarks/agent_programs.py --model DIR --config mini_textbased.yaml      a pretrained model

The program runs beside the sandbox, on generated tasks of SWE-v0, and talks to the endpoint that records. Its
package is installed from the index into an environment of its own (--work_dir), where --command names none.

- sampled: the policy, random by default, samples its answers. A random policy calls no tool: mini-swe-agent leaves each
  such answer out of its history, so that every turn is a fork; for OpenHands it is the end.
- dictated: the answers are written beforehand and the model gives their log-probs, turn by turn as the engine is asked.
  The commands look around, list the sandbox's network interfaces, make the right edit and end. So histories that go on
  are fed back, too, and what the program does in the sandbox is graded.
  OpenHands' condenser is set so low that it has to sum the history up: a fork, and another agent that does so.

Each time the recorded ids are fed back through the model, each segment of its own, and the log-probs compared with the
recorded ones; then SAO takes a step on the episodes.

--sandbox auto takes Docker where an engine answers; without, nothing isolates the policy's commands.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_episodes import CONTEXT, Step, interfaces, random_policy, sao_step
from agent_releases import RELEASES, SEED, find_program, launcher

from agentenv.errors import AgentEnvError, UsageError
from agentenv.inference.policy import load_policy
from agentenv.report.bars import Bar, conclude
from agentenv_envs.swe.sandbox import open_backend
from agentenv_envs.swe.sandbox.images import ensure_base_image

LARGEST_DIFFERENCE = 1e-4
WORK_DIR = Path(__file__).resolve().parent.parent / ".cache" / "agent_programs"


def prepare(sandbox: str) -> str:
    """The kind of sandbox that there is; the image of Docker's is made where it is missing."""
    backend = open_backend(sandbox)
    try:
        client = getattr(backend.backend, "client", None)
        if client is not None:
            ensure_base_image(client, progress=lambda line: print(line, flush=True))
        return backend.kind
    finally:
        backend.close()


def step_bars(part: str, step: Step) -> list[Bar]:
    """What holds of every part."""
    figures = step.figures()
    lost = step.engine_tokens - figures["sampled_tokens"]
    return [
        Bar(
            f"{part}: recorded log-probs against a forward pass",
            step.difference,
            "<=",
            LARGEST_DIFFERENCE,
            "nats",
        ),
        Bar(f"{part}: tokens of the engine that no trajectory has", lost, "==", 0),
        Bar(f"{part}: weights changed by the SAO step", int(step.changed > 0.0), "==", 1),
    ]


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[Bar]]:
    """All parts; what was found, and its bars."""
    release = RELEASES[options.agent]
    program, version = find_program(options.agent, options.command, options.work_dir)
    kind = prepare(options.sandbox)
    found: dict[str, Any] = {"program": f"{options.agent} {version}", "sandbox": kind}
    policy = load_policy(options.model) if options.model else random_policy()
    found["policy"] = policy.name
    started = time.monotonic()
    step = sao_step(
        launcher(options.agent, program, options.config),
        policy,
        sandbox=kind,
        episodes=options.episodes,
        max_turns=options.max_turns,
        max_tokens=options.max_tokens,
        context=min(CONTEXT, policy.model.config.max_position_embeddings),
    )
    found["sampled"] = {**step.figures(), "seconds": round(time.monotonic() - started, 1)}
    bars = step_bars("sampled", step)
    started = time.monotonic()
    step = sao_step(
        launcher(options.agent, program),
        random_policy(),
        said=release.answers(),
        seed=SEED,
        sandbox=kind,
        max_tokens=1000,
    )
    found["dictated"] = dictated = {
        **step.figures(),
        "seconds": round(time.monotonic() - started, 1),
        "interfaces": interfaces(step.batch[0]),
        "rewards": [trajectory.reward for trajectory in step.batch],
    }
    episodes = len(step.batch)
    bars += [
        *step_bars("dictated", step),
        Bar("dictated: histories rewritten", dictated["forks"], "==", release.forks * episodes),
        Bar(
            "dictated: agents, with those that sum a history up",
            dictated["agents"],
            "==",
            release.agents * episodes,
        ),
        Bar("dictated: commands run in the sandbox", dictated["commands"], "==", release.commands * episodes),
        Bar("dictated: least reward of the right edit", min(dictated["rewards"]), "==", 1),
    ]
    if kind == "docker":
        number = len(dictated["interfaces"])
        bars.append(Bar("dictated: network interfaces of the sandbox beside loopback", number, "==", 0))
    return found, bars


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agent", choices=tuple(RELEASES), default="mini-swe-agent")
    parser.add_argument(
        "--command", metavar="PATH", help="`mini`, or the python that has OpenHands; unset: it is installed"
    )
    parser.add_argument("--work_dir", type=Path, default=WORK_DIR, help="it is installed there")
    parser.add_argument("--sandbox", choices=("auto", "docker", "local-unisolated"), default="auto")
    parser.add_argument("--model", help="folder, or name on the hub; unset: a random one")
    parser.add_argument("--config", default="mini.yaml", help="mini-swe-agent's, of the sampled episodes")
    parser.add_argument("--episodes", type=int, default=2, help="that are sampled")
    parser.add_argument("--max_turns", type=int, default=8, help="of a sampled episode")
    parser.add_argument("--max_tokens", type=int, default=24, help="of a sampled turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--check", action="store_true", help="exit 1 where a figure misses its bar")
    options = parser.parse_args(argv)
    assumed = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load before": round(os.getloadavg()[0], 1),
        **{name: str(value) for name, value in vars(options).items() if name not in ("json", "check")},
    }
    try:
        figures, bars = measure(options)
    except AgentEnvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    for part, found in figures.items():
        text = (
            ", ".join(f"{key} {value}" for key, value in found.items()) if isinstance(found, dict) else found
        )
        print(f"{part}: {text}")
    return conclude(bars, assumed=assumed, figures=figures, json_file=options.json, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
