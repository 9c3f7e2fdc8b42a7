"""Environments of other libraries as ours, and ours in theirs; each adapter in a module of its own.

- :mod:`agentenv.interop.trl`: ours in TRL's `GRPOTrainer`;
- :mod:`agentenv.interop.openenv`: ours served by OpenEnv's server, and any OpenEnv server as one of ours;
- :mod:`agentenv.interop.verifiers`: environments of verifiers as ours;
- :mod:`agentenv.interop.hub`: models of runs on the Hugging Face hub.

Invariants:
- Nothing of the core imports these modules before an environment or a command asks for them.
- The other library is imported inside functions; where it is absent, `MissingExtraError` names the extra.
"""
