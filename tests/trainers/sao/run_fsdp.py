"""Program of test_fsdp.py: trains, resumes, saves models; the main process saves what came out.

python run_fsdp.py FOLDER SETTINGS_AS_JSON [lora]
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsdp_on_cpu
import torch
from conftest import make_episode_list, make_tiny_policy, make_tokenizer

from agentenv.inference.adapters import AdaptedWeights
from agentenv.trajectory import Segment, Trajectory
from agentenv_trainers import Critic, SAOConfig, SAOTrainer
from agentenv_trainers.policy_weights import policy_weights
from agentenv_trainers.testing import ReplayController


def uneven_episodes(step: int) -> list[Trajectory]:
    """Eight: the longest one has five segments, so that the process that gets it needs more passes of the critic than
    the other; three are cut off."""
    episodes = make_episode_list(5, seed=step, version=step)
    episodes += make_episode_list(3, seed=100 + step, truncated=True, version=step)
    forked, *others = sorted(episodes, key=lambda t: len(t.prompt_ids) + len(t.completion_ids), reverse=True)
    names = ("prompt_ids", "completion_ids", "rollout_logprobs", "action_mask", "policy_versions")
    segments = [Segment(**{name: getattr(other, name) for name in names}) for other in others[:4]]
    return [replace(forked, earlier_segments=segments), *others]


def make_trainer(settings: dict[str, Any], *, lora: bool) -> tuple[SAOTrainer, ReplayController | None]:
    """A trainer, and on the main process its controller."""
    config = SAOConfig(**settings)
    controller = ReplayController(uneven_episodes) if config.process_index == 0 else None
    adapters: dict[str, Any] = {}
    if lora:
        from peft import LoraConfig

        adapters = {
            name: LoraConfig(r=2, lora_alpha=8, target_modules="all-linear")
            for name in ("peft_config", "critic_peft_config")
        }
    return SAOTrainer(make_tiny_policy(), config, controller, make_tokenizer(), **adapters), controller


def results(trainer: SAOTrainer) -> dict[str, Any]:
    """Logs, and values of the critic (the same on all processes)."""
    probe = make_episode_list(8, seed=77)
    return {
        "logs": [
            {k: v for k, v in e.items() if isinstance(v, float | int)} for e in trainer.state.log_history
        ],
        "values": trainer.critic_learner.values(trainer._collate(probe)).tokens,
    }


def main(folder: Path, settings: dict[str, Any], *, lora: bool) -> None:
    """Train to the end, then again from the first checkpoint."""
    torch.set_num_threads(1)
    trainer, controller = make_trainer({**settings, "output_dir": str(folder / "run")}, lora=lora)
    trainer.train()
    found = {
        "whole": results(trainer),
        "kind": str(trainer.accelerator.distributed_type),
        "sharded": [
            type(next(iter(m.parameters()))).__name__ for m in (trainer.model, trainer.critic.backbone)
        ],
    }
    weights = policy_weights(trainer.accelerator, trainer.model_wrapped)
    if isinstance(weights, AdaptedWeights):
        found["adapter"] = dict(weights.adapter.tensors)
    trainer.save_model(str(folder / "policy"))
    trainer.critic_learner.save_pretrained(folder / "critic", make_tokenizer())
    resumed, _ = make_trainer({**settings, "output_dir": str(folder / "resumed")}, lora=lora)
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    found["resumed"] = results(resumed)
    # What the saved critic says, without anything around it.
    resumed.critic_learner.critic = resumed.critic_learner._wrapped = Critic.from_pretrained(
        folder / "critic", make_tokenizer()
    )
    found["saved"] = results(resumed)
    if controller is not None:
        torch.save({**found, "weights": controller.weights}, folder / "result.pt")


if __name__ == "__main__":
    fsdp_on_cpu.enable()
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), lora=sys.argv[3:] == ["lora"])
