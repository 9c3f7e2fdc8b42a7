"""Engines that go away and come back under the production controller, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from agentenv.errors import ModelError, RolloutError
from agentenv.testing import ScriptedModel


class Flaky(ScriptedModel):
    """An engine as the one over a vLLM is to the proxy: while it is away its requests wait, and updates pass it by."""

    updates_while_running = True

    def __init__(self, update_s: float = 0.0) -> None:
        super().__init__([[1, 2, 3]], repeat=True, token_s=1.0)
        self.update_s = update_s
        self.is_away = self.is_held = False
        self.error: BaseException | None = None
        self.newest = 0
        self._tell: Callable[[], None] = lambda: None

    def watch(self, on_change: Callable[[], None]) -> None:
        self._tell = on_change

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        self.newest = version
        if not self.is_away:
            await asyncio.sleep(self.update_s)
        if not self.is_away:
            await super().update_weights(weights, version)

    async def suspend(self) -> None:
        self.is_held = True
        await super().suspend()

    async def resume(self) -> None:
        self.is_held = False
        if not self.is_away:
            await super().resume()

    async def go(self) -> None:
        self.is_away = True
        await super().suspend()
        self._tell()

    async def come_back(self) -> None:
        await super().update_weights({}, self.newest)
        self.is_away = False
        if not self.is_held:
            await super().resume()
        self._tell()

    async def die(self) -> None:
        self.error = ModelError("it did not come back")
        await self.close()
        self._tell()


def _run(virtual_run: Any, tasks: Any, engines: list[Flaky], **settings: Any) -> Any:
    played = tasks(turns=3, step_s=lambda seed, member, turn: float((seed + turn) % 4))
    return virtual_run(played, engines=engines, batch_size=8, num_envs=16, **settings)


@pytest.mark.parametrize("on_sync", ["continue", "restart"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_goes_and_comes_no_episode_fails_and_every_token_is_of_its_version(
    virtual_run: Any, tasks: Any, seed: int, on_sync: str
) -> None:
    engines = [Flaky() for _ in range(3)]
    run = _run(virtual_run, tasks, engines, asynchrony=1.0, on_sync=on_sync)
    chance = random.Random(seed)
    for step in range(12):
        for engine in engines:
            others = [other for other in engines if other is not engine and not other.is_away]
            if engine.is_away and chance.random() < 0.5:
                run.loop.call(engine.come_back())
            elif not engine.is_away and others and chance.random() < 0.4:
                run.loop.call(engine.go())
        run.sleep(chance.choice([0.0, 2.5]))
        batch = run.controller.get_batch(step)
        assert len(batch) == 8
        is_suspended = chance.random() < 0.3
        if is_suspended:
            run.controller.suspend()
            goes = [engine for engine in engines if not engine.is_away]
            if len(goes) > 1:
                run.loop.call(goes[0].go())
            if (back := next((e for e in engines if e.is_away), None)) and chance.random() < 0.5:
                run.loop.call(back.come_back())
        for trajectory in batch:
            assert trajectory.start_version >= step - 1
            sampled = [version for version in trajectory.policy_versions if version >= 0]
            assert sampled == sorted(sampled) and sampled[0] >= trajectory.start_version
            assert trajectory.turns == 3
        run.controller.sync_weights({}, step + 1)
        if is_suspended:
            run.controller.resume()
        assert all(engine.version == step + 1 for engine in engines if not engine.is_away)
    counts = run.counts()
    assert not counts["discarded"]
    metrics = run.controller.metrics()
    assert metrics["engine_losses"] > 0 and metrics["moved_turns"] > 0
    assert metrics["engines_in_service"] == sum(not engine.is_away for engine in engines)


def test_an_engine_that_goes_during_an_update_holds_up_nobody_and_comes_back_at_the_version(
    virtual_run: Any, tasks: Any
) -> None:
    engines = [Flaky(), Flaky(update_s=50.0)]
    run = _run(virtual_run, tasks, engines, asynchrony=1.0)
    run.controller.start()
    run.controller.get_batch(0)

    async def update_and_go() -> None:
        update = asyncio.create_task(run.controller._scheduler.sync_weights({}, 1))
        await asyncio.sleep(20.0)
        assert [engine.version for engine in engines] == [1, 0]
        await engines[1].go()
        await update

    run.loop.call(update_and_go())
    assert [engine.version for engine in engines] == [1, 0]
    before = len(engines[1].requests)
    run.controller.get_batch(1)
    assert len(engines[1].requests) == before
    run.controller.sync_weights({}, 2)
    run.loop.call(engines[1].come_back())
    assert engines[1].version == 2
    run.train(2, start=2)
    assert len(engines[1].requests) > before
    assert not run.counts()["discarded"]


@pytest.mark.parametrize("loss", ["go", "die"])
def test_an_engine_that_is_lost_while_all_are_suspended_is_routed_around(
    virtual_run: Any, tasks: Any, loss: str
) -> None:
    class Dies(Flaky):
        """It is lost by the very call that suspends it."""

        async def suspend(self) -> None:
            await getattr(self, loss)()
            await super().suspend()

    engines = [Flaky(), Dies()]
    run = _run(virtual_run, tasks, engines, asynchrony=1.0)
    run.controller.start()
    run.sleep(2.0)
    run.controller.suspend()
    assert run.controller.metrics()["engines_in_service"] == 1
    run.controller.sync_weights({}, 1)
    run.controller.resume()
    assert len(run.controller.get_batch(0)) == 8
    assert engines[0].version == 1 and not run.counts()["discarded"]
    assert run.controller.metrics()["moved_turns"] > 0


def test_turns_of_an_engine_that_goes_are_sampled_by_another_at_once(virtual_run: Any, tasks: Any) -> None:
    engines = [Flaky(), Flaky()]
    run = virtual_run(tasks(turns=1), engines=engines, batch_size=4, num_envs=4, asynchrony=0.0)
    run.controller.start()
    run.sleep(1.5)
    run.loop.call(engines[0].go())
    assert len(run.controller.get_batch(0)) == 4
    # Two of the turns had one token of three when they began again.
    assert run.now == pytest.approx(1.5 + 3.0, abs=0.1)
    assert run.controller.metrics()["moved_turns"] == 2
    assert run.controller.metrics()["restarted_tokens"] == 2


def test_an_update_does_not_wait_for_an_engine_that_is_away_which_comes_back_with_the_newest_weights(
    virtual_run: Any, tasks: Any
) -> None:
    engines = [Flaky(), Flaky()]
    run = _run(virtual_run, tasks, engines, mode="sync")
    run.loop.call(engines[1].go())
    run.train(2)
    assert [engine.version for engine in engines] == [2, 0]
    before = len(engines[1].requests)
    run.loop.call(engines[1].come_back())
    (batch,) = run.train(1, start=2)
    assert len(engines[1].requests) > before
    assert {version for item in batch for version in item.policy_versions} == {-1, 2}


def test_with_all_engines_away_the_run_waits_and_goes_on_with_the_first_that_is_back(
    virtual_run: Any, tasks: Any
) -> None:
    engines = [Flaky(), Flaky()]
    run = _run(virtual_run, tasks, engines)
    run.controller.start()
    run.sleep(1.0)
    for engine in engines:
        run.loop.call(engine.go())
    run.sleep(100.0)
    assert run.counts()["running"] == 16
    run.loop.call(engines[0].come_back())
    assert len(run.controller.get_batch(0)) == 8
    assert not run.counts()["discarded"]


def test_the_run_ends_when_the_last_engine_has_died(virtual_run: Any, tasks: Any) -> None:
    engines = [Flaky(), Flaky()]
    run = _run(virtual_run, tasks, engines)
    run.train(1)
    run.loop.call(engines[0].die())
    assert len(run.controller.get_batch(1)) == 8
    run.controller.sync_weights({}, 2)
    assert run.controller.metrics()["engines_in_service"] == 1
    run.loop.call(engines[1].die())
    with pytest.raises(RolloutError, match=r"an inference engine died.*did not come back"):
        run.train(3, start=2)
