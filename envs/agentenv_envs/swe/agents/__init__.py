"""Agent programs with a loop of their own on the tasks of SWE-v0: see docs/agents-as-they-are.md."""

from .launching import Job, Launch, Launcher, command_line, mini_swe_agent, openhands
from .programs import SWEAgentPrograms

__all__ = ["Job", "Launch", "Launcher", "SWEAgentPrograms", "command_line", "mini_swe_agent", "openhands"]
