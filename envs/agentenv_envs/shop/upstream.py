"""The published engine's scoring, for comparison with results that were made with it (`compat="upstream"`).

What it does otherwise than `compat="fixed"`:

- r_type is always 1: it compares the search words that two products were collected by, which are empty for all of them;
- the highest price that counts as kept, and the price that a purchase is scored with, are drawn from the random numbers
  of the slot that an episode happens to run in: members of a group, with the same actions, get different rewards;
- `reset` gives away the goal, in `info["goal"]`.

Invariant: the random numbers are those of a slot, not of the task's seed; the same slot plays the same numbers again.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Final

from .records import Product, Task
from .session import money

__all__ = ["R_TYPE", "leaked_goal", "random_price", "with_random_cap"]

R_TYPE: Final = 1.0
_RUNGS: Final = 4
_CAP_STEPS: Final = (10.0, 20.0, 30.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 100000.0)
"""Caps that may be drawn; the numbers are ours, as the fault is that any are drawn at all."""


def with_random_cap(task: Task, target: Product, slot: random.Random) -> Task:
    """The wish with a cap that this slot draws: one of the next four steps above the target's price."""
    steps = [step for step in _CAP_STEPS if step > target.price][:_RUNGS] or [target.price * 2]
    cap = slot.choice(steps)
    more = f"（价格低于{money(cap)}）" if task.language == "zh" else f" (Price below {money(cap)}.)"
    return replace(task, price_cap=cap, instruction=task.instruction + more)


def random_price(product: Product, slot: random.Random) -> float:
    """What a purchase is scored with: somewhere in the product's range, whatever was chosen."""
    return slot.uniform(product.price, product.price_high)


def leaked_goal(task: Task, target: Product) -> dict[str, Any]:
    """What `reset` tells that a policy must not see."""
    return {
        "asin": target.id,
        "title": target.title,
        "attributes": [need.value for need in task.attributes],
        "options": {need.axis: need.value for need in task.options},
        "price_cap": task.price_cap,
    }
