"""Software-engineering tasks in sandboxes; registered as SWE-v0."""

from .env import SWEEnv

__all__ = ["SWEEnv"]
