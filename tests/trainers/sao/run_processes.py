"""Program of test_processes.py: trains, and has the main process save what came out.

python run_processes.py OUTPUT_FILE SETTINGS_AS_JSON
"""

from __future__ import annotations

import json
import sys

import torch
from conftest import make_episode_list, make_tiny_policy, make_tokenizer

from agentenv_trainers import SAOConfig, SAOTrainer
from agentenv_trainers.testing import ReplayController


def main(output: str, settings: str) -> None:
    torch.set_num_threads(1)
    config = SAOConfig(**json.loads(settings))
    is_main = config.process_index == 0
    # Only the main process has a controller.
    controller = (
        ReplayController(lambda step: make_episode_list(8, seed=step, version=step)) if is_main else None
    )
    trainer = SAOTrainer(make_tiny_policy(), config, controller, make_tokenizer())
    trainer.train()
    values = trainer.critic_learner.values(trainer._collate(make_episode_list(8, seed=77))).tokens
    if is_main:
        logs = [{k: v for k, v in e.items() if isinstance(v, float)} for e in trainer.state.log_history]
        torch.save({"policy": trainer.model.state_dict(), "values": values, "logs": logs}, output)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
