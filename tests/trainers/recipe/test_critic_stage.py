"""The recipe's stage that pretrains the critic: saved, used again by another run, not repeated by a resumed one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentenv_trainers import Critic, SAOConfig, SAOTrainer
from agentenv_trainers.recipe import Experiment, Parsed, RecipeArguments

MakeConfig = Callable[..., SAOConfig]


class Rollouts:
    """Plays nothing: gives episodes of the seeds."""

    def __init__(self, make_episodes: Callable[..., Any]) -> None:
        self._make_episodes = make_episodes
        self.played: list[int] = []

    def evaluate(self, env: Any, seeds: Any, on_result: Any) -> Any:
        self.played.append(len(seeds))
        episodes = self._make_episodes(len(seeds), seed=7)
        for episode in episodes:
            on_result(episode)
        return episodes

    def stop(self) -> None:
        pass

    def counts(self) -> dict[str, Any]:
        return {"produced": 0, "consumed": 0, "buffered": 0, "running": 0, "discarded": {}}


@pytest.fixture
def run(
    make_policy: Callable[..., Any], make_episodes: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> Callable[..., tuple[Rollouts, torch.Tensor]]:
    """Run the stage in a directory; gives the rollouts and the critic's values of some episodes."""

    def run_stage(name: str, make_config: MakeConfig, *, resume: bool = False, **settings: Any) -> Any:
        config = make_config(output_dir=str(tmp_path / name), **settings)
        rollouts = Rollouts(make_episodes)
        parsed = Parsed(RecipeArguments(resume=resume), config, {}, frozenset())
        with Experiment("name", parsed, rollouts, eval_env=lambda: None, eval_tasks="") as experiment:  # type: ignore[arg-type]
            trainer = SAOTrainer(make_policy(), config, experiment.rollouts, tokenizer)
            experiment.pretrain_critic(trainer, lambda: None)  # type: ignore[arg-type, return-value]
            assert trainer._values_pretrained == bool(config.value_pretrain_episodes)
        batch = trainer._collate(make_episodes(4, seed=9))
        return rollouts, trainer.critic_learner.values(batch).tokens

    return run_stage


def test_the_pretrained_critic_is_saved_and_another_run_starts_with_its_values(
    run: Callable[..., Any], make_config: MakeConfig, tokenizer: Any, tmp_path: Path
) -> None:
    settings = {"value_pretrain_episodes": 20, "value_pretrain_steps": 3}
    rollouts, values = run("first", make_config, **settings, value_pretrain_learning_rate=1e-2)
    assert rollouts.played == [20]
    assert values.abs().max() > 0.01
    record = json.loads((tmp_path / "first" / "run.json").read_text())
    assert record["critic"]["steps"] == 3
    assert record["critic"]["trajectories"] == 18  # a tenth is held out
    assert Critic.from_pretrained(tmp_path / "first" / "critic", tokenizer).head_is_trained
    rollouts, again = run("second", make_config, **settings, critic_model=str(tmp_path / "first" / "critic"))
    assert rollouts.played == []
    assert torch.equal(again, values)
    assert not (tmp_path / "second" / "critic").exists()


def test_a_run_that_was_interrupted_after_the_pretraining_does_not_repeat_it(
    run: Callable[..., Any], make_config: MakeConfig
) -> None:
    settings = {"value_pretrain_episodes": 20, "value_pretrain_steps": 3}
    _, values = run("run", make_config, **settings, value_pretrain_learning_rate=1e-2)
    rollouts, again = run("run", make_config, resume=True, **settings)
    assert rollouts.played == []
    assert torch.equal(again, values)


def test_the_steps_are_those_of_the_settings_and_none_means_no_stage(
    run: Callable[..., Any], make_config: MakeConfig, tmp_path: Path
) -> None:
    run("five", make_config, value_pretrain_episodes=20, value_pretrain_steps=5)
    assert json.loads((tmp_path / "five" / "run.json").read_text())["critic"]["steps"] == 5
    rollouts, values = run("none", make_config)
    assert rollouts.played == []
    assert not values.any()
    assert not (tmp_path / "none" / "critic").exists()
