"""Agent programs as they are: an OpenAI-compatible endpoint over an LLMProxy that records token ids and log-probs.

:class:`AgentRunner` stands in an environment's place and plays a program per episode; ``agentenv proxy`` serves an
endpoint by itself. See docs/agents-as-they-are.md.
"""

from agentenv.agents.program import AgentCall, AgentOutcome, PlayFn, ProgramResult, run_program
from agentenv.agents.runner import AgentRunner

__all__ = ["AgentCall", "AgentOutcome", "AgentRunner", "PlayFn", "ProgramResult", "run_program"]
