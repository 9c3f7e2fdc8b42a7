"""OpenEnv: an environment of ours as a server that OpenEnv's clients use, and a server of OpenEnv as one of ours.

Invariant: OpenEnv is imported when a server is made or a client connects, not before.
"""

from agentenv.interop.openenv.client import OpenEnvClientEnv

__all__ = ["OpenEnvClientEnv"]
