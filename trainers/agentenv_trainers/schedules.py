"""Learning rates of a run that is continued.

Invariant: with the settings of the run before nothing changes by a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LambdaLR


def keep_rates(schedule: Any, rates: Sequence[Any]) -> None:
    """Go on at the step that a checkpoint restored, but with these rates and the schedule's own course.

    Optimizer and schedule bring the checkpoint's rates along, and a rate that was given for the continued run would be
    ignored. Schedules that are no function of the step are left as they are.

    Args:
        schedule: restored, as its optimizer is.
        rates: of each parameter group, before schedule.
    """
    if not isinstance(schedule, LambdaLR):
        return
    schedule.base_lrs = list(rates)
    groups = zip(schedule.optimizer.param_groups, rates, schedule.lr_lambdas, strict=True)
    for group, rate, factor in groups:
        group["initial_lr"] = rate
        group["lr"] = rate * factor(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]
