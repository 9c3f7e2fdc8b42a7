"""Household tasks on the engine of ALFWorld: synthetic games, or the official ones."""

from .env import ALFWorldEnv

__all__ = ["ALFWorldEnv"]
