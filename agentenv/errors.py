"""Every exception that agentenv raises on purpose.

    AgentEnvError
    ├── UsageError (also ValueError)       bad input of the user: one line on stderr, exit code 2
    │   ├── MissingExtraError              an optional dependency is not installed
    │   └── UnknownEnvironmentError        no such environment id
    ├── ModelError                         an inference engine or its client failed
    ├── EnvError                           an environment broke its contract or raised
    │   └── EpisodeTimeoutError            a stage of an episode ran past its deadline
    ├── ToolError                          a tool that the agent called failed outside the agent's control
    ├── RewardError                        an answer could not be graded
    ├── InfrastructureError                not the policy's fault
    │   └── SandboxError                   the sandbox or its engine failed
    │       ├── SandboxLostError           the machine or service that held it is gone, or forgot it
    │       └── SandboxTimeoutError        the sandbox's engine did not answer in time
    └── RolloutError                       the whole run must stop

Invariants:
- One base class, one flat class per boundary.
- An `InfrastructureError` never becomes a reward of 0: the episode is left out of losses and baselines.
- Authors of environments raise plain Python; the rollout classifies what they raise.
"""

__all__ = [
    "AgentEnvError",
    "EnvError",
    "EpisodeTimeoutError",
    "InfrastructureError",
    "MissingExtraError",
    "ModelError",
    "RewardError",
    "RolloutError",
    "SandboxError",
    "SandboxLostError",
    "SandboxTimeoutError",
    "ToolError",
    "UnknownEnvironmentError",
    "UsageError",
]


class AgentEnvError(Exception):
    """Base of all exceptions of agentenv."""


class UsageError(AgentEnvError, ValueError):
    """Bad input by the user; the message names the input, its value and what is allowed.

    Command lines and recipes print it as one line on stderr and exit with code 2.
    """


class MissingExtraError(UsageError):
    """A feature needs an optional dependency that is not installed.

    Args:
        package: import or distribution name of what is missing.
        extra: the extra of `agentenv-rl` that installs it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; pip install 'agentenv-rl[{extra}]'")
        self.package = package
        self.extra = extra

    def __reduce__(self) -> tuple[type["MissingExtraError"], tuple[str, str]]:
        return type(self), (self.package, self.extra)


class UnknownEnvironmentError(UsageError):
    """No environment of this id is registered; the message suggests close ones."""


class ModelError(AgentEnvError):
    """An inference engine, or the client of one, failed."""


class EnvError(AgentEnvError):
    """An environment raised, or returned what its contract does not allow."""

    origin: str | None = None
    """Name of the exception that the environment raised; None where there was none."""


class EpisodeTimeoutError(EnvError):
    """A stage of an episode ran past its deadline.

    Args:
        stage: which one: "reset", "step", "generate", "reward", "episode" and the like.
        message: the rest of the story; by default only the stage is named.
    """

    def __init__(self, stage: str, message: str | None = None) -> None:
        super().__init__(message or f"stage {stage!r} of the episode ran past its deadline")
        self.stage = stage

    def __reduce__(self) -> tuple[type["EpisodeTimeoutError"], tuple[str, str]]:
        return type(self), (self.stage, str(self))


class ToolError(AgentEnvError):
    """A tool that the agent called failed for a reason that is not in the agent's call."""


class RewardError(AgentEnvError):
    """An answer could not be graded; this is not a reward of 0."""


class InfrastructureError(AgentEnvError):
    """A failure that is not the policy's fault: the episode is left out of losses and baselines."""


class SandboxError(InfrastructureError):
    """A sandbox, or the engine that runs it, failed."""


class SandboxLostError(SandboxError):
    """The machine or the service that held the sandbox is gone, or knows it no more."""


class SandboxTimeoutError(SandboxError):
    """The sandbox's engine did not answer in time (a command that runs too long is no exception)."""


class RolloutError(AgentEnvError):
    """The whole run must stop: failure rate above its limit, a dead worker, a missed deadline for a batch."""
