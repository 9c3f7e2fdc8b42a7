"""Public fakes of the rollout side, for tests of trainers: no engine, no environment, no thread.

Invariants:

* Both keep what the trainer did to them (``synced_versions``, ``steps``), so that tests can ask.
* :class:`BanditController` samples from exactly the weights it was last given and reports exact log-probs.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentenv.trajectory import Trajectory


class ReplayController:
    """Gives the batches of a function of the step.

    Args:
        batches: training step to trajectories.
    """

    def __init__(self, batches: Callable[[int], list[Trajectory]]) -> None:
        self._batches = batches
        self.steps: list[int] = []
        """Steps of the batches taken, continued ones included."""
        self.synced_versions: list[int] = []
        self.weights: dict[str, Tensor] = {}
        """Copy of the last weights given."""
        self.started = 0

    def start(self) -> None:
        """Count the call."""
        self.started += 1

    def get_batch(self, step: int) -> list[Trajectory]:
        """The batch of the step."""
        self.steps.append(step)
        return self._batches(step)

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy the weights."""
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}
        self.synced_versions.append(version)

    def metrics(self) -> Mapping[str, float]:
        """Nothing to report."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The steps so far."""
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from those steps."""
        self.steps = list(state["steps"])


class BanditController(ReplayController):
    """Two-turn episodes of a causal LM whose reward depends on the tokens it wrote.

    An episode is: a prompt token, one action of ``action_length`` tokens, one observation token, one more
    action.

    Args:
        policy: architecture to sample with; copied.
        batch_size: trajectories per batch.
        reward: sampled token ids of the episode to its reward.
        prompt_ids: first tokens, one is drawn per episode.
        observation_id: the token between the actions.
        action_length: tokens per action.
        seed: of prompts and samples.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        *,
        batch_size: int,
        reward: Callable[[Sequence[int]], float],
        prompt_ids: Sequence[int] = (1, 2, 3),
        observation_id: int = 0,
        action_length: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__(lambda step: self._play())
        self._policy = copy.deepcopy(policy).eval()
        self._batch_size = batch_size
        self._reward = reward
        self._prompt_ids = tuple(prompt_ids)
        self._observation_id = observation_id
        self._action_length = action_length
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self.mean_rewards: list[float] = []
        """Mean reward of each batch."""

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample from these weights from now on."""
        super().sync_weights(weights, version)
        self._policy.load_state_dict(self.weights)

    @torch.no_grad()
    def _play(self) -> list[Trajectory]:
        rows = self._batch_size
        ids = torch.tensor([[self._random.choice(self._prompt_ids)] for _ in range(rows)])
        logprobs, mask = torch.zeros(rows, 0), []
        for turn in range(2):
            if turn:
                ids = torch.cat([ids, torch.full((rows, 1), self._observation_id)], dim=1)
                logprobs = torch.cat([logprobs, torch.zeros(rows, 1)], dim=1)
                mask.append(False)
            for _ in range(self._action_length):
                distribution = (
                    self._policy(input_ids=ids, use_cache=False).logits[:, -1].float().log_softmax(-1)
                )
                token = torch.multinomial(distribution.exp(), 1, generator=self._generator)
                ids = torch.cat([ids, token], dim=1)
                logprobs = torch.cat([logprobs, distribution.gather(1, token)], dim=1)
                mask.append(True)
        version = self.synced_versions[-1]
        batch = [
            self._trajectory(i, row, lp, mask, version)
            for i, (row, lp) in enumerate(zip(ids.tolist(), logprobs.tolist(), strict=True))
        ]
        self.mean_rewards.append(sum(t.reward for t in batch) / len(batch))
        return batch

    def _trajectory(
        self, index: int, ids: list[int], logprobs: list[float], mask: list[bool], version: int
    ) -> Trajectory:
        completion = ids[1:]
        return Trajectory(
            prompt_ids=ids[:1],
            completion_ids=completion,
            rollout_logprobs=logprobs,
            action_mask=list(mask),
            policy_versions=[version if is_action else -1 for is_action in mask],
            reward=self._reward([t for t, is_action in zip(completion, mask, strict=True) if is_action]),
            terminated=True,
            end_reason="terminated",
            episode_id=f"{version}-{index}",
            start_version=version,
            turns=2,
        )
