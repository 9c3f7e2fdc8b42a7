"""Sandboxes of another machine: `agentenv sandbox serve` there, `RemoteBackend` here.

The server needs the extra `service` and a Docker engine, the client `service` alone. docs/sandbox-service.md has the
interface, the limits and what to mind.
"""
