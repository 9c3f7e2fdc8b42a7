"""Fixtures of the text environments' tests."""

import random
from collections.abc import Callable
from typing import Any

import pytest

import agentenv
from agentenv_envs.text.task_env import TextTaskEnv

Play = Callable[..., list[tuple[str, float, bool, bool, dict[str, Any]]]]


@pytest.fixture
def play() -> Play:
    """Plays a whole episode of the demonstrator: action and what it led to, turn by turn."""

    def episode(
        env: TextTaskEnv[Any], *, seed: int, skill: float = 1.0, rng: random.Random | None = None
    ) -> list[tuple[str, float, bool, bool, dict[str, Any]]]:
        rng = rng or random.Random(0)
        env.reset(seed=seed)
        steps = []
        while not steps or not (steps[-1][2] or steps[-1][3]):
            steps.append(env.step(env.demonstrate(skill, rng)))
        return steps

    return episode


@pytest.fixture(params=["KeyDoor-v0", "GuessNumber-v0", "ToolArithmetic-v0", "StyledReply-v0"])
def name(request: pytest.FixtureRequest) -> str:
    """Each of the environments."""
    id: str = request.param
    assert agentenv.spec(id).entry_point is not None
    return id
