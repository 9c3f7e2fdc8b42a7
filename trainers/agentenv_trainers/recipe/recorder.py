"""The callback by which a recipe hears of finished steps and ends training when the user asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState


class StepRecorder(TrainerCallback):
    """Hands on every step and its numbers.

    Args:
        on_step: called with the number of finished steps, before a checkpoint of that step is written.
        on_numbers: called with the step and its numbers, whenever the trainer logs.
        is_requested: asked after every step; once it is true, training stops with a checkpoint as soon as the batch has
            had all of its updates: a part of them could not be continued, and the run would want one batch more.
    """

    def __init__(
        self,
        on_step: Callable[[int], None],
        on_numbers: Callable[[int, Mapping[str, float]], None],
        is_requested: Callable[[], bool],
    ) -> None:
        self._on_step, self._on_numbers, self._is_requested = on_step, on_numbers, is_requested

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A step is finished."""
        self._on_step(state.global_step)
        if self._is_requested() and state.global_step % args.policy_updates == 0:
            control.should_save = True
            control.should_training_stop = True

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """A step's numbers; the summary that transformers logs at the end of training is none."""
        if logs and "train_runtime" not in logs:
            numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
            self._on_numbers(state.global_step, numbers)
