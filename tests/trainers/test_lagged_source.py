"""Staleness as an exact variable: which weights sample which batch, under which version, and across a resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, TrainerCallback

from agentenv import BaseEnv
from agentenv.errors import UsageError
from agentenv.inference import LLMProxy
from agentenv.inference.transformers_engine import TransformersEngine
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.testing import ByteTokenizer, ScriptedModel
from agentenv.trajectory import Segment, Trajectory
from agentenv_trainers import SAOConfig, SAOTrainer
from agentenv_trainers.lagged_source import LaggedSource
from agentenv_trainers.testing import ReplayController


class Recorded(ReplayController):
    """Plays every batch with the version of its step, and keeps all weights it was given."""

    def __init__(self, batches: Callable[[int], list[Trajectory]] | None = None) -> None:
        super().__init__(batches or (lambda step: [episode(step), episode(step)]))
        self.given: dict[int, dict[str, Tensor]] = {}

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        super().sync_weights(weights, version)
        self.given[version] = self.weights


def episode(version: int) -> Trajectory:
    return Trajectory(
        prompt_ids=[3],
        completion_ids=[4, 5, 6],
        rollout_logprobs=[-1.0, 0.0, -1.0],
        action_mask=[True, False, True],
        policy_versions=[version, -1, version],
        start_version=version,
        terminated=True,
        end_reason="terminated",
        earlier_segments=[Segment([1], [2, 2], [-1.0, 0.0], [True, False], [version, -1])],
    )


def weights_of(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {"a": torch.randn(3, generator=generator), "b": torch.randn(2, generator=generator).bfloat16()}


@pytest.mark.parametrize(
    ("lag", "played_with"), [(0, [0, 1, 2, 3, 4]), (2, [0, 0, 0, 1, 2]), (9, [0, 0, 0, 0, 0])]
)
def test_batch_n_has_the_weights_and_the_version_of_n_minus_lag(lag: int, played_with: list[int]) -> None:
    inner = Recorded()
    source = LaggedSource(inner, lag)
    for step, version in enumerate(played_with):
        live = weights_of(step)
        source.sync_weights(live, step)
        live["a"].zero_()  # the trainer goes on with its own tensors
        assert inner.synced_versions[-1] == step, "the source counts steps"
        for name, tensor in weights_of(version).items():
            assert torch.equal(inner.given[step][name], tensor)
        first, _ = source.get_batch(step)
        assert first.start_version == version
        assert first.policy_versions == [version, -1, version]
        assert first.earlier_segments[0].policy_versions == [version, -1]


def test_a_state_holds_the_weights_of_all_versions_that_are_still_to_sample() -> None:
    source = LaggedSource(Recorded(), 2)
    for version in range(5):
        source.sync_weights(weights_of(version), version)
    source.get_batch(4)
    state = json.loads(json.dumps(source.state_dict()))
    assert sorted(state["weights"]) == ["2", "3", "4"]

    inner = Recorded()
    continued = LaggedSource(inner, 2)
    continued.load_state_dict(state)
    assert inner.steps == [4], "the source's own state went with it"
    for version, expected in ((4, 2), (5, 3), (6, 4), (7, 5)):
        continued.sync_weights(weights_of(version), version)
        for name, tensor in weights_of(expected).items():
            assert torch.equal(inner.given[version][name], tensor)
            assert inner.given[version][name].dtype == tensor.dtype


def test_for_an_evaluation_the_engines_get_the_newest_weights_and_no_batch_is_taken_of_those() -> None:
    inner = Recorded()
    source = LaggedSource(inner, 2)
    with pytest.raises(UsageError, match="sync_weights must come first"):
        source.catch_up()
    for version in range(4):
        source.sync_weights(weights_of(version), version)
    source.catch_up()
    assert torch.equal(inner.weights["a"], weights_of(3)["a"])
    with pytest.raises(UsageError, match="before the batch of step 3"):
        source.get_batch(3)
    source.sync_weights(weights_of(4), 4)
    assert torch.equal(inner.weights["a"], weights_of(2)["a"])
    assert source.get_batch(4)[0].start_version == 2


def test_versions_that_are_not_there_are_an_error_that_names_them() -> None:
    source = LaggedSource(Recorded(), 2)
    with pytest.raises(UsageError, match=r"version 5 with lag 2 needs the weights of version 3; .* \[5\]"):
        source.sync_weights(weights_of(5), 5)


def test_a_state_of_another_lag_or_of_a_plain_source_is_refused() -> None:
    source = LaggedSource(Recorded(), 2)
    with pytest.raises(UsageError, match="of lag 1, this one has lag 2"):
        source.load_state_dict(LaggedSource(Recorded(), 1).state_dict())
    with pytest.raises(UsageError, match="of lag None"):
        source.load_state_dict(Recorded().state_dict())


@pytest.mark.parametrize("lag", [-1, 1.0, True, None])
def test_a_lag_that_is_no_count_is_refused(lag: Any) -> None:
    with pytest.raises(UsageError, match=r"lag is .*, must be a whole number of at least 0"):
        LaggedSource(Recorded(), lag)


def test_a_source_that_plays_ahead_is_refused_by_its_settings_or_by_its_episodes() -> None:
    settings = RolloutConfig(batch_size=2, asynchrony=1.0)
    controller = AsyncController(ParityEnv, LLMProxy([ScriptedModel(["x"])]), ByteTokenizer(), settings)
    with controller, pytest.raises(UsageError, match="plays ahead"):
        LaggedSource(controller, 2)
    source = LaggedSource(Recorded(lambda step: [episode(step), episode(step - 1)]), 2)
    with pytest.raises(UsageError, match=r"of step 3 was played with the source's versions \[2\], must be 3"):
        source.get_batch(3)


# With the production controller, engine and trainer


class ParityEnv(BaseEnv):
    """Two turns; the reward is whether the text of the last one has an even sum of characters."""

    max_turns = 2

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._turns = 0
        return f"Task {seed}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turns += 1
        done = self._turns == 2
        return "Go on.", float(done and sum(map(ord, action)) % 2 == 0), done, False, {}


class Kept(TrainerCallback):
    """The policy after each step, and the batches as they were trained."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.policies: dict[int, dict[str, Tensor]] = {}
        self.batches: dict[int, list[Trajectory]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def get_batch(self, step: int) -> list[Trajectory]:
        self.batches[step] = self._source.get_batch(step)
        return self.batches[step]

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.policies[version] = {name: tensor.clone() for name, tensor in weights.items()}
        self._source.sync_weights(weights, version)


@pytest.fixture
def run(
    make_policy: Callable[..., Qwen3ForCausalLM], make_config: Callable[..., SAOConfig]
) -> Callable[..., Any]:
    def train(lag: int, resume: str | None = None, **changes: Any) -> tuple[SAOTrainer, Kept]:
        size = ByteTokenizer.vocab_size
        words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")
        policy = make_policy(vocab_size=size, max_position_embeddings=256)
        config = make_config(
            mode="sync",
            num_envs=8,
            max_tokens_per_turn=5,
            max_tokens_per_episode=256,
            learning_rate=1e-2,
            **changes,
        )
        engine = TransformersEngine(policy, ByteTokenizer(), max_batch=8, max_length=256)
        with AsyncController(
            ParityEnv, LLMProxy([engine]), ByteTokenizer(), config.rollout_config()
        ) as controller:
            kept = Kept(LaggedSource(controller, lag))
            trainer = SAOTrainer(policy, config, kept, tokenizer)
            trainer.train(resume_from_checkpoint=resume)
        return trainer, kept

    return train


def logprobs_under(
    policy: Qwen3ForCausalLM, weights: Mapping[str, Tensor], trajectory: Trajectory
) -> list[float]:
    policy.load_state_dict(weights)
    ids = torch.tensor([trajectory.prompt_ids + trajectory.completion_ids])
    with torch.no_grad():
        logprobs = policy.eval()(input_ids=ids).logits[0, :-1].log_softmax(-1)
    all_of_them = logprobs.gather(1, ids[0, 1:, None])[:, 0][len(trajectory.prompt_ids) - 1 :]
    return all_of_them[torch.tensor(trajectory.action_mask)].tolist()


def test_the_trainer_sees_a_staleness_of_lag_exactly_and_the_log_probs_are_those_of_old_weights(
    run: Callable[..., Any], make_policy: Callable[..., Qwen3ForCausalLM]
) -> None:
    trainer, kept = run(2, max_steps=5)
    logs = trainer.state.log_history[:5]
    assert [entry["staleness_mean"] for entry in logs] == [0.0, 1.0, 2.0, 2.0, 2.0]
    assert [entry["staleness_max"] for entry in logs] == [0.0, 1.0, 2.0, 2.0, 2.0]
    policy = make_policy(vocab_size=ByteTokenizer.vocab_size, max_position_embeddings=256)
    for step in (3, 4):
        trajectory = kept.batches[step][0]
        assert trajectory.start_version == step - 2
        reported = [
            lp for lp, m in zip(trajectory.rollout_logprobs, trajectory.action_mask, strict=True) if m
        ]
        assert reported == pytest.approx(
            logprobs_under(policy, kept.policies[step - 2], trajectory), abs=1e-5
        )
        other = logprobs_under(policy, kept.policies[step], trajectory)
        assert max(abs(a - b) for a, b in zip(reported, other, strict=True)) > 1e-3


def test_a_run_that_is_continued_gives_the_losses_of_the_one_that_was_not_cut_short(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    whole, _ = run(2, max_steps=5)
    settings = {"output_dir": str(tmp_path / "cut"), "save_strategy": "steps", "save_steps": 3}
    run(2, max_steps=3, **settings)
    continued, kept = run(2, resume=str(tmp_path / "cut" / "checkpoint-3"), max_steps=5, **settings)
    # Which requests meet in one forward pass of the engine is a matter of timing, and with it the last bit.
    assert [entry["loss"] for entry in continued.state.log_history[3:5]] == pytest.approx(
        [entry["loss"] for entry in whole.state.log_history[3:5]], rel=1e-5
    )
    assert [kept.batches[step][0].start_version for step in (3, 4)] == [1, 2]
