"""What a run leaves behind loads in transformers and PEFT, and the engines had the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentenv.errors import UsageError
from agentenv_trainers import SAOTrainer

MakeTrainer = Callable[..., SAOTrainer]
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def lora(**changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    settings = {"r": 2, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**settings, **changes})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def engines_model(trainer: SAOTrainer, make_policy: Callable[..., Any]) -> Any:
    """The plain model with the weights that the engines were given last."""
    model = make_policy(seed=9)
    model.load_state_dict(trainer._controller.weights)
    return model


def test_the_policy_of_a_run_loads_as_a_causal_lm_and_is_what_the_engines_got(
    make_trainer: MakeTrainer, make_policy: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(learning_rate=1e-2)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(loaded), logits(engines_model(trainer, make_policy)))
    assert not torch.allclose(logits(loaded), logits(make_policy()), atol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == trainer._tokenizer.get_vocab()


def test_adapters_train_alone_and_engines_get_them_merged_under_the_plain_names(
    make_trainer: MakeTrainer, make_policy: Callable[..., Any]
) -> None:
    trainer = make_trainer(peft_config=lora(), learning_rate=1e-2, max_steps=3)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    weights = trainer._controller.weights
    assert list(weights) == list(make_policy().state_dict())
    assert not torch.equal(
        weights["model.layers.0.mlp.up_proj.weight"], make_policy().model.layers[0].mlp.up_proj.weight
    )
    torch.testing.assert_close(
        logits(engines_model(trainer, make_policy)), logits(trainer.model.get_base_model()), rtol=0, atol=1e-5
    )


def test_a_run_with_adapters_saves_an_adapter_folder_that_loads_on_its_base(
    make_trainer: MakeTrainer, make_policy: Callable[..., Any], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    make_policy().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trainer = make_trainer(policy=base, peft_config=lora(), learning_rate=1e-2, max_steps=3)
    trainer.train()
    expected = logits(engines_model(trainer, make_policy))
    assert not torch.allclose(expected, logits(make_policy()), atol=1e-3)
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    # transformers finds the base by its name in the adapter's config, peft is given it.
    by_name = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(by_name), expected, rtol=0, atol=1e-5)
    given = peft.PeftModel.from_pretrained(make_policy(), tmp_path / "adapter")
    torch.testing.assert_close(logits(given), expected, rtol=0, atol=1e-5)
    given.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)


def test_a_run_with_adapters_is_continued_bit_by_bit(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "beta": 0.1}
    adapters = {"peft_config": lora(), "critic_peft_config": lora()}
    whole = make_trainer(**adapters, **settings, output_dir=str(tmp_path / "a"))
    whole.train()
    resumed = make_trainer(**adapters, **settings, output_dir=str(tmp_path / "b"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    for model, other in ((resumed.model, whole.model), (resumed.critic, whole.critic)):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, other.get_parameter(name)), name
    numbers = [
        [(e["loss"], e["critic_loss"], e["kl"]) for e in trainer.state.log_history if "loss" in e]
        for trainer in (whole, resumed)
    ]
    assert len(numbers[0]) == 3
    assert numbers[0] == numbers[1]


def test_the_kl_term_of_a_trained_adapter_compares_with_that_adapter_not_with_the_base(
    make_trainer: MakeTrainer, make_policy: Callable[..., Any]
) -> None:
    peft = pytest.importorskip("peft")
    policy = peft.get_peft_model(make_policy(), lora())
    torch.manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    trainer = make_trainer(policy=policy, beta=0.1, max_steps=2, learning_rate=1e-2)
    trainer.train()
    first, second = (e["kl"] for e in trainer.state.log_history if "kl" in e)
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > 1e-5


def test_policy_and_critic_may_have_one_adapter_config_which_stays_as_it_is(
    make_trainer: MakeTrainer,
) -> None:
    config = lora()
    trainer = make_trainer(peft_config=config, critic_peft_config=config)
    trainer.train()
    assert config.target_modules == "all-linear"
    assert any("lora_A" in name for name, _ in trainer.model.named_parameters())
    assert any("lora_A" in name for name, _ in trainer.critic.named_parameters())


def test_single_tokens_of_tied_embeddings_cannot_be_trained(
    make_trainer: MakeTrainer, make_policy: Callable[..., Any]
) -> None:
    config = lora(trainable_token_indices=[3, 4])
    with pytest.raises(UsageError, match="trainable_token_indices"):
        make_trainer(peft_config=config)
    make_trainer(peft_config=config, policy=make_policy(tie_word_embeddings=False)).train()
