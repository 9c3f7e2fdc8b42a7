"""Program of the tests that need processes of their own: trains over the real controller, engine and environment.

python run_training.py OPTIONS_AS_JSON

Appends a line per training step to ``options["log"]``: its numbers, and digests of the weights after it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from conftest import make_byte_vocabulary, make_tiny_policy
from torch import nn
from transformers import TrainerCallback

from agentenv import BaseEnv
from agentenv.errors import RolloutError
from agentenv.inference import LLMProxy
from agentenv.inference.transformers_engine import TransformersEngine
from agentenv.report.token_records import EpisodeTokens, TokenWriter
from agentenv.rollout import AsyncController
from agentenv.testing import ByteTokenizer
from agentenv.trajectory import Trajectory
from agentenv_trainers import GRPOConfig, GRPOTrainer, SAOConfig, SAOTrainer
from agentenv_trainers.processes import disconnect
from agentenv_trainers.token_recorder import TokenRecorder


class EvenWords(BaseEnv):
    """One to three turns; each gives a reward if the sum of its characters is even.

    Its steps take a time of their own in every process: what a run computes must not follow from it.
    """

    worker = "thread"
    max_turns = 3
    _pauses = random.Random()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = 1 + (seed or 0) % 3
        return f"Task {(seed or 0) % 100}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self._pauses.random() * 0.002)
        self._left -= 1
        return "Go on." * self._left, float(sum(map(ord, action)) % 2 == 0), self._left == 0, False, {}


class Controller(AsyncController):
    """Fails at a step."""

    def __init__(self, *args: Any, fail_at: int | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fail_at = fail_at

    def get_batch(self, step: int) -> list[Trajectory]:
        """The batch, or the failure."""
        if step == self._fail_at:
            raise RolloutError("the sandboxes are gone")
        return super().get_batch(step)


class Recorder(TrainerCallback):
    """Writes the log, and kills the process in the middle of a step: before its optimizer's."""

    def __init__(self, trainer: Any, log: Path, kill_at: int | None) -> None:
        self._trainer, self._log, self._kill_at = trainer, log, kill_at

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The gradients of a step are there."""
        if state.global_step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """A step is over."""
        if not self._trainer.accelerator.is_main_process or "reward" not in logs:
            return
        line = {
            "step": state.global_step,
            **logs,
            "ddp_timeout": args.ddp_timeout,
            "policy": digest(self._trainer.model),
        }
        if isinstance(self._trainer, SAOTrainer):
            line["critic"] = digest(self._trainer.critic)
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def digest(model: nn.Module) -> str:
    """Of every bit of the parameters."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(name.encode())
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def token_recorder(folder: Path, trainer: Any) -> TokenRecorder:
    """Writes the records of a step's first tokens into a folder, from the main process."""

    def keep(episodes: Sequence[EpisodeTokens]) -> bool:
        assert trainer.accelerator.is_main_process
        folder.mkdir(exist_ok=True)
        TokenWriter(folder).append(episodes)
        return True

    return TokenRecorder(keep, trainer.processing_class, tokens_per_step=500)


def main(options: dict[str, Any]) -> None:
    """Train as the options say."""
    torch.set_num_threads(1)
    config_type, trainer_type = {
        "sao": (SAOConfig, SAOTrainer),
        "grpo": (GRPOConfig, GRPOTrainer),
    }[options["algorithm"]]
    config: Any = config_type(**options["settings"])
    # 128 wide: the matrix products of a row then round by how many rows there are.
    policy = make_tiny_policy(vocab_size=ByteTokenizer.vocab_size, hidden_size=128, intermediate_size=128)
    kill_at = options.get("kill_at")
    controller = None
    if config.process_index == 0:
        rollout = config.rollout_config()
        engine = TransformersEngine(policy, ByteTokenizer(), max_batch=rollout.num_envs, max_length=256)
        controller = Controller(
            EvenWords,
            LLMProxy([engine]),
            ByteTokenizer(),
            rollout,
            fail_at=options.get("fail_at"),
        )
    trainer = trainer_type(policy, config, controller, make_byte_vocabulary())
    if "tokens" in options:
        trainer.token_recorder = token_recorder(Path(options["tokens"]), trainer)
    trainer.add_callback(Recorder(trainer, Path(options["log"]), kill_at))
    try:
        trainer.train(resume_from_checkpoint=options.get("resume"))
    finally:
        if controller is not None:
            controller.stop()


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    finally:
        disconnect()
