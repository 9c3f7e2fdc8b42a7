"""Cancellation at each await of EnvManager, LLMProxy and the scheduler: nothing is lost, left behind or stuck."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentenv import AsyncEnv, BaseEnv
from agentenv.inference import Generation, GenerationRequest, LLMProxy
from agentenv.rollout import AsyncController, EpisodeTicket, RolloutConfig, SlotContext, TaskLedger
from agentenv.rollout.barrier import TurnBarrier
from agentenv.rollout.env_manager import EnvManager
from agentenv.rollout.scheduler import EpisodeScheduler
from agentenv.simulation.clock import VirtualLoop
from agentenv.testing import ByteTokenizer, ScriptedModel
from agentenv.trajectory import Trajectory

# The tests are no package (import mode importlib), so the helper beside them is loaded by its path.
_SPEC = importlib.util.spec_from_file_location("cancelling", Path(__file__).with_name("cancelling.py"))
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules["cancelling"] = _MODULE
_SPEC.loader.exec_module(_MODULE)
cancel_everywhere, Cancelling = _MODULE.cancel_everywhere, _MODULE.Cancelling

_TOKENIZER = ByteTokenizer()


def _virtual(coroutine: Coroutine[Any, Any, None]) -> None:
    runner = VirtualLoop()
    try:
        runner.call(coroutine)
    finally:
        runner.stop()


def _real(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


class Env(AsyncEnv):
    """Two turns; every call takes a second, ``close`` too. The first ``failing`` resets fail."""

    open = 0
    failing = 0

    def __init__(self) -> None:
        self.is_open = True
        Env.open += 1

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(1.0)
        if Env.failing:
            Env.failing -= 1
            raise OSError("not yet")
        self.turn = 0
        return "task", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(1.0)
        self.turn += 1
        return "more", 0.5, self.turn == 2, False, {}

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(1.0)
        Env.open -= self.is_open
        self.is_open = False


class PlainEnv(BaseEnv):
    """Two turns, at once."""

    open = 0

    def __init__(self) -> None:
        self.is_open = True
        PlainEnv.open += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return "task", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return "more", 0.5, self.turn == 2, False, {}

    def close(self) -> None:
        PlainEnv.open -= self.is_open
        self.is_open = False


class Model(ScriptedModel):
    """Every method awaits before and after what it does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda request: "ab", **{"token_s": 0.5, **options})
        self.times_closed = 0

    async def suspend(self) -> None:
        await asyncio.sleep(0)
        await super().suspend()
        await asyncio.sleep(0.1)

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        await asyncio.sleep(0)
        await super().update_weights(weights, version)
        await asyncio.sleep(0.1)

    async def resume(self) -> None:
        await asyncio.sleep(0)
        await super().resume()
        await asyncio.sleep(0.1)

    async def abort(self, request_id: str) -> None:
        await asyncio.sleep(0)
        await super().abort(request_id)

    async def release(self, episode_id: str) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        await asyncio.sleep(0.1)
        await super().close()
        self.times_closed += 1

    @property
    def is_suspended(self) -> bool:
        return self._suspended


@pytest.fixture(autouse=True)
def _environments_are_closed() -> Iterator[None]:
    Env.open = Env.failing = PlainEnv.open = 0
    yield
    assert Env.open == PlainEnv.open == 0, "environments were left open"


def _config(**options: Any) -> RolloutConfig:
    defaults = {"batch_size": 4, "num_envs": 4, "max_tokens_per_turn": 16, "max_tokens_per_episode": 512}
    return RolloutConfig(**{**defaults, **options})


def _is_at_rest(proxy: LLMProxy) -> bool:
    """No request is booked anywhere, and no episode has a home."""
    router = proxy._router
    nothing = not proxy._serving and not proxy._to_restart and not router._home and not router._shared
    return nothing and not any(router._load) and not any(router._homes) and proxy._updated.is_set()


# One slot.


def _play(manager: EnvManager, name: str) -> Coroutine[Any, Any, Trajectory]:
    ticket = EpisodeTicket(name, f"group of {name}", 1, start_version=0, number=0)
    return manager.run_episode(ticket, sampling_seed=1)


async def _check_slot(cancelling: Any, manager: EnvManager, proxy: LLMProxy) -> None:
    """Cancel an episode, then play one to its end and close everything."""
    if await cancelling.run(_play(manager, "first")):
        await manager.settle()
    assert _is_at_rest(proxy)
    Env.failing = 0
    trajectory = await _play(manager, "second")
    trajectory.validate()
    assert trajectory.turns == 2 and trajectory.episode_id == "second"
    assert _is_at_rest(proxy)
    manager.end()
    assert await manager.join(asyncio.get_running_loop().time() + 10.0) == []
    await proxy.close()


@pytest.mark.parametrize("prompt_replication", [True, False])
def test_an_episode_cancelled_anywhere_leaves_the_slot_usable(prompt_replication: bool) -> None:
    async def scenario(cancelling: Any) -> None:
        proxy = LLMProxy([Model(), Model()])
        config = _config(prompt_replication=prompt_replication)
        manager = EnvManager("slot", Env, SlotContext(proxy, _TOKENIZER, config))
        await _check_slot(cancelling, manager, proxy)

    cancel_everywhere(scenario, _virtual, least=20)


def test_an_episode_cancelled_while_its_reset_is_tried_again_leaves_the_slot_usable() -> None:
    async def scenario(cancelling: Any) -> None:
        Env.failing = 2
        proxy = LLMProxy([Model()])
        manager = EnvManager("slot", Env, SlotContext(proxy, _TOKENIZER, _config()))
        await _check_slot(cancelling, manager, proxy)

    cancel_everywhere(scenario, _virtual, least=13)


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_an_episode_cancelled_anywhere_leaves_every_kind_of_worker_usable(kind: Any) -> None:
    async def scenario(cancelling: Any) -> None:
        proxy = LLMProxy([Model(token_s=0.0)])
        manager = EnvManager("slot", PlainEnv, SlotContext(proxy, _TOKENIZER, _config(worker=kind)))
        await _check_slot(cancelling, manager, proxy)

    cancel_everywhere(
        scenario, _real, least=4, moments=("early",) if kind == "process" else ("early", "late")
    )


def test_a_cancelled_episode_releases_those_that_wait_for_it_at_the_barrier() -> None:
    async def scenario(cancelling: Any) -> None:
        proxy, barrier = LLMProxy([Model()]), TurnBarrier()
        context = SlotContext(proxy, _TOKENIZER, _config(), barrier=barrier)
        managers = [EnvManager(f"slot-{number}", Env, context) for number in range(3)]
        others = [
            asyncio.create_task(_play(manager, f"other-{number}"))
            for number, manager in enumerate(managers[1:])
        ]
        await cancelling.run(_play(managers[0], "first"))
        assert [(await other).turns for other in others] == [2, 2]
        assert barrier._parties == 0 and not barrier._waiting
        again = await asyncio.gather(*(_play(manager, f"again-{manager.name}") for manager in managers))
        assert [trajectory.turns for trajectory in again] == [2, 2, 2]
        assert barrier._parties == 0 and not barrier._waiting and _is_at_rest(proxy)
        for manager in managers:
            manager.end()
            assert await manager.join(asyncio.get_running_loop().time() + 10.0) == []
        await proxy.close()

    cancel_everywhere(scenario, _virtual, least=12)


# The proxy.


def _request(name: str, episode: str = "", deadline: float | None = None) -> GenerationRequest:
    return GenerationRequest(name, [1, 2], episode_id=episode, affinity="group", deadline=deadline)


@pytest.mark.parametrize("deadline", [None, 100.0])
@pytest.mark.parametrize("restarting", [False, True])
def test_a_cancelled_request_leaves_no_trace_in_the_proxy(deadline: float | None, restarting: bool) -> None:
    async def scenario(cancelling: Any) -> None:
        proxy = LLMProxy([Model(), Model()])
        updating = None
        if restarting:
            updating = asyncio.get_running_loop().create_task(_update_later(proxy))
        await cancelling.run(proxy.generate(_request("first", "e", deadline)))
        if updating is not None:
            await updating
        await proxy.release("e")
        assert _is_at_rest(proxy)
        generation = await proxy.generate(_request("first", "e", deadline))
        assert generation.finish_reason == "stop"
        await proxy.release("e")
        assert _is_at_rest(proxy)
        await proxy.close()

    cancel_everywhere(scenario, _virtual, least=6 if restarting else 4)


async def _update_later(proxy: LLMProxy) -> None:
    await asyncio.sleep(0.7)
    await proxy.update_weights({}, 1, restart_turns=True)


@pytest.mark.parametrize("restart", [False, True])
def test_a_cancelled_update_leaves_engines_that_go_on_and_can_be_updated(restart: bool) -> None:
    async def scenario(cancelling: Any) -> None:
        engines = [Model(), Model()]
        proxy = LLMProxy(engines)
        running = [asyncio.create_task(proxy.generate(_request(f"r{i}", f"e{i}"))) for i in range(3)]
        await asyncio.sleep(0.2)
        await cancelling.run(proxy.update_weights({}, 1, restart_turns=restart))
        assert proxy._updated.is_set()
        await proxy.update_weights({}, 2, restart_turns=restart)
        assert proxy.version == 2
        for generation in await asyncio.gather(*running):
            assert generation.finish_reason == "stop" and len(generation.token_ids) == 3
        for number in range(3):
            await proxy.release(f"e{number}")
        assert _is_at_rest(proxy)
        await proxy.close()

    cancel_everywhere(scenario, _virtual)


def test_after_a_cancelled_update_no_engine_is_left_suspended() -> None:
    async def scenario(cancelling: Any) -> None:
        engines = [Model(), Model()]
        proxy = LLMProxy(engines)
        await cancelling.run(proxy.update_weights({}, 1))
        assert not any(engine.is_suspended for engine in engines)
        await proxy.close()

    cancel_everywhere(scenario, _virtual)


@pytest.mark.parametrize("call", ["suspend", "resume", "release", "abort"])
def test_a_cancelled_call_of_the_proxy_can_be_made_again(call: str) -> None:
    async def scenario(cancelling: Any) -> None:
        engines = [Model(), Model()]
        proxy = LLMProxy(engines)
        running = asyncio.create_task(proxy.generate(_request("r", "e")))
        await asyncio.sleep(0.2)
        if call == "resume":
            await proxy.suspend()
        operation: Callable[[], Coroutine[Any, Any, None]] = {
            "suspend": proxy.suspend,
            "resume": proxy.resume,
            "release": lambda: proxy.release("e"),
            "abort": lambda: proxy.abort("r"),
        }[call]
        await cancelling.run(operation())
        await operation()
        if call == "suspend":
            assert all(engine.is_suspended for engine in engines)
            await proxy.resume()
        assert not any(engine.is_suspended for engine in engines)
        assert (await running).finish_reason == ("abort" if call == "abort" else "stop")
        await proxy.release("e")
        assert _is_at_rest(proxy)
        await proxy.close()

    cancel_everywhere(scenario, _virtual)


def test_a_cancelled_close_can_be_made_again() -> None:
    async def scenario(cancelling: Any) -> None:
        engines = [Model(), Model()]
        proxy = LLMProxy(engines)
        ended: list[Generation | BaseException] = []
        proxy.add(_request("r", "e"), lambda _, outcome: ended.append(outcome))
        await asyncio.sleep(0.2)
        await cancelling.run(proxy.close())
        await proxy.close()
        assert all(engine.times_closed for engine in engines)
        assert len(ended) == 1
        await proxy.release("e")
        assert _is_at_rest(proxy)

    cancel_everywhere(scenario, _virtual)


def test_what_was_added_can_be_aborted_at_once() -> None:
    async def scenario() -> None:
        proxy = LLMProxy([Model()])
        ended: list[Any] = []
        proxy.add(_request("r"), lambda _, outcome: ended.append(outcome))
        await proxy.abort("r")
        await asyncio.sleep(10.0)
        await proxy.close()
        assert [outcome.finish_reason for outcome in ended] == ["abort"]

    _virtual(scenario())


def test_a_request_that_waits_for_an_update_can_be_aborted() -> None:
    async def scenario() -> None:
        proxy = LLMProxy([Model()])
        running = asyncio.create_task(proxy.generate(_request("r")))
        await asyncio.sleep(0.2)
        updating = asyncio.create_task(proxy.update_weights({}, 1, restart_turns=True))
        await asyncio.sleep(0.05)
        await proxy.abort("r")
        await updating
        generation = await running
        await proxy.close()
        assert generation.finish_reason == "abort"

    _virtual(scenario())


def test_an_update_while_the_engines_are_suspended_leaves_them_suspended() -> None:
    async def scenario() -> None:
        proxy = LLMProxy([Model()])
        await proxy.suspend()
        running = asyncio.create_task(proxy.generate(_request("r")))
        await proxy.update_weights({}, 1)
        await asyncio.sleep(10.0)
        was_sampled = running.done()
        await proxy.resume()
        assert (await running).policy_versions == [1, 1, 1]
        await proxy.close()
        assert not was_sampled

    _virtual(scenario())


# The scheduler.


def _scheduler(engines: list[Model], reward_fn: Any = None, **options: Any) -> EpisodeScheduler:
    return EpisodeScheduler(
        Env,
        LLMProxy(engines),
        _TOKENIZER,
        _config(**options),
        seed=1,
        ledger=TaskLedger(seed=1),
        reward_fn=reward_fn,
        keep_group=None,
    )


def _check_account(scheduler: EpisodeScheduler) -> dict[str, Any]:
    counts = scheduler.counts()
    assert counts["produced"] == counts["consumed"] + counts["buffered"] + sum(counts["discarded"].values())
    return counts


async def _reward(trajectory: Trajectory) -> float:
    await asyncio.sleep(0.5)
    return 1.0


async def _train(scheduler: EpisodeScheduler, first: int, last: int) -> None:
    """Steps that must come, and a clean end of everything."""
    for step in range(first, last):
        batch = await scheduler.get_batch(step)
        assert len(batch) == 4 and len({trajectory.episode_id for trajectory in batch}) == 4
        _check_account(scheduler)
        await scheduler.sync_weights({}, step + 1)
    await scheduler.shut_down()
    counts = _check_account(scheduler)
    assert counts["running"] == 0 and _is_at_rest(scheduler._proxy)


SETTINGS = [
    {"asynchrony": 0.0},
    {"asynchrony": 1.0, "redundant_groups": 2, "num_envs": 6},
    {"mode": "batch"},
    {"on_sync": "restart"},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("reward_fn", [None, _reward], ids=["env's reward", "reward_fn"])
def test_a_cancelled_get_batch_loses_no_sample(options: dict[str, Any], reward_fn: Any) -> None:
    async def scenario(cancelling: Any) -> None:
        scheduler = _scheduler([Model(), Model()], reward_fn, **options)
        await scheduler.start()
        cancelled = await cancelling.run(scheduler.get_batch(0))
        assert _check_account(scheduler)["consumed"] == (0 if cancelled else 4)
        if not cancelled:
            await scheduler.sync_weights({}, 1)
        await _train(scheduler, 0 if cancelled else 1, 3)

    cancel_everywhere(scenario, _virtual, least=4)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("call", ["sync_weights", "suspend", "resume"])
def test_a_cancelled_call_for_the_engines_can_be_made_again(options: dict[str, Any], call: str) -> None:
    async def scenario(cancelling: Any) -> None:
        engines = [Model(), Model()]
        scheduler = _scheduler(engines, **options)
        await scheduler.start()
        await scheduler.get_batch(0)
        if call == "resume":
            await scheduler.suspend()
        operation: Callable[[], Coroutine[Any, Any, None]] = {
            "sync_weights": lambda: scheduler.sync_weights({}, 1),
            "suspend": scheduler.suspend,
            "resume": scheduler.resume,
        }[call]
        await cancelling.run(operation())
        _check_account(scheduler)
        await operation()
        if call == "suspend":
            await scheduler.resume()
        assert not any(engine.is_suspended for engine in engines)
        if call != "sync_weights":
            await scheduler.sync_weights({}, 1)
        await _train(scheduler, 1, 3)

    cancel_everywhere(scenario, _virtual)


@pytest.mark.parametrize("reward_fn", [None, _reward], ids=["env's reward", "reward_fn"])
def test_a_cancelled_evaluation_closes_its_environments_and_leaves_training_alone(reward_fn: Any) -> None:
    async def scenario(cancelling: Any) -> None:
        scheduler = _scheduler([Model(), Model()], reward_fn, num_envs=2)
        await scheduler.start()
        training = len(scheduler._managers)
        await cancelling.run(scheduler.evaluate(None, [1, 2, 3], False, 2, None, 0))
        assert not scheduler._evaluating
        await asyncio.sleep(2.0)  # one cancelled while its environments close does not wait for them
        assert Env.open <= training
        results = await scheduler.evaluate(None, [4, 5, 6], False, 2, None, 0)
        assert [result.seed for result in results] == [4, 5, 6] and not any(item.failed for item in results)
        await _train(scheduler, 0, 2)

    cancel_everywhere(scenario, _virtual)


@pytest.mark.parametrize("state", ["new", "playing", "buffered", "rewarding", "evaluating", "suspended"])
def test_a_shut_down_that_was_cancelled_is_completed_by_the_next_one(state: str) -> None:
    async def scenario(cancelling: Any) -> None:
        engines = [Model(), Model()]
        scheduler = _scheduler(engines, _reward if state == "rewarding" else None)
        evaluating = None
        if state != "new":
            await scheduler.start()
            await asyncio.sleep({"buffered": 30.0, "rewarding": 6.7}.get(state, 2.5))
        if state == "suspended":
            await scheduler.suspend()
        if state == "evaluating":
            evaluating = asyncio.create_task(scheduler.evaluate(None, [1, 2, 3], False, 2, None, 0))
            await asyncio.sleep(1.5)
        await cancelling.run(scheduler.shut_down())
        await scheduler.shut_down()
        if evaluating is not None:
            await asyncio.wait({evaluating})
            assert evaluating.cancelled()
        counts = _check_account(scheduler)
        assert counts["running"] == 0 and _is_at_rest(scheduler._proxy)
        assert Env.open == 0

    cancel_everywhere(scenario, _virtual)


def test_starting_is_not_interruptible() -> None:
    async def scenario(cancelling: Any) -> None:
        scheduler = _scheduler([Model()])
        assert not await cancelling.run(scheduler.start())
        await _train(scheduler, 0, 1)

    assert cancel_everywhere(scenario, _virtual, least=0, moments=("early", "late")) == 0


# Environments that cancel themselves.


class SelfCancelling(Env):
    """Awaits something that is cancelled by somebody else."""

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(1.0)
        raise asyncio.CancelledError


def test_an_environment_that_raises_cancelled_error_is_a_failure_like_any_other() -> None:
    runner = VirtualLoop()
    controller = AsyncController(
        SelfCancelling, LLMProxy([Model()]), _TOKENIZER, _config(), loop_factory=lambda: runner
    )
    try:
        with pytest.raises(Exception, match="episodes failed"):
            controller.get_batch(0)
    finally:
        controller.stop()
