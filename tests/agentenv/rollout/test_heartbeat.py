"""Weight updates, death and the end: every wait has a deadline, and whoever waits learns why it is over."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from agentenv import AsyncEnv
from agentenv.errors import ModelError, RolloutError, UsageError
from agentenv.inference import Generation, GenerationRequest, LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.simulation.engine import DecodeModel, SimulatedEngine
from agentenv.testing import ByteTokenizer, ScriptedModel

HANG_S = 1e4
_PATIENCE_S = 60.0
"""Far above every deadline in here, far below every hang."""


class Engine(SimulatedEngine):
    """A token a second; hangs or fails in the calls named."""

    def __init__(self, *hangs: str, fails: dict[str, Exception] | None = None) -> None:
        super().__init__(DecodeModel(1.0), tokens_per_id=1)
        self.hangs = hangs
        self.fails = fails or {}
        self.error: BaseException | None = None

    async def _do(self, call: str) -> None:
        if call in self.fails:
            raise self.fails[call]
        if call in self.hangs:
            await asyncio.sleep(HANG_S)

    async def suspend(self) -> None:
        await self._do("suspend")
        await super().suspend()

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        await self._do("update")
        await super().update_weights(weights, version)

    async def resume(self) -> None:
        await self._do("resume")
        await super().resume()

    async def release(self, episode_id: str) -> None:
        await self._do("release")

    async def close(self) -> None:
        await self._do("close")
        await super().close()


class Quick(AsyncEnv):
    """Two steps without time; or one that hangs."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.hangs = hangs

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return "task", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.hangs:
            await asyncio.sleep(HANG_S)
        self.turn += 1
        return "more", 1.0, self.turn == 2, False, {}


class Slow(ScriptedModel):
    """Answers after minutes, and dies when told."""

    def __init__(self) -> None:
        super().__init__(["a"], repeat=True)
        self.error: BaseException | None = None
        self.asked = threading.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.set()
        await asyncio.sleep(HANG_S)
        return await super().generate(request)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not _threads(), "threads were left"


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("agentenv")]


@contextmanager
def _controller(
    env_fn: Callable[[], AsyncEnv] = Quick, *, model: Any = None, **settings: Any
) -> Iterator[AsyncController]:
    """In real time."""
    config = RolloutConfig(
        **{
            "batch_size": 4,
            "num_envs": 4,
            "worker": "inline",
            "batch_timeout_s": 60.0,
            "shutdown_timeout_s": 0.5,
            "heartbeat_s": 0.05,
            **settings,
        }
    )
    model = model or ScriptedModel(["a"], repeat=True)
    controller = AsyncController(env_fn, LLMProxy([model]), ByteTokenizer(), config)
    try:
        yield controller
    finally:
        controller.stop()


class _Call:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.result: Any = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def ended(self) -> BaseException | None:
        """What it raised."""
        self._thread.join(_PATIENCE_S)
        assert not self.waits, "the call still waits"
        return self.error


# Suspend, update, resume


@pytest.mark.parametrize("on_sync", ["continue", "restart"])
def test_no_token_is_sampled_and_no_episode_started_while_suspended(
    virtual_run: Any, tasks: Any, on_sync: str
) -> None:
    def step_s(seed: int, member: int, turn: int) -> float:
        if seed == 1 and member == 0:
            raise OSError("its task is to be tried again")
        return 0.0

    played = tasks(tokens=lambda seed, *_: 1 if seed == 1 else 10, step_s=step_s)
    run = virtual_run(played, on_sync=on_sync)
    run.controller.start()
    run.sleep(0.5)
    run.controller.suspend()
    # The step of an episode may end meanwhile, and its task waits.
    run.sleep(50.0)
    assert run.counts()["produced"] == 0 and len(played.seeds("reset")) == 8
    run.controller.resume()
    assert sorted(trajectory.seed for trajectory in run.controller.get_batch(0)) == [0, 1, 2, 3]
    assert run.now == 60.0


def test_an_episode_that_ends_while_suspended_is_followed_by_no_other(virtual_run: Any, tasks: Any) -> None:
    def step_s(seed: int, member: int, turn: int) -> float:
        return 5.0

    played = tasks(step_s=step_s, reward=lambda seed, member: 0.0 if seed == 0 else float(member))
    run = virtual_run(played, batch_size=4, group_size=2, filter_zero_variance=True, asynchrony=0.0)
    run.controller.start()
    run.sleep(3.0)
    run.controller.suspend()
    run.sleep(50.0)
    # The group of task 0 is filtered at 6 s; task 2 takes its place when the run goes on.
    assert run.counts()["discarded"] == {"filtered": 2}
    assert len(played.seeds("reset")) == 4
    run.controller.resume()
    run.sleep(0.0)
    assert played.times("reset", 2) == [53.0, 53.0]


def test_weights_given_while_suspended_do_not_end_the_suspension(virtual_run: Any, tasks: Any) -> None:
    run = virtual_run(tasks(tokens=lambda *_: 10))
    run.controller.start()
    run.sleep(4.0)
    run.controller.suspend()
    run.controller.sync_weights({}, 1)
    run.sleep(50.0)
    assert run.counts()["produced"] == 0
    run.controller.resume()
    assert {tuple(t.policy_versions) for t in run.controller.get_batch(1)} == {(0,) * 4 + (1,) * 6}


def test_a_turn_across_an_update_holds_tokens_of_both_versions(virtual_run: Any, tasks: Any) -> None:
    # The even tasks' turns take 3 s, those of the odd ones 10 s.
    run = virtual_run(tasks(tokens=lambda seed, *_: 3 + 7 * (seed % 2)), num_envs=8)
    first, second = run.train(2, train_s=1.0)
    assert sorted(trajectory.seed for trajectory in first) == [0, 2, 4, 6]
    assert {tuple(t.policy_versions) for t in first} == {(0, 0, 0)}
    # The update came at 4 s.
    assert {t.seed: t.policy_versions for t in second} == {seed: [0] * 4 + [1] * 6 for seed in (1, 3, 5, 7)}
    for trajectory in second:
        trajectory.validate()
    assert run.controller.metrics()["restarted_tokens"] == 0.0


def test_a_restarted_turn_holds_tokens_of_the_new_version_only_and_is_counted(
    virtual_run: Any, tasks: Any
) -> None:
    run = virtual_run(tasks(tokens=lambda seed, *_: 3 + 7 * (seed % 2)), num_envs=8, on_sync="restart")
    _, second = run.train(2, train_s=1.0)
    assert {t.seed: t.policy_versions for t in second} == {seed: [1] * 10 for seed in (1, 3, 5, 7)}
    # Four turns of four tokens each.
    metrics = run.controller.metrics()
    assert metrics["restarted_tokens"] == 16.0
    assert metrics["wasted_tokens"] == 16.0 + sum(
        value for name, value in metrics.items() if name.startswith("discarded_tokens/")
    )


@pytest.mark.parametrize("on_sync", ["continue", "restart"])
@pytest.mark.parametrize(
    "hangs",
    [
        ("suspend",),
        ("update",),
        ("resume",),
        ("update", "resume"),
    ],
)
def test_an_engine_that_hangs_at_an_update_ends_the_run_within_the_deadline(
    virtual_run: Any, tasks: Any, hangs: tuple[str, ...], on_sync: str
) -> None:
    engines = [Engine(), Engine(*hangs)]
    run = virtual_run(tasks(), engines=engines, sync_timeout_s=20.0, on_sync=on_sync)
    run.controller.get_batch(0)
    before = run.now
    with pytest.raises(
        RolloutError, match=r"weights of version 1 did not reach the engines: not within 20 s"
    ):
        run.controller.sync_weights({}, 1)
    assert run.now == before + 20.0
    with pytest.raises(RolloutError, match="version 1"):
        run.controller.get_batch(1)


@pytest.mark.parametrize("call", ["suspend", "resume"])
def test_an_engine_that_hangs_at_a_pause_ends_the_run_within_the_deadline(
    virtual_run: Any, tasks: Any, call: str
) -> None:
    run = virtual_run(tasks(), engines=[Engine(), Engine(call)], sync_timeout_s=20.0)
    run.controller.get_batch(0)
    before = run.now
    with pytest.raises(RolloutError, match=r"the engines did not (pause|go on): not within 20 s"):
        getattr(run.controller, call)()
    assert run.now == before + 20.0
    with pytest.raises(RolloutError, match="the engines did not"):
        run.controller.get_batch(1)


def test_an_engine_that_hangs_at_the_close_is_left_behind(
    virtual_run: Any, tasks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = virtual_run(tasks(), engines=[Engine("close"), Engine()], shutdown_timeout_s=20.0)
    run.controller.get_batch(0)
    before = run.now
    run.controller.stop()
    assert run.now == before + 20.0
    assert "the engines did not close within 20 s" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        ModelError("out of memory"),
        RuntimeError("out of memory"),
    ],
)
def test_an_update_that_fails_on_one_engine_ends_the_run(
    virtual_run: Any, tasks: Any, error: Exception
) -> None:
    run = virtual_run(tasks(), engines=[Engine(), Engine(fails={"update": error})])
    run.controller.get_batch(0)
    with pytest.raises(RolloutError, match=r"version 1 did not reach the engines: .*out of memory"):
        run.controller.sync_weights({}, 1)
    with pytest.raises(RolloutError, match="out of memory"):
        run.controller.get_batch(1)


def test_weights_that_do_not_fit_are_bad_input_and_not_the_end(virtual_run: Any, tasks: Any) -> None:
    engine = Engine(fails={"update": UsageError("no weight 'x'")})
    run = virtual_run(tasks(), engines=[engine])
    run.controller.get_batch(0)
    with pytest.raises(UsageError, match="no weight 'x'"):
        run.controller.sync_weights({}, 1)
    engine.fails = {}
    run.controller.sync_weights({}, 1)
    assert len(run.controller.get_batch(1)) == 4


def test_an_engine_that_hangs_at_the_end_of_an_episode_does_not_keep_its_slot(
    virtual_run: Any, tasks: Any
) -> None:
    run = virtual_run(tasks(), engines=[Engine("release")], episode_timeout_s=20.0)
    assert len(run.controller.get_batch(0)) == 4


# Death


def test_an_engine_that_dies_while_nobody_generates_reaches_get_batch_within_the_heartbeat(
    virtual_run: Any, tasks: Any
) -> None:
    engine = Engine()
    run = virtual_run(tasks(step_s=lambda *_: HANG_S), engines=[engine], heartbeat_s=3.0)
    run.controller.start()
    run.sleep(10.0)
    engine.error = ModelError("killed by signal 9")
    before = run.now
    with pytest.raises(RolloutError, match=r"an inference engine died.*killed by signal 9") as caught:
        run.controller.get_batch(0)
    assert run.now <= before + 3.0
    assert caught.value.__cause__ is engine.error
    # Whoever comes later learns it, too, and at once.
    with pytest.raises(RolloutError, match="killed by signal 9"):
        run.controller.get_batch(0)
    assert run.counts()["running"] == 0


@pytest.mark.parametrize("started", [True, False])
def test_an_engine_that_dies_reaches_an_evaluation_that_waits_for_it(started: bool) -> None:
    model = Slow()
    with _controller(model=model) as controller:
        if started:
            controller.start()
        evaluation = _Call(lambda: controller.evaluate(None, [1, 2]))
        assert model.asked.wait(_PATIENCE_S)
        model.error = ModelError("killed by signal 9")
        error = evaluation.ended()
        assert isinstance(error, RolloutError) and "killed by signal 9" in str(error)


def test_the_death_of_the_event_loop_reaches_a_waiting_get_batch() -> None:
    with _controller(lambda: Quick(hangs=True)) as controller:
        waiting = _Call(lambda: controller.get_batch(0))
        while not controller.counts()["running"]:
            time.sleep(0.005)
        thread: Any = controller._thread
        thread._loop.call_soon_threadsafe(thread._loop.stop)
        error = waiting.ended()
        assert isinstance(error, RolloutError)
        with pytest.raises(RolloutError, match="event loop"):
            controller.get_batch(0)
        controller.counts()
        controller.state_dict()
        # Nobody can close the environments any more; what is left is not this controller's loop.
        with contextlib.suppress(RolloutError):
            controller.stop()


def test_stop_after_the_death_of_the_event_loop_raises_nothing() -> None:
    with _controller() as controller:
        controller.get_batch(0)
        thread: Any = controller._thread
        thread._loop.call_soon_threadsafe(thread._loop.stop)
        thread._thread.join(_PATIENCE_S)
        controller.stop()


def test_a_failure_rate_above_the_limit_names_the_dominant_cause_with_an_example(
    virtual_run: Any, tasks: Any
) -> None:
    def step_s(seed: int, member: int, turn: int) -> float:
        if seed % 4 in (1, 2):
            raise ConnectionError(f"registry unreachable from {seed}")
        if seed % 4 == 3:
            raise ValueError("rare")
        return 1.0

    run = virtual_run(tasks(step_s=step_s), failure_window=16, max_failure_rate=0.6, max_retries=0)
    with pytest.raises(RolloutError) as caught:
        run.train(50)
    text = str(caught.value)
    assert "with step_ConnectionError, for example" in text and "registry unreachable from" in text
    assert "allowed share 0.6" in text
    assert isinstance(caught.value.__cause__, Exception)


def test_an_environment_that_is_cancelled_from_inside_is_a_failure(virtual_run: Any) -> None:
    class Leaking(Quick):
        async def step(self, action: str) -> Any:
            inner = asyncio.ensure_future(asyncio.sleep(1.0))
            inner.cancel()
            await inner

    run = virtual_run(env=Leaking, failure_window=8, batch_timeout_s=50.0)
    with pytest.raises(RolloutError, match=r"of the last \d+ episodes failed.*CancelledError"):
        run.controller.get_batch(0)


def test_a_ledger_that_raises_reaches_a_waiting_get_batch(virtual_run: Any, tasks: Any) -> None:
    class Ledger:
        given = 0

        def next_seed(self) -> int:
            self.given += 1
            if self.given > 12:
                raise ConnectionError("the dataset is gone")
            return self.given

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            pass

    run = virtual_run(
        tasks(step_s=lambda seed, *_: float(seed)),
        task_seeds=Ledger(),
        filter_zero_variance=True,
        group_size=2,
    )
    with pytest.raises((RolloutError, ConnectionError), match="the dataset is gone"):
        run.controller.get_batch(0)


# Stop


def test_stop_before_the_start_closes_the_engines(virtual_run: Any) -> None:
    run = virtual_run()
    run.controller.stop()
    run.controller.stop()
    with pytest.raises(RolloutError, match="stopped"):
        run.controller.start()
    assert run.engines[0]._closed


@pytest.mark.parametrize(
    "call",
    [
        lambda controller: controller.get_batch(0),
        lambda controller: controller.evaluate(None, [1, 2]),
        lambda controller: controller.sync_weights({}, 1),
        lambda controller: controller.suspend(),
        lambda controller: controller.resume(),
    ],
    ids=["get_batch", "evaluate", "sync_weights", "suspend", "resume"],
)
def test_stop_ends_whatever_call_waits_in_another_thread(call: Callable[[AsyncController], Any]) -> None:
    class Stuck(Slow):
        async def suspend(self) -> None:
            await asyncio.sleep(HANG_S)

        async def resume(self) -> None:
            await asyncio.sleep(HANG_S)

    with _controller(model=Stuck()) as controller:
        controller.start()
        waiting = _Call(lambda: call(controller))
        time.sleep(0.1)
        assert waiting.waits
        began = time.monotonic()
        controller.stop()
        assert time.monotonic() - began < _PATIENCE_S
        assert isinstance(waiting.ended(), RolloutError)
        counts = controller.counts()
        assert counts["running"] == 0 and set(counts["discarded"]) <= {"stopped"}
        assert counts["produced"] == sum(counts["discarded"].values())


def test_stop_from_several_threads_at_once() -> None:
    with _controller() as controller:
        controller.get_batch(0)
        stops = [_Call(controller.stop) for _ in range(4)]
        assert [stop.ended() for stop in stops] == [None] * 4


def test_stop_after_the_run_has_died_and_after_a_call_that_was_refused() -> None:
    class Dying(Quick):
        async def step(self, action: str) -> Any:
            raise OSError("broken")

    with _controller(Dying, failure_window=4) as controller:
        with pytest.raises(RolloutError, match="broken"):
            controller.get_batch(0)
        with pytest.raises(RolloutError, match="broken"):
            controller.get_batch(0)
        controller.stop()
        with pytest.raises(RolloutError, match="stopped"):
            controller.get_batch(0)


def test_stop_in_the_middle_of_a_weight_update_after_which_episodes_would_go_on(virtual_run: Any) -> None:
    with _controller() as controller:
        for step in range(3):
            controller.get_batch(step)
            controller.sync_weights({}, step + 1)
        controller.stop()
        counts = controller.counts()
        assert counts["consumed"] == 12 and counts["running"] == 0


def test_stop_does_not_wait_for_an_environment_that_swallows_its_cancellation() -> None:
    release = threading.Event()

    class Stubborn(Quick):
        async def step(self, action: str) -> Any:
            while not release.is_set():
                try:
                    await asyncio.sleep(0.2)
                except asyncio.CancelledError:
                    continue
            return "", 1.0, True, False, {}

    with _controller(Stubborn) as controller:
        controller.start()
        time.sleep(0.1)
        stop = _Call(controller.stop)
        try:
            stop.ended()
        finally:
            release.set()


def test_stop_reports_an_engine_that_fails_to_close_in_the_log(
    virtual_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = virtual_run(engines=[Engine(fails={"close": ModelError("lost its server")})])
    run.controller.stop()
    assert "lost its server" in caplog.text
