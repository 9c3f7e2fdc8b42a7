"""Two processes (DDP over gloo) train as one does on the same batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentenv.trajectory import Trajectory
from agentenv_trainers import SAOTrainer

PROGRAM = Path(__file__).with_name("run_processes.py")
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "critic_learning_rate": 1e-2,
    "optim": "sgd",  # in AdamW a tiny difference of a gradient near zero flips the whole step
    "value_pretrain_episodes": 8,
    "value_pretrain_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "max_grad_norm": 1.0,
}


def run_two_processes(folder: Path) -> dict[str, Any]:
    settings = {**SETTINGS, "output_dir": str(folder / "two"), "per_device_train_batch_size": 2}
    result = folder / "result.pt"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *(str(PROGRAM), str(result), json.dumps(settings)),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(PROGRAM.parent.parent), *filter(None, sys.path)]),
            "ACCELERATE_USE_CPU": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    loaded: dict[str, Any] = torch.load(result)
    return loaded


@pytest.mark.slow
def test_two_processes_train_as_one_does(
    make_trainer: Callable[..., SAOTrainer], make_episodes: Callable[..., list[Trajectory]], tmp_path: Path
) -> None:
    one = make_trainer(**SETTINGS, per_device_train_batch_size=4)
    one.train()
    two = run_two_processes(tmp_path)
    for name, parameter in one.model.named_parameters():
        torch.testing.assert_close(two["policy"][name], parameter.detach(), rtol=1e-4, atol=1e-6, msg=name)
    values = one.critic_learner.values(one._collate(make_episodes(8, seed=77))).tokens
    torch.testing.assert_close(two["values"], values, rtol=1e-2, atol=1e-3)
    for name in ("reward", "critic_loss", "entropy", "masked_share", "policy_grad_norm", "critic_grad_norm"):
        got = [entry[name] for entry in two["logs"] if name in entry]
        expected = [entry[name] for entry in one.state.log_history if name in entry]
        assert len(expected) == 2
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-6), name
    assert (tmp_path / "two" / "checkpoint-2" / "COMPLETE").exists()
