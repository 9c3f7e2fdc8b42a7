"""Sandboxes in which an agent's commands run: Docker containers, or subprocesses where there is no engine.

backend = open_backend("auto")
sandbox = backend.acquire(SandboxSpec(read_only=True))
result = sandbox.run("python --version")
backend.release(sandbox)
backend.close()
"""

from .base import BASE_IMAGE, CommandResult, Sandbox, SandboxBackend, SandboxSpec
from .opening import BACKENDS, SharedBackend, open_backend, reap_in_background

__all__ = [
    "BACKENDS",
    "BASE_IMAGE",
    "CommandResult",
    "Sandbox",
    "SandboxBackend",
    "SandboxSpec",
    "SharedBackend",
    "open_backend",
    "reap_in_background",
]
