"""The SWE recipe with LoRA adapters on policy and critic."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentenv_trainers.recipe import run_recipe

peft = pytest.importorskip("peft")

SIZE = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_envs": 4,
    "eval_episodes": 4,
    "value_pretrain_episodes": 4,
    "value_pretrain_steps": 2,
    "max_tokens_per_turn": 6,
    "max_tokens_per_episode": 200,
    "learning_rate": 1e-2,
    "critic_learning_rate": 1e-2,
    "save_steps": 1,
}


@pytest.fixture
def arguments(tmp_path, vowels, tiny_policy, monkeypatch):
    """Command line of a run of tiny steps."""
    monkeypatch.chdir(tmp_path)
    sizes = [item for name, value in SIZE.items() for item in (f"--{name}", str(value))]
    return ["--env", "vowels.py", "--model", str(tiny_policy), "--output_dir", "out", *sizes]


def test_adapters_of_policy_and_critic_train_resume_and_are_saved_merged_and_alone(
    swe_sao, arguments, tmp_path, tiny_policy
):
    lora = ["--use_peft", "true", "--critic_use_peft", "true", "--lora_r", "4"]
    assert run_recipe(swe_sao.main, [*arguments, *lora, "--max_steps", "2"]) == 0
    out = tmp_path / "out"
    assert run_recipe(swe_sao.main, ["--output_dir", "out", "--resume", "--max_steps", "3"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 3)

    base = AutoModelForCausalLM.from_pretrained(tiny_policy)
    merged, loading = AutoModelForCausalLM.from_pretrained(out / "model", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    alone = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_policy), out / "adapter"
    ).merge_and_unload()
    changed = set()
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, alone.get_parameter(name), rtol=0, atol=1e-6, msg=name)
        if not torch.equal(parameter, base.get_parameter(name)):
            changed.add(name.split(".")[-2])
    assert changed == {"q_proj", "v_proj"}  # PEFT's choice for this architecture
    weights = torch.load(out / "checkpoints" / "checkpoint-3" / "critic.pt")["critic"]
    trained = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in weights if ".lora_" in name}
    # All linear layers: the attention's train while the values are pretrained, and are frozen after that.
    assert trained == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_critic_adapters_in_frozen_attention_alone_are_refused(swe_sao, arguments, capsys):
    lora = ["--critic_use_peft", "true", "--lora_target_modules", "q_proj"]
    assert run_recipe(swe_sao.main, [*arguments, *lora, "--max_steps", "1"]) == 2
    assert "set freeze_critic_attention=False" in capsys.readouterr().err
