"""What the wrappers have in common.

Invariants:
- `max_turns`, the advice to rollouts, is visible through any number of wrappers.
- Wrappers never turn `truncated` into `terminated` or the other way round.
"""

import gymnasium

__all__ = ["TextWrapper"]


class TextWrapper(gymnasium.Wrapper[str, str, str, str]):
    """Base of wrappers around text environments."""

    @property
    def max_turns(self) -> int | None:
        """The wrapped environment's advice; None if it gives none."""
        value: int | None = getattr(self.env, "max_turns", None)
        return value
