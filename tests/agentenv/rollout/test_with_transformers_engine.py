"""The controller over the real engine: weights change while episodes run, and the tokens say so."""

import json
import random
import time
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from agentenv import BaseEnv
from agentenv.errors import UsageError
from agentenv.inference import LLMProxy
from agentenv.inference.transformers_engine import TransformersEngine
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.testing import ByteTokenizer, EchoEnv, ScriptedModel
from agentenv.trajectory import Trajectory


def _model(seed: int, hidden_size: int = 32) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model: nn.Module = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


def _forward_logprobs(model: nn.Module, trajectory: Trajectory) -> torch.Tensor:
    ids = torch.tensor([trajectory.prompt_ids + trajectory.completion_ids])
    with torch.inference_mode():
        logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    start = len(trajectory.prompt_ids)
    return logprobs[start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0]


def _controller(model: nn.Module, **options: Any) -> AsyncController:
    engine = TransformersEngine(model, ByteTokenizer(), max_batch=8, max_length=400)
    config = RolloutConfig(
        batch_size=8, num_envs=8, max_turns=3, max_tokens_per_turn=6, max_tokens_per_episode=400, **options
    )
    return AsyncController(EchoEnv, LLMProxy([engine]), ByteTokenizer(), config)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_recorded_log_probs_are_those_of_the_version_that_each_token_carries(alpha: float) -> None:
    models = {version: _model(version) for version in range(5)}
    with _controller(models[0], asynchrony=alpha) as controller:
        for step in range(4):
            for trajectory in controller.get_batch(step):
                trajectory.validate()
                mask = torch.tensor(trajectory.action_mask)
                recorded = torch.tensor(trajectory.rollout_logprobs)
                versions = set(trajectory.policy_versions) - {-1}
                assert min(versions) >= step - alpha
                # Within a turn that saw an update the keys are of both versions: whole episodes of one only.
                if len(versions) == 1:
                    expected = _forward_logprobs(models[versions.pop()], trajectory)
                    assert torch.allclose(recorded[mask], expected[mask], atol=1e-4)
            controller.sync_weights(models[step + 1].state_dict(), step + 1)


def test_greedy_evaluation_repeats_and_sampled_evaluation_repeats_by_seed() -> None:
    with _controller(_model(0)) as controller:

        def play(**options: Any) -> list[list[int]]:
            return [
                trajectory.completion_ids for trajectory in controller.evaluate(None, range(6), **options)
            ]

        assert play(greedy=True) == play(greedy=True, num_envs=2)
        assert play(sampling_seed=1) == play(sampling_seed=1, num_envs=3)
        assert play(sampling_seed=1) != play(sampling_seed=2)


class _Unsteady(BaseEnv):
    """Its steps take a time of their own in each run; it is deterministic otherwise."""

    worker = "thread"
    pauses = random.Random()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = 1 + (seed or 0) % 3
        return f"Task {(seed or 0) % 7}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.pauses.random() * 0.005)
        self._left -= 1
        return "Go on.", float(len(action) % 2), self._left == 0, False, {}


@pytest.mark.parametrize("options", [{"group_size": 1, "num_envs": 5}, {"group_size": 4, "num_envs": 6}])
def test_a_deterministic_run_repeats_to_the_last_bit_whatever_its_environments_take(
    options: dict[str, Any],
) -> None:
    # 128 wide: the matrix products of a row then round by how many rows there are.
    models = [_model(version, hidden_size=128) for version in range(3)]

    def play(start: int, state: Any = None) -> tuple[list[Any], Any]:
        config = RolloutConfig(
            batch_size=8,
            max_turns=3,
            max_tokens_per_turn=6,
            max_tokens_per_episode=400,
            mode="sync",
            deterministic=True,
            **options,
        )
        engine = TransformersEngine(
            models[start], ByteTokenizer(), max_batch=6, max_length=400, version=start
        )
        batches = []
        with AsyncController(_Unsteady, LLMProxy([engine]), ByteTokenizer(), config) as controller:
            if state is not None:
                controller.load_state_dict(json.loads(state))
            state = None
            for step in range(start, 3):
                if step == 1:
                    state = json.dumps(controller.state_dict())
                batches.append([_content(trajectory) for trajectory in controller.get_batch(step)])
                if step < 2:
                    controller.sync_weights(models[step + 1].state_dict(), step + 1)
        return batches, state

    first, state = play(0)
    second, _ = play(0)
    assert first == second
    resumed, _ = play(1, state)
    assert resumed == first[1:]
    assert len({content[1] for batch in first for content in batch}) == 24  # each episode is one of its own


def _content(trajectory: Trajectory) -> tuple[Any, ...]:
    return (
        trajectory.seed,
        trajectory.episode_id,
        tuple(trajectory.prompt_ids),
        tuple(trajectory.completion_ids),
        tuple(trajectory.rollout_logprobs),
        trajectory.reward,
    )


def test_a_deterministic_run_takes_one_engine_that_can_wait() -> None:
    for engines in ([ScriptedModel(lambda request: "hm")], [ScriptedModel(lambda request: "hm")] * 2):
        with pytest.raises(UsageError, match=r"deterministic is true.*takes one TransformersEngine"):
            AsyncController(
                EchoEnv, LLMProxy(engines), ByteTokenizer(), RolloutConfig(mode="sync", deterministic=True)
            )
