"""`Verifiers-v0`: an environment written for verifiers, as one of ours.

Invariant: verifiers is imported when an environment is made, not before.
"""

from agentenv.interop.verifiers.env import VerifiersEnv

__all__ = ["VerifiersEnv"]
