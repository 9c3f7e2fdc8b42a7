"""The callback that ends a run on request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from agentenv_trainers.recipe.recorder import StepRecorder


@pytest.mark.parametrize(("policy_updates", "ends_at"), [(1, 3), (2, 4), (3, 3), (5, 5)])
def test_a_run_ends_on_request_when_its_batch_has_had_all_updates(policy_updates: int, ends_at: int) -> None:
    seen: list[int] = []
    recorder = StepRecorder(seen.append, lambda step, numbers: None, lambda: seen[-1] >= 3)
    control = TrainerControl()
    while not control.should_training_stop:
        state = TrainerState(global_step=len(seen) + 1)
        recorder.on_step_end(SimpleNamespace(policy_updates=policy_updates), state, control)
        assert control.should_save == control.should_training_stop
    assert seen[-1] == ends_at
