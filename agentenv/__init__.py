"""Environments, asynchronous rollouts and trainers for language-model agents: the core.

Invariants:
- Importing this package loads neither torch nor transformers; only `agentenv.inference.transformers_engine`
  needs them.
- The core knows no environment package and no trainer; they plug in by name.
"""

from agentenv import errors
from agentenv.env import AsyncEnv, BaseEnv
from agentenv.registration import make, register, spec
from agentenv.trajectory import Trajectory

__version__ = "0.1.0"

__all__ = ["AsyncEnv", "BaseEnv", "Trajectory", "__version__", "errors", "make", "register", "spec"]
