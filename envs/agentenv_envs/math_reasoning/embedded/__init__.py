"""Problems generated from a seed, with exact answers."""

from .tasks import FAMILIES, LEVELS, SPLITS, generate_task

__all__ = ["FAMILIES", "LEVELS", "SPLITS", "generate_task"]
