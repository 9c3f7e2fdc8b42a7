"""The controller as a trainer uses it: batches, freshness, failures, death, evaluation, resume, stop in every state."""

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from agentenv import BaseEnv
from agentenv.errors import ModelError, RolloutError, UsageError
from agentenv.inference import Generation, GenerationRequest, LLMProxy
from agentenv.rollout import AsyncController, RolloutConfig
from agentenv.testing import ByteTokenizer, ScriptedModel
from agentenv.trajectory import Trajectory


class Env(BaseEnv):
    """Two steps. ``on_step(seed, turn)`` may sleep, hang or raise."""

    open = 0
    lock = threading.Lock()

    def __init__(self, on_step: Callable[[int, int], None] | None = None) -> None:
        self.on_step = on_step
        self.is_open = True
        with Env.lock:
            Env.open += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.seed, self.turn = seed or 0, 0
        return "task", {"family": f"f{self.seed % 2}"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        if self.on_step is not None:
            self.on_step(self.seed, self.turn)
        return "more", 0.5, self.turn == 2, False, {"success": self.seed % 2 == 0}

    def close(self) -> None:
        with Env.lock:
            Env.open -= self.is_open
        self.is_open = False


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    Env.open = 0
    yield
    deadline = time.monotonic() + 60
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _threads(), "threads were left"
    assert Env.open == 0, "environments were left open"


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("agentenv")]


@contextmanager
def _controller(
    env_fn: Callable[[], BaseEnv] = Env, *, model: Any = None, task_seeds: Any = None, **options: Any
) -> Iterator[AsyncController]:
    config = RolloutConfig(
        **{
            "batch_size": 4,
            "num_envs": 4,
            "batch_timeout_s": 300.0,
            "step_timeout_s": 120.0,
            "shutdown_timeout_s": 60.0,
            "max_tokens_per_turn": 16,
            "max_tokens_per_episode": 512,
            **options,
        }
    )
    model = model or ScriptedModel(["a", "b"])
    controller = AsyncController(
        env_fn, LLMProxy([model]), ByteTokenizer(), config, seed=1, task_seeds=task_seeds
    )
    try:
        yield controller
    finally:
        controller.stop()


def _train(controller: AsyncController, steps: int) -> None:
    _train_from(controller, 0, steps)


def _train_from(controller: AsyncController, start: int, end: int) -> None:
    for step in range(start, end):
        controller.get_batch(step)
        controller.sync_weights({}, step + 1)


def _check_account(controller: AsyncController) -> dict[str, Any]:
    counts = controller.counts()
    assert counts["produced"] == counts["consumed"] + counts["buffered"] + sum(counts["discarded"].values())
    return counts


@pytest.mark.parametrize(
    ("alpha", "mode"), [(0.0, "async"), (0.5, "async"), (1.0, "async"), (2.0, "async"), (2.0, "sync")]
)
def test_every_sample_of_every_batch_is_fresh(alpha: float, mode: Any) -> None:
    with _controller(asynchrony=alpha, mode=mode) as controller:
        seen: list[str] = []
        for step in range(8):
            batch = controller.get_batch(step)
            assert len(batch) == 4
            oldest = step - (0.0 if mode == "sync" else alpha)
            assert all(trajectory.start_version >= oldest for trajectory in batch)
            seen += [trajectory.episode_id for trajectory in batch]
            for trajectory in batch:
                trajectory.validate()
            controller.sync_weights({}, step + 1)
            assert controller.metrics()["staleness_max"] <= alpha
        assert len(set(seen)) == 32
        counts = _check_account(controller)
        assert counts["consumed"] == 32 and not counts["discarded"]
    counts = _check_account(controller)
    assert counts["running"] == 0 and set(counts["discarded"]) <= {"stopped"}


def test_at_alpha_zero_nothing_runs_while_the_trainer_trains() -> None:
    resets: list[float] = []

    class Noting(Env):
        def reset(self, **options: Any) -> tuple[str, dict[str, Any]]:
            resets.append(time.monotonic())
            return super().reset(**options)

    with _controller(Noting, asynchrony=0.0) as controller:
        controller.get_batch(0)
        begun = len(resets)
        time.sleep(0.1)
        assert len(resets) == begun == 4
        assert controller.counts()["running"] == 0
        controller.sync_weights({}, 1)
        assert {trajectory.start_version for trajectory in controller.get_batch(1)} == {1}


def test_slow_tasks_are_not_starved() -> None:
    def on_step(seed: int, turn: int) -> None:
        if seed % 4 == 0:
            time.sleep(0.03)

    with _controller(lambda: Env(on_step), asynchrony=1.0, task_seeds=range(16)) as controller:
        trained: Counter[int] = Counter()
        for step in range(8):
            trained.update(trajectory.seed for trajectory in controller.get_batch(step))
            controller.sync_weights({}, step + 1)
        assert not controller.counts()["discarded"]
    slow = sum(number for seed, number in trained.items() if seed % 4 == 0)
    assert slow >= 6  # an even share of 32 would be 8; at most the last few are still on their way


def test_environments_are_made_lazily_and_side_by_side() -> None:
    barrier = threading.Barrier(4)
    made = []

    def slow_to_make() -> Env:
        made.append(1)
        barrier.wait(60)  # broken unless four are made at once
        return Env()

    with _controller(slow_to_make) as controller:
        assert not made
        assert len(controller.get_batch(0)) == 4


def test_crashes_and_hangs_are_counted_and_the_run_goes_on() -> None:
    gate = threading.Event()

    def on_step(seed: int, turn: int) -> None:
        if seed % 8 == 3:
            raise RuntimeError("the tool crashed")
        if seed == 5:
            gate.wait(120)

    with _controller(
        lambda: Env(on_step), task_seeds=range(16), step_timeout_s=0.3, max_retries=0, max_failure_rate=0.9
    ) as controller:
        trained = []
        for step in range(6):
            batch = controller.get_batch(step)
            assert len(batch) == 4
            trained += [trajectory.seed for trajectory in batch]
            controller.sync_weights({}, step + 1)
        counts = _check_account(controller)
        gate.set()
    assert counts["discarded"]["step_RuntimeError"] >= 2
    assert counts["discarded"]["step_timeout"] >= 1
    assert not {3, 5, 11} & set(trained)


def test_a_failure_rate_above_the_limit_stops_the_run_and_names_the_dominant_cause() -> None:
    def on_step(seed: int, turn: int) -> None:
        if seed % 4:
            raise ConnectionError("registry unreachable")
        if seed % 8:
            raise ValueError("rare")

    with _controller(lambda: Env(on_step), task_seeds=range(16), failure_window=16) as controller:
        with pytest.raises(
            RolloutError, match=r"episodes failed .* step_ConnectionError.*registry unreachable"
        ):
            _train(controller, 20)
        with pytest.raises(RolloutError, match="ConnectionError"):
            controller.get_batch(20)
        _check_account(controller)


def test_one_dead_environment_does_not_block_groups() -> None:
    made: Counter[str] = Counter()

    def env_fn() -> Env:
        with Env.lock:
            made["n"] += 1
            number = made["n"]

        def on_step(seed: int, turn: int) -> None:
            if number == 1:
                raise OSError("dead at its first step")

        return Env(on_step)

    with _controller(env_fn, batch_size=8, group_size=4, num_envs=9) as controller:
        batch = controller.get_batch(0)
    assert len(batch) == 8
    groups = Counter(trajectory.group_id for trajectory in batch)
    assert set(groups.values()) == {4}
    assert len({(trajectory.group_id, trajectory.seed) for trajectory in batch}) == 2


def test_groups_that_cannot_be_filled_end_short() -> None:
    calls: Counter[int] = Counter()

    def on_step(seed: int, turn: int) -> None:
        with Env.lock:
            calls[seed] += 1
            if calls[seed] == 1:
                raise OSError("one member in four")

    with _controller(
        lambda: Env(on_step), batch_size=8, group_size=4, num_envs=8, max_retries=0, max_failure_rate=0.9
    ) as controller:
        batch = controller.get_batch(0)
        assert list(Counter(trajectory.group_id for trajectory in batch).values()) == [3, 3]
        assert _check_account(controller)["discarded"]["step_OSError"] >= 2


def test_bad_input_when_environments_are_made_reaches_the_trainer_as_it_is() -> None:
    def broken() -> BaseEnv:
        raise UsageError("dataset 'x' has no column 'y'")

    with _controller(broken) as controller:
        with pytest.raises(UsageError, match="no column 'y'"):
            controller.get_batch(0)
        with pytest.raises(UsageError, match="no column 'y'"):
            controller.evaluate(broken, [1, 2])


def test_a_batch_that_does_not_come_ends_at_its_deadline() -> None:
    gate = threading.Event()
    with _controller(lambda: Env(lambda *_: gate.wait(120) and None), batch_timeout_s=0.2) as controller:
        controller.start()
        while controller.counts()["running"] < 4:
            time.sleep(0.01)
        started = time.monotonic()
        with pytest.raises(RolloutError, match=r"no batch for step 0 within 0.2 s.*4 episodes running"):
            controller.get_batch(0)
        assert time.monotonic() - started < 60
        gate.set()


class DyingModel(ScriptedModel):
    """Dies at a request of the n-th episode, or when told."""

    def __init__(self, dies_at: int) -> None:
        super().__init__(["a", "b"], token_s=0.001)
        self.error: BaseException | None = None
        self.left = dies_at

    async def generate(self, request: GenerationRequest) -> Generation:
        self.left -= 1
        if self.left <= 0:
            self.error = ModelError("CUDA error: device lost")
        if self.error is not None:
            raise self.error
        return await super().generate(request)


def test_the_death_of_an_engine_reaches_a_waiting_get_batch_at_once() -> None:
    with _controller(model=DyingModel(dies_at=12)) as controller:
        started = time.monotonic()
        with pytest.raises(RolloutError, match=r"inference engine died.*device lost"):
            _train(controller, 10)
        assert time.monotonic() - started < 60


def test_the_death_of_an_engine_is_seen_when_no_request_is_on_its_way() -> None:
    model = DyingModel(dies_at=10**9)
    gate = threading.Event()
    with _controller(lambda: Env(lambda *_: gate.wait(120) and None), model=model) as controller:
        controller.start()
        threading.Timer(0.1, lambda: setattr(model, "error", ModelError("killed by signal 9"))).start()
        with pytest.raises(RolloutError, match="killed by signal 9"):
            controller.get_batch(0)
        gate.set()


class StuckModel(ScriptedModel):
    """Never takes new weights."""

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        import asyncio

        await asyncio.sleep(60)


def test_a_weight_update_that_does_not_end_stops_the_run() -> None:
    with _controller(model=StuckModel(["a", "b"]), sync_timeout_s=0.1) as controller:
        controller.get_batch(0)
        with pytest.raises(RolloutError, match=r"version 1 did not reach the engines: not within 0.1 s"):
            controller.sync_weights({}, 1)
        with pytest.raises(RolloutError, match="version 1"):
            controller.get_batch(1)


def test_a_forgotten_weight_update_is_told_instead_of_waited_for() -> None:
    with _controller(asynchrony=1.0) as controller:
        controller.get_batch(0)
        controller.get_batch(1)
        with pytest.raises(UsageError, match="call sync_weights"):
            controller.get_batch(2)


def test_a_ledger_that_ends_is_told_instead_of_waited_for() -> None:
    with _controller(task_seeds=iter(range(6))) as controller:
        controller.get_batch(0)
        controller.sync_weights({}, 1)
        with pytest.raises(RolloutError, match="no task is left for step 1"):
            controller.get_batch(1)


def test_episodes_longer_than_the_engine_takes_are_refused_at_once() -> None:
    model = ScriptedModel(["a"])
    model.max_length = 100  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="takes at most 100"):
        AsyncController(Env, LLMProxy([model]), ByteTokenizer(), RolloutConfig(max_tokens_per_episode=101))


def test_the_metrics_are_those_of_the_last_batch() -> None:
    with _controller() as controller:
        batch = controller.get_batch(0)
        metrics = controller.metrics()
    assert metrics["staleness_mean"] == 0.0
    assert metrics["episodes_per_s"] > 0.0
    assert metrics["episode_s"] == pytest.approx(sum(t.duration_s for t in batch) / 4)
    assert {"batch_wait_s", "step_s", "failure_rate", "wasted_tokens", "buffered", "discarded"} <= set(
        metrics
    )
    assert all(isinstance(value, float) for value in metrics.values())


def test_evaluation_gives_one_trajectory_per_seed_in_order_and_leaves_training_alone() -> None:
    def on_step(seed: int, turn: int) -> None:
        if seed == 12:
            raise RuntimeError("broken task")
        time.sleep(0.001 * (20 - seed))

    heard: list[Trajectory] = []
    model = ScriptedModel(["a", "b"])
    with _controller(model=model) as controller:
        results = controller.evaluate(
            lambda: Env(on_step), range(10, 16), greedy=True, num_envs=3, on_result=heard.append
        )
        assert controller.counts()["produced"] == 0
        assert [trajectory.seed for trajectory in results] == list(range(10, 16))
        assert [trajectory.failed for trajectory in results] == [False, False, True, False, False, False]
        assert results[2].end_reason == "step_RuntimeError" and "broken task" in results[2].info["error"]
        assert [t.success for t in results] == [True, False, False, False, True, False]
        assert sorted(t.seed for t in heard) == list(range(10, 16))
        assert {request.sampling.temperature for request in model.requests} == {0.0}
        assert controller.evaluate(None, []) == []
        assert len(controller.get_batch(0)) == 4
        between = controller.evaluate(None, [1, 2])
        assert [trajectory.end_reason for trajectory in between] == ["terminated"] * 2
        assert controller.metrics()["failure_rate"] == 0.0


def test_evaluation_ends_when_an_engine_dies() -> None:
    with (
        _controller(model=DyingModel(dies_at=5)) as controller,
        pytest.raises(RolloutError, match="device lost"),
    ):
        controller.evaluate(Env, range(10))


def test_an_error_of_the_callback_ends_the_evaluation() -> None:
    def broken(_: Trajectory) -> None:
        raise LookupError("in the callback")

    with _controller() as controller, pytest.raises(LookupError, match="in the callback"):
        controller.evaluate(Env, range(10), on_result=broken)


def test_a_resumed_run_trains_the_same_tasks_as_an_undisturbed_one() -> None:
    def run(controller: AsyncController, steps: range) -> list[int]:
        trained = []
        for step in steps:
            trained += [trajectory.seed for trajectory in controller.get_batch(step)]
            controller.sync_weights({}, step + 1)
        return trained

    with _controller(asynchrony=0.0, task_seeds=range(100)) as controller:
        undisturbed = run(controller, range(6))
    for interrupted_at in (1, 3):
        with _controller(asynchrony=1.0, task_seeds=range(100)) as controller:
            before = run(controller, range(interrupted_at))
            state = json.loads(json.dumps(controller.state_dict()))
            # What happens after the checkpoint is lost with the process.
            controller.get_batch(interrupted_at)
        with _controller(asynchrony=1.0, task_seeds=range(100)) as controller:
            controller.load_state_dict(state)
            controller.sync_weights({}, interrupted_at)
            after = run(controller, range(interrupted_at, 6))
            assert _check_account(controller)["consumed"] == 24
        # At alpha 1 the last batch may hold any of the tasks on their way: compare what was surely trained.
        assert len(set(before + after)) == 24
        assert set(before + after) <= set(undisturbed) | _next_tasks(undisturbed, 4)


def _next_tasks(undisturbed: list[int], number: int) -> set[int]:
    from agentenv.rollout import TaskLedger

    ledger = TaskLedger(range(100), seed=1)
    order = [ledger.next_seed() for _ in range(len(undisturbed) + number)]
    assert sorted(order[: len(undisturbed)]) == sorted(undisturbed)
    return set(order[len(undisturbed) :])


def test_a_state_is_loaded_before_the_start_only() -> None:
    with _controller() as controller:
        state = controller.state_dict()
        controller.start()
        with pytest.raises(UsageError, match="before start"):
            controller.load_state_dict(state)


def test_stop_before_start_and_twice() -> None:
    with _controller() as controller:
        controller.stop()
        controller.stop()
        for call in (
            controller.start,
            lambda: controller.get_batch(0),
            lambda: controller.evaluate(Env, [1]),
        ):
            with pytest.raises(RolloutError, match="stopped"):
                call()
        assert controller.counts()["produced"] == 0
        controller.state_dict()


def test_stop_while_get_batch_and_evaluate_wait() -> None:
    gate = threading.Event()
    errors: list[BaseException] = []

    def waiting(call: Callable[[], Any]) -> threading.Thread:
        def body() -> None:
            try:
                call()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        return thread

    def let_go() -> None:
        """Once it stops: the same moment fails and cancels all that waits."""
        deadline = time.monotonic() + 60
        while not errors and time.monotonic() < deadline:
            time.sleep(0.01)
        gate.set()

    with _controller(lambda: Env(lambda *_: gate.wait(120) and None)) as controller:
        threads = [
            waiting(lambda: controller.get_batch(0)),
            waiting(lambda: controller.evaluate(lambda: Env(lambda *_: gate.wait(120) and None), [1, 2])),
        ]
        while Env.open < 6:
            time.sleep(0.01)
        threads.append(waiting(let_go))
        controller.stop()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert len(errors) == 2 and all(isinstance(error, RolloutError) for error in errors)
    counts = _check_account(controller)
    assert counts["discarded"] == {"stopped": 4} and counts["running"] == 0


def test_stop_after_an_interrupted_evaluation_waits_for_its_environments() -> None:
    def interrupt(*_: int) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(1.0)

    with _controller() as controller:
        with pytest.raises(KeyboardInterrupt):
            controller.evaluate(lambda: Env(interrupt), [1], num_envs=1)
        time.sleep(0.2)  # the evaluation is cancelled by now and waits for its environment
        controller.stop()
        assert Env.open == 0


def test_stop_in_the_middle_of_a_generation_ends_it() -> None:
    model = ScriptedModel(["x" * 10], token_s=600.0)
    with _controller(model=model) as controller:
        controller.start()
        while len(model.requests) < 4:
            time.sleep(0.01)
        started = time.monotonic()
        controller.stop()
        assert time.monotonic() - started < 50
    assert _check_account(controller)["discarded"] == {"stopped": 4}


def test_stop_does_not_wait_for_an_environment_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    hanging = threading.Semaphore(0)

    def hang(*_: int) -> None:
        hanging.release()
        gate.wait(120)

    with _controller(lambda: Env(hang), shutdown_timeout_s=0.2) as controller:
        controller.start()
        for _ in range(4):
            assert hanging.acquire(timeout=60)
        started = time.monotonic()
        controller.stop()
        assert time.monotonic() - started < 60
        assert "did not close within 0.2 s" in caplog.text
        gate.set()


def test_memory_stays_bounded_over_many_episodes() -> None:
    with _controller(asynchrony=1.0) as controller:
        for step in range(60):
            controller.get_batch(step)
            controller.sync_weights({}, step + 1)
        counts = controller.counts()
        assert counts["consumed"] == 240
        assert counts["buffered"] + counts["running"] <= 8
        assert len(controller.state_dict()["buffer"]["groups"]) <= 8
        assert len(controller._proxy._router._home) <= 8
        assert len(controller._scheduler._metrics._group_starts) <= 8
