"""Whatever an environment returns, it costs that episode and not the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentenv import AsyncEnv, Trajectory
from agentenv.errors import RolloutError, UsageError
from agentenv.inference import LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.simulation.clock import VirtualLoop
from agentenv.testing import ByteTokenizer, ScriptedModel


class _Opaque:
    def __repr__(self) -> str:
        raise RuntimeError("no text for this")


class _Text(ByteTokenizer):
    """Refuses lone surrogates, as the tokenizers of Hugging Face do."""

    def encode(self, text: str, **options: Any) -> list[int]:
        text.encode("utf-8")
        return super().encode(text, **options)


_ITSELF: dict[str, Any] = {}
_ITSELF["self"] = _ITSELF

_STEPS = {
    "nothing": None,
    "too few": ("more", 1.0, True),
    "no text": (b"more", 1.0, True, False, {}),
    "an observation without repr": (_Opaque(), 1.0, True, False, {}),
    "a reward without repr": ("more", _Opaque(), True, False, {}),
    "a reward that is no number": ("more", "1.0", True, False, {}),
    "a reward that is none": ("more", float("nan"), True, False, {}),
    "a reward too large": ("more", 10**400, True, False, {}),
    "several rewards": ("more", np.array([1.0, 2.0]), True, False, {}),
    "several flags": ("more", 1.0, np.array([True, False]), False, {}),
    "a flag that is none": ("more", 1.0, 1, False, {}),
    "no info": ("more", 1.0, True, False, None),
}
_INFOS = {"itself": _ITSELF, "without repr": {"value": _Opaque()}, "a key without repr": {_Opaque(): 1}}


def _play(env_fn: type[AsyncEnv], *, keep_group: Any = None, **settings: Any) -> dict[str, int]:
    """Three batches; returns what was discarded."""
    loop = VirtualLoop()
    config = RolloutConfig(
        **{
            "batch_size": 4,
            "num_envs": 4,
            "worker": "inline",
            "max_retries": 0,
            "batch_timeout_s": 100.0,
            **settings,
        }
    )
    controller = AsyncController(
        env_fn,
        LLMProxy([ScriptedModel(["a"], repeat=True)]),
        _Text(),
        config,
        task_seeds=iter(range(1000)),
        loop_factory=lambda: loop,
        keep_group=keep_group,
    )
    with controller:
        for step in range(3):
            assert len(controller.get_batch(step)) == 4
            controller.sync_weights({}, step + 1)
        discarded: dict[str, int] = controller.counts()["discarded"]
    return discarded


class _Env(AsyncEnv):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seed = seed or 0
        return "task", {}

    async def step(self, action: str) -> Any:
        return "done", 1.0, True, False, {}


@pytest.mark.parametrize("name", _STEPS)
def test_a_malformed_step_costs_its_episode(name: str) -> None:
    class Env(_Env):
        async def step(self, action: str) -> Any:
            return _STEPS[name] if self.seed % 4 == 1 else await super().step(action)

    discarded = _play(Env)
    assert discarded and all(reason.startswith("step_") for reason in discarded)


@pytest.mark.parametrize("name", _INFOS)
def test_an_info_that_is_no_json_costs_at_most_its_episode(name: str) -> None:
    class Env(_Env):
        async def step(self, action: str) -> Any:
            return "done", 1.0, True, False, _INFOS[name] if self.seed % 4 == 1 else {}

    assert all(reason.startswith("step_") for reason in _play(Env))


@pytest.mark.parametrize(
    "result",
    [
        None,
        "task",
        ("task", None),
        (1, {}),
    ],
    ids=repr,
)
def test_a_malformed_reset_costs_its_episode(result: Any) -> None:
    class Env(_Env):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            good = await super().reset(seed=seed)
            return result if self.seed % 4 == 1 else good

    discarded = _play(Env, reset_retries=0)
    assert discarded and all(reason.startswith("reset_") for reason in discarded)


def test_what_has_no_utf_8_form_in_an_observation_becomes_a_question_mark() -> None:
    seen: list[str] = []

    class Env(_Env):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            await super().reset(seed=seed)
            return "task \udc80 über", {}

        async def step(self, action: str) -> Any:
            done, self.seed = self.seed == -1, -1
            return "o \udcff", 1.0, done, False, {}

    def keep(group: list[Trajectory]) -> bool:
        seen.extend(message["content"] for message in group[0].messages if message["role"] == "user")
        return True

    assert not _play(Env, keep_group=keep)
    assert set(seen) == {"task ? über", "o ?"}


def test_an_evaluation_without_slots_is_refused() -> None:
    loop = VirtualLoop()
    model = ScriptedModel(["a"], repeat=True)
    with (
        AsyncController(
            _Env, LLMProxy([model]), _Text(), RolloutConfig(), loop_factory=lambda: loop
        ) as controller,
        pytest.raises((UsageError, ValueError), match="num_envs is -1"),
    ):
        controller.evaluate(_Env, [1, 2], num_envs=-1)


def test_a_call_from_inside_the_loop_is_refused_instead_of_waited_for() -> None:
    controller: AsyncController

    def keep(group: Any) -> bool:
        controller.metrics()
        return True

    config = RolloutConfig(
        batch_size=4, num_envs=4, worker="inline", reset_timeout_s=20.0, step_timeout_s=20.0
    )
    controller = AsyncController(
        _Env, LLMProxy([ScriptedModel(["a"], repeat=True)]), ByteTokenizer(), config, keep_group=keep
    )
    with controller, pytest.raises(RolloutError, match="from inside"):
        controller.get_batch(0)
