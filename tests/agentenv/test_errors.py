"""Exceptions: what they say, and that they survive a process boundary."""

import pickle

import pytest

from agentenv import errors


def test_usage_errors_are_value_errors() -> None:
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.UnknownEnvironmentError, errors.UsageError)


def test_a_missing_extra_says_how_to_install_it() -> None:
    error = errors.MissingExtraError("docker", "docker")
    assert str(error) == "docker is not installed; pip install 'agentenv-rl[docker]'"


def test_sandbox_failures_are_not_the_fault_of_the_policy() -> None:
    assert issubclass(errors.SandboxTimeoutError, errors.SandboxError)
    assert issubclass(errors.SandboxLostError, errors.SandboxError)
    assert issubclass(errors.SandboxError, errors.InfrastructureError)
    assert not issubclass(errors.EnvError, errors.InfrastructureError)


@pytest.mark.parametrize(
    "error",
    [
        errors.MissingExtraError("vllm", "vllm"),
        errors.EpisodeTimeoutError("step"),
        errors.EpisodeTimeoutError("reset", "reset took more than 5 s"),
        errors.SandboxError("gone"),
    ],
)
def test_errors_with_fields_survive_pickling(error: errors.AgentEnvError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
