"""Mathematics: Math-v0, one turn, and MathPython-v0, several turns with a Python tool. See this folder's README."""

from .env import MathEnv
from .python_env import MathPythonEnv

__all__ = ["MathEnv", "MathPythonEnv"]
