"""Two processes that shard policy and critic (FSDP2 over gloo) train as one does, resume and save whole models."""

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
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

PROGRAM = Path(__file__).with_name("run_fsdp.py")
LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}
"""What ``accelerate launch --use_fsdp --fsdp_version 2`` sets."""
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "learning_rate": 0.3,
    "critic_learning_rate": 1e-3,
    "optim": "sgd",  # in AdamW a tiny difference of a gradient near zero flips the whole step
    "critic_lambda": 0.9,
    "beta": 0.1,
    "value_pretrain_episodes": 8,
    "value_pretrain_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "max_grad_norm": 1.0,
}
COMPARED = ("loss", "critic_loss", "kl", "entropy", "policy_grad_norm", "critic_grad_norm", "masked_share")


def run(folder: Path, processes: int, *words: str) -> dict[str, Any]:
    """What came out of the program; several processes shard."""
    folder.mkdir()
    settings = {**SETTINGS, "per_device_train_batch_size": 4 // processes}
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    done = subprocess.run(
        [
            *(sys.executable, *(launcher if processes > 1 else ())),
            *(str(PROGRAM), str(folder), json.dumps(settings), *words),
        ],
        env={
            **os.environ,
            **(LAUNCHED if processes > 1 else {}),
            "ACCELERATE_USE_CPU": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(PROGRAM.parent.parent), *filter(None, sys.path)]),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    loaded: dict[str, Any] = torch.load(folder / "result.pt")
    return loaded


def history(result: dict[str, Any]) -> dict[int, dict[str, float]]:
    return {e["step"]: {name: e[name] for name in COMPARED} for e in result["logs"] if "loss" in e}


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("lora",)], ids=["whole", "lora"])
def test_sharded_processes_train_as_one_does_resume_bitwise_and_save_whole_models(
    tmp_path: Path, make_policy: Callable[..., Any], words: tuple[str, ...]
) -> None:
    if words:
        peft = pytest.importorskip("peft")
    one, two = run(tmp_path / "one", 1, *words), run(tmp_path / "two", 2, *words)
    assert two["kind"] == "DistributedType.FSDP"
    assert two["sharded"] == ["DTensor", "DTensor"]
    expected, got = history(one["whole"]), history(two["whole"])
    assert set(expected) == {1, 2, 3, 4}
    assert 0.0 <= expected[1]["kl"] < 1e-6 < expected[4]["kl"]
    for step in expected:
        assert got[step] == pytest.approx(expected[step], rel=1e-3, abs=1e-5), step
    torch.testing.assert_close(two["whole"]["values"], one["whole"]["values"], rtol=1e-2, atol=1e-3)
    # The engines got the plain model's state dict.
    assert list(two["weights"]) == list(make_policy().state_dict())
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], tensor, rtol=1e-4, atol=1e-6, msg=name)
    # The run that was continued from step 2 has the same losses, bit by bit.
    for result in (one, two):
        resumed = history(result["resumed"])
        assert resumed[3] == history(result["whole"])[3]
        assert resumed[4] == history(result["whole"])[4]
        assert torch.equal(result["resumed"]["values"], result["whole"]["values"])
    # Both models were saved whole.
    if words:
        policy = peft.PeftModel.from_pretrained(make_policy(), tmp_path / "two" / "policy").merge_and_unload()
        # And so was the adapter that engines are sent alone.
        saved = load_file(tmp_path / "two" / "policy" / "adapter_model.safetensors")
        assert set(two["adapter"]) == set(saved)
        assert all(torch.equal(tensor, saved[name]) for name, tensor in two["adapter"].items())
    else:
        policy = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "policy")
    for name, tensor in policy.state_dict().items():
        torch.testing.assert_close(tensor, two["weights"][name], rtol=0, atol=1e-6, msg=name)
    assert not any("lora" in name for name in load_file(tmp_path / "two" / "critic" / "model.safetensors"))
    torch.testing.assert_close(two["saved"]["values"], two["whole"]["values"], rtol=1e-5, atol=1e-6)
