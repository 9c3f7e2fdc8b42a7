"""Everything public comes through `__all__`, and nothing else does."""

import importlib
import types

import pytest

import agentenv


def test_the_package_exports_exactly_these_names() -> None:
    assert sorted(agentenv.__all__) == [
        "AsyncEnv",
        "BaseEnv",
        "Trajectory",
        "__version__",
        "errors",
        "make",
        "register",
        "spec",
    ]


@pytest.mark.parametrize(
    "module",
    [
        "agentenv",
        "agentenv.baselines",
        "agentenv.errors",
        "agentenv.registration",
        "agentenv.testing",
        "agentenv.wrappers",
    ],
)
def test_every_exported_name_exists_and_has_a_docstring(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in loaded.__all__:
        value = getattr(loaded, name)
        if isinstance(value, type | types.FunctionType):
            assert value.__doc__, f"{module}.{name} has no docstring"


def test_every_public_exception_is_exported_and_derives_from_the_base() -> None:
    from agentenv import errors

    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes == set(errors.__all__)
    assert all(issubclass(getattr(errors, name), errors.AgentEnvError) for name in classes)


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib import metadata

    assert agentenv.__version__ == metadata.version("agentenv-rl")
