"""Embedded SWE tasks: generated from a seed, no data set and no network needed."""

from .tasks import LEVELS, SPLITS, EmbeddedTask, generate_task

__all__ = ["LEVELS", "SPLITS", "EmbeddedTask", "generate_task"]
