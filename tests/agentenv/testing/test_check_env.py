"""The environment checker finds each departure from the contract, and passes what keeps it."""

import random
from typing import Any

import gymnasium
import pytest

import agentenv
from agentenv.errors import EnvError
from agentenv.testing import EchoEnv, check_env

Result = tuple[str, float, bool, bool, dict[str, Any]]


def _solution(seed: int) -> str:
    observation, _ = EchoEnv().reset(seed=seed)
    return observation.removeprefix("Say the word ").rstrip(".")


def test_echo_env_keeps_the_contract() -> None:
    check_env(EchoEnv(), actions=["no", _solution(0)])


def test_the_environment_is_closed_and_the_random_state_restored() -> None:
    class Closing(EchoEnv):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    env = Closing()
    random.seed(12)
    state = random.getstate()
    check_env(env)
    assert env.closed == 2
    assert random.getstate() == state


class GlobalRandom(EchoEnv):
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"number {random.random()}", {}


class Remembers(EchoEnv):
    resets = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self.resets += 1
        observation, _ = super().reset(seed=seed)
        return observation, {"task_id": f"task-{self.resets}"}


class RaisesOnNonsense(EchoEnv):
    def step(self, action: str) -> Result:
        if not action:
            raise KeyError("no command")
        return super().step(action)


class FourTuple(EchoEnv):
    def step(self, action: str) -> Result:
        return super().step(action)[:4]  # type: ignore[return-value]


class WordReward(EchoEnv):
    def step(self, action: str) -> Result:
        observation, _, *rest = super().step(action)
        return observation, "one", *rest  # type: ignore[return-value]


class NanReward(EchoEnv):
    def step(self, action: str) -> Result:
        observation, _, *rest = super().step(action)
        return observation, float("nan"), *rest  # type: ignore[return-value]


class IntTerminated(EchoEnv):
    def step(self, action: str) -> Result:
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, 0, truncated, info


class BytesObservation(EchoEnv):
    def step(self, action: str) -> Result:
        return b"bytes", *super().step(action)[1:]  # type: ignore[return-value]


class NoInfo(EchoEnv):
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return super().reset(seed=seed)[0]  # type: ignore[return-value]


class OldReset(EchoEnv):
    def reset(self) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        return super().reset()


class ObjectInInfo(EchoEnv):
    def step(self, action: str) -> Result:
        return *super().step(action)[:4], {"env": self}  # type: ignore[return-value]


class TextMetric(EchoEnv):
    def step(self, action: str) -> Result:
        return *super().step(action)[:4], {"metrics": {"length": "long"}}  # type: ignore[return-value]


class SharedInfo(EchoEnv):
    info: dict[str, Any]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self.info = {"turns": 0}
        return super().reset(seed=seed)

    def step(self, action: str) -> Result:
        self.info["turns"] += 1
        return *super().step(action)[:4], self.info  # type: ignore[return-value]


class RandomReward(EchoEnv):
    count = 0

    def step(self, action: str) -> Result:
        self.count += 1
        observation, _, *rest = super().step(action)
        return observation, float(self.count), *rest  # type: ignore[return-value]


class BoxAction(EchoEnv):
    action_space = gymnasium.spaces.Discrete(2)  # type: ignore[assignment]


class ClosesOnce(EchoEnv):
    handle: list[int] | None = None

    def close(self) -> None:
        if self.handle is not None:
            raise RuntimeError("closed twice")
        self.handle = []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (GlobalRandom, r"reset\(seed=0\) gave two different first observations"),
        (Remembers, r"two values of info\['task_id'\]: 'task-1' and 'task-2'"),
        (RaisesOnNonsense, r"step\(''\) raised KeyError.*answer a malformed action with an observation"),
        (FourTuple, r"must return \(observation, reward, terminated, truncated, info\)"),
        (WordReward, "finite number as reward, got 'one'"),
        (NanReward, "finite number as reward, got nan"),
        (IntTerminated, "must return a bool as terminated, got 0"),
        (BytesObservation, "must return a string as observation, got b'bytes'"),
        (NoInfo, r"must return \(observation, info\), got 'Say the word"),
        (OldReset, r"reset\(seed=0, options=None\) raised TypeError"),
        (ObjectInInfo, "info must be what JSON can hold: ObjectInInfo is not JSON serializable"),
        (TextMetric, r"info\['metrics'\] must map names to numbers, got 'length': 'long'"),
        (SharedInfo, "info of action 0 was changed by later steps"),
        (RandomReward, "went two ways at action 0 .*: reward was"),
        (BoxAction, "action_space must be a TextSpace"),
        (ClosesOnce, "close must be idempotent"),
    ],
)
def test_a_departure_is_found_and_named(kind: type[agentenv.BaseEnv], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        check_env(kind(), actions=["no", "no"])


def test_an_episode_that_ends_before_its_actions_do_is_named() -> None:
    with pytest.raises(EnvError, match="ended at action 2 of 4"):
        check_env(EchoEnv(), actions=["no"] * 4)


def test_noise_in_later_observations_can_be_allowed() -> None:
    class Timed(EchoEnv):
        count = 0

        def step(self, action: str) -> Result:
            self.count += 1
            return f"took {self.count} ms", *super().step(action)[1:]  # type: ignore[return-value]

    check_env(Timed(), actions=["no", "no"], deterministic=False)
    with pytest.raises(EnvError, match="observation was"):
        check_env(Timed(), actions=["no", "no"])


@pytest.mark.parametrize("max_turns", [0, 2.5, "3", True])
def test_odd_advice_on_turns_is_found(max_turns: Any) -> None:
    env = EchoEnv()
    env.max_turns = max_turns
    with pytest.raises(EnvError, match="max_turns must be None or a whole number"):
        check_env(env)


def test_wrapped_environments_can_be_checked() -> None:
    check_env(gymnasium.wrappers.TimeLimit(EchoEnv(max_turns=8), 4), actions=["no"])
