"""Tasks from a seed.

Invariants:
- the seed, the split, the levels and the families decide the task, in every process and on every machine;
- a hash of the problem's mathematics, without its wording, says whether it is a training or a held-out task: no seed
  brings a held-out problem into training, and neither does another name or another order of a sum or product.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from agentenv.errors import UsageError
from agentenv_envs.math_reasoning.exact import format_values
from agentenv_envs.math_reasoning.task import MathTask

from .algebra import linear, quadratic, system
from .arithmetic import arithmetic, fractions, modular, sequence
from .draft import Draft
from .words import word

__all__ = ["FAMILIES", "LEVELS", "SPLITS", "check_choice", "generate_task"]

FAMILIES: Final[Mapping[str, Callable[[random.Random, int], Draft]]] = {
    "arithmetic": arithmetic,
    "fractions": fractions,
    "linear": linear,
    "quadratic": quadratic,
    "system": system,
    "modular": modular,
    "sequence": sequence,
    "word": word,
}
LEVELS: Final = (0, 1, 2, 3, 4)
SPLITS: Final = ("train", "heldout")
_HELD_OUT_SHARE: Final = 5
"""One problem in five is held out."""


def generate_task(
    seed: int,
    *,
    split: str = "train",
    levels: Sequence[int] = (0, 1, 2),
    families: Sequence[str] | None = None,
) -> MathTask:
    """The seed's task.

    Args:
        seed: any whole number.
        split: "train" or "heldout".
        levels: of `LEVELS`; one of them is drawn.
        families: of `FAMILIES`; one of them is drawn, by default of all.

    Raises:
        UsageError: a split, level or family that there is not, or none at all.
    """
    check_choice("split", [split], SPLITS)
    check_choice("levels", levels, LEVELS)
    chosen = list(FAMILIES) if families is None else families
    check_choice("families", chosen, tuple(FAMILIES))
    rng = random.Random(f"math:{seed}")
    family, level = rng.choice(list(chosen)), rng.choice(list(levels))
    while True:
        draft = FAMILIES[family](rng, level)
        digest = hashlib.blake2b(repr((family, *draft.key)).encode(), digest_size=6).digest()
        if (int.from_bytes(digest) % _HELD_OUT_SHARE == 0) == (split == "heldout"):
            break
    return MathTask(
        task_id=f"{family}-{level}-{digest.hex()}",
        family=family,
        problem=draft.problem,
        answer=format_values(draft.values),
        level=level,
        values=draft.values,
        any_order=draft.any_order,
        program=draft.program,
    )


def check_choice(name: str, values: Any, allowed: Sequence[Any]) -> None:
    """Refuse values that are not allowed, and none at all.

    Raises:
        UsageError: naming argument, value and what is allowed.
    """
    listed = ", ".join(map(str, allowed))
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise UsageError(f"{name} must be a list of one or more of {listed}, got {values!r}")
    for value in values:
        if isinstance(value, bool | float) or value not in allowed:
            raise UsageError(f"{name} must be of {listed}, got {value!r}")
