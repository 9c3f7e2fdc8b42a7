"""bfloat16, recomputed activations and accumulation change what a step costs, not what it learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from agentenv.trajectory import Trajectory
from agentenv_trainers import GRPOConfig, GRPOTrainer, SAOConfig, SAOTrainer
from agentenv_trainers.testing import ReplayController


class Gradients(TrainerCallback):
    """Keeps the policy's gradients of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """They are complete."""
        self.steps.append({name: p.grad.clone() for name, p in model.named_parameters()})


@pytest.fixture(params=["sao", "grpo"])
def train(
    request: pytest.FixtureRequest,
    make_policy: Callable[..., Any],
    make_episodes: Callable[..., list[Trajectory]],
    tokenizer: Any,
    tmp_path: Path,
) -> Callable[..., tuple[Any, Gradients]]:
    """Train two steps on fixed episodes; returns the trainer and its gradients."""

    def batch(step: int) -> list[Trajectory]:
        return [
            replace(episode, group_id=str(number // 4), reward=float(number % 3 == 0))
            for number, episode in enumerate(make_episodes(8, seed=step, version=step))
        ]

    def run(*, watch: Callable[[Any], None] | None = None, **changes: Any) -> tuple[Any, Gradients]:
        settings: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 8,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "save_strategy": "no",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "max_grad_norm": 0.0,
            # Bounds that no token meets: a ratio on the other side of one would be another objective.
            "clip_low": 1.0,
            "clip_high": 1e6,
            **changes,
        }
        gradients = Gradients()
        source = ReplayController(batch)
        trainer: Any
        if request.param == "sao":
            config = SAOConfig(**settings, critic_learning_rate=1e-3)
            trainer = SAOTrainer(make_policy(), config, source, tokenizer, callbacks=[gradients])
        else:
            config = GRPOConfig(**settings, group_size=4, objective="dis")
            trainer = GRPOTrainer(make_policy(), config, source, tokenizer, callbacks=[gradients])
        if watch is not None:
            watch(trainer)
        trainer.train()
        assert len(gradients.steps) == 2
        return trainer, gradients

    return run


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def test_a_step_in_bfloat16_is_finite_and_close_to_float32(
    train: Callable[..., tuple[Any, Gradients]],
) -> None:
    computed: list[torch.dtype] = []

    def watch(trainer: Any) -> None:
        layer = trainer.model.model.layers[0].mlp
        layer.register_forward_hook(lambda module, args, output: computed.append(output.dtype))

    exact, expected = train()
    rounded, got = train(bf16=True, watch=watch)
    assert set(computed) == {torch.bfloat16}
    assert {p.dtype for p in rounded.model.parameters()} == {torch.float32}
    for mine, theirs in zip(got.steps, expected.steps, strict=True):
        a, b = flat(mine), flat(theirs)
        assert torch.isfinite(a).all()
        # Eight bits of mantissa: near, and not the same.
        assert 0.0 < float((a - b).norm() / b.norm()) < 0.05
    for name in ("loss", "entropy", "policy_grad_norm"):
        values = [
            [e[name] for e in trainer.state.log_history if "reward" in e] for trainer in (rounded, exact)
        ]
        assert values[0] == pytest.approx(values[1], rel=0.02, abs=0.02), name


def test_recomputed_activations_give_the_same_gradient(train: Callable[..., tuple[Any, Gradients]]) -> None:
    calls: dict[str, int] = {}

    def count(name: str) -> Callable[[Any], None]:
        def watch(trainer: Any) -> None:
            calls[name] = 0

            def called(module: Any, args: Any) -> None:
                calls[name] += 1

            trainer.model.model.layers[1].mlp.register_forward_pre_hook(called)

        return watch

    _, expected = train(watch=count("kept"))
    _, got = train(gradient_checkpointing=True, watch=count("recomputed"))
    assert (calls["kept"], calls["recomputed"]) == (2, 4)
    for mine, theirs in zip(got.steps, expected.steps, strict=True):
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("passes", [2, 4, 8])
def test_accumulation_gives_the_gradient_of_one_pass(
    train: Callable[..., tuple[Any, Gradients]], passes: int
) -> None:
    _, expected = train()
    _, got = train(per_device_train_batch_size=8 // passes, gradient_accumulation_steps=passes)
    # The second step, too: it starts from where the first one led.
    for step, (mine, theirs) in enumerate(zip(got.steps, expected.steps, strict=True)):
        for name, gradient in theirs.items():
            torch.testing.assert_close(
                mine[name], gradient, rtol=1e-4 if step == 0 else 1e-2, atol=1e-6 if step == 0 else 1e-4
            )
