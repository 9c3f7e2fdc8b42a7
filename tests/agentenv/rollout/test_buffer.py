"""The sample buffer over random schedules, and worked cases of freshness and groups."""

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.rollout import EpisodeTicket, RolloutConfig, SampleBuffer, TaskLedger
from agentenv.trajectory import Trajectory


def _buffer(**options: Any) -> SampleBuffer:
    return SampleBuffer(RolloutConfig(**{"num_envs": 4, **options}), TaskLedger(seed=0))


def _trajectory(ticket: EpisodeTicket) -> Trajectory:
    return Trajectory(
        [1],
        [2],
        [-1.0],
        [True],
        [ticket.start_version],
        episode_id=ticket.episode_id,
        group_id=ticket.group_id,
        seed=ticket.task_seed,
        start_version=ticket.start_version,
    )


def _start_all(buffer: SampleBuffer, version: int, step: int) -> list[EpisodeTicket]:
    tickets = []
    while (ticket := buffer.next_episode(version, step)) is not None:
        tickets.append(ticket)
    return tickets


def _finish(buffer: SampleBuffer, tickets: list[EpisodeTicket]) -> None:
    for ticket in tickets:
        buffer.add(ticket, _trajectory(ticket))


def _accounted(buffer: SampleBuffer) -> bool:
    counts = buffer.counts()
    return bool(
        counts["produced"] == counts["consumed"] + counts["buffered"] + sum(counts["discarded"].values())
    )


@settings(max_examples=60, deadline=None)
@given(
    alpha=st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 4.0]),
    group_size=st.sampled_from([1, 2, 4]),
    on_stale=st.sampled_from(["wait", "abort"]),
    failures=st.sampled_from([0.0, 0.2, 0.7]),
    seed=st.integers(0, 10_000),
)
def test_random_schedules_keep_the_account_freshness_and_bound(
    alpha: float, group_size: int, on_stale: str, failures: float, seed: int
) -> None:
    chance = random.Random(seed)
    buffer = _buffer(batch_size=8, group_size=group_size, asynchrony=alpha, on_stale=on_stale)
    running: list[EpisodeTicket] = []
    seen: set[str] = set()
    version = step = 0
    for _ in range(2_000):
        if step == 6:
            break
        ticket = buffer.next_episode(version, step)
        if ticket is not None:
            running.append(ticket)
        elif running:
            ticket = running.pop(chance.randrange(len(running)))
            if chance.random() < failures:
                buffer.discard(ticket, "step_ValueError")
            else:
                buffer.add(ticket, _trajectory(ticket))
        assert buffer.outstanding <= (1.0 + alpha) * 8
        assert buffer.running == len(running)
        if chance.random() < 0.3:
            batch = buffer.take(step)
            for stale in buffer.to_cancel():
                running.remove(stale)
                buffer.discard(stale, "cancelled")
            if batch is not None:
                assert all(trajectory.start_version >= step - alpha for trajectory in batch)
                assert 0 < len(batch) <= 8
                assert len(batch) == 8 or group_size > 1
                assert not seen & {trajectory.episode_id for trajectory in batch}
                seen |= {trajectory.episode_id for trajectory in batch}
                step += 1
                version += 1
        assert _accounted(buffer)
    assert step == 6, "no batch was completed: the buffer is stuck"


@pytest.mark.parametrize(("alpha", "while_training"), [(0.0, 0), (0.5, 0), (1.0, 4), (2.0, 8)])
def test_what_is_started_while_training_is_what_later_steps_can_take(
    alpha: float, while_training: int
) -> None:
    buffer = _buffer(batch_size=4, asynchrony=alpha)
    tickets = _start_all(buffer, version=0, step=0)
    assert len(tickets) == 4 + while_training
    _finish(buffer, tickets[:4])
    assert buffer.take(0) is not None
    # Version 0 still runs while step 0 is trained: what starts now is consumed by step 1 or later.
    assert len(_start_all(buffer, version=0, step=1)) == 0
    assert len(_start_all(buffer, version=1, step=1)) == 4


def test_alpha_zero_is_strictly_on_policy() -> None:
    buffer = _buffer(batch_size=4, asynchrony=0.0)
    for step in range(3):
        _finish(buffer, _start_all(buffer, version=step, step=step))
        batch = buffer.take(step)
        assert batch is not None and [trajectory.start_version for trajectory in batch] == [step] * 4
        assert buffer.next_episode(version=step, next_step=step + 1) is None


def test_a_batch_waits_for_the_oldest_so_that_slow_tasks_are_not_lost() -> None:
    buffer = _buffer(batch_size=2, asynchrony=1.0, on_stale="wait")
    first = _start_all(buffer, version=0, step=0)  # four episodes of version 0
    _finish(buffer, first[:2])
    assert buffer.take(0) is not None
    fresh = _start_all(buffer, version=1, step=1)
    _finish(buffer, [*fresh, first[2]])
    assert buffer.take(1) is None  # first[3] could not be taken by step 2
    _finish(buffer, [first[3]])
    batch = buffer.take(1)
    assert batch is not None
    assert {trajectory.episode_id for trajectory in batch} == {first[2].episode_id, first[3].episode_id}
    assert not buffer.discarded


def test_abort_takes_what_is_there_and_tries_the_stale_task_again() -> None:
    buffer = _buffer(batch_size=2, asynchrony=1.0, on_stale="abort")
    first = _start_all(buffer, version=0, step=0)
    _finish(buffer, first[:2])
    assert buffer.take(0) is not None
    _finish(buffer, [first[2], *_start_all(buffer, version=1, step=1)])
    assert buffer.take(1) is not None
    (stale,) = buffer.to_cancel()
    assert stale == first[3] and buffer.is_doomed(stale)
    buffer.discard(stale, "cancelled", tokens=7)
    assert (buffer.discarded, buffer.discarded_tokens) == ({"stale": 1}, {"stale": 7})
    again = buffer.next_episode(version=2, next_step=2)
    assert again is not None and again.task_seed == stale.task_seed and again.start_version == 2
    assert again.episode_id != stale.episode_id


def test_a_buffered_sample_that_became_too_old_is_discarded_not_delivered() -> None:
    buffer = _buffer(batch_size=2, asynchrony=1.0, max_retries=0)
    _finish(buffer, _start_all(buffer, version=0, step=0))
    assert buffer.take(7) is None
    assert buffer.counts()["discarded"] == {"stale": 4}
    assert _accounted(buffer) and buffer.outstanding == 0


def test_a_failed_member_is_replaced_and_a_hopeless_group_ends_short() -> None:
    buffer = _buffer(batch_size=4, group_size=4, asynchrony=0.0, max_retries=2)
    tickets = _start_all(buffer, version=0, step=0)
    assert len({ticket.group_id for ticket in tickets}) == 1
    _finish(buffer, tickets[:3])
    ticket = tickets[3]
    for _ in range(2):
        buffer.discard(ticket, "reset_OSError")
        assert buffer.take(0) is None
        replacement = buffer.next_episode(version=0, next_step=0)
        assert replacement is not None and replacement.task_seed == ticket.task_seed
        ticket = replacement
    buffer.discard(ticket, "reset_OSError")
    batch = buffer.take(0)
    assert batch is not None and len(batch) == 3
    assert buffer.counts()["discarded"] == {"reset_OSError": 3}


def test_a_group_without_any_sample_makes_room_for_the_next_task() -> None:
    buffer = _buffer(batch_size=1, asynchrony=0.0, max_retries=0)
    first = buffer.next_episode(0, 0)
    assert first is not None
    buffer.discard(first, "reset_OSError")
    second = buffer.next_episode(0, 0)
    assert second is not None and second.task_seed != first.task_seed


def test_36_groups_of_8_with_one_dead_environment_complete_a_batch_of_256() -> None:
    buffer = _buffer(batch_size=256, group_size=8, asynchrony=1.0, num_envs=288)
    alive: list[EpisodeTicket] = []
    for _ in range(288):  # 36 environments of 8 slots; everything on the last one dies at its first step
        ticket = buffer.next_episode(0, 0)
        assert ticket is not None
        alive.append(ticket)
    dead = alive[280:]
    for ticket in dead:
        buffer.discard(ticket, "step_timeout")
    _finish(buffer, alive[:280])
    batch = buffer.take(0)
    assert batch is not None and len(batch) == 256


def test_the_state_restores_the_buffer_and_plays_what_was_in_flight_again() -> None:
    config = RolloutConfig(batch_size=4, group_size=2, asynchrony=1.0)
    ledger = TaskLedger(seed=5)
    buffer = SampleBuffer(config, ledger)
    tickets = _start_all(buffer, version=0, step=0)
    _finish(buffer, tickets[:3])
    buffer.discard(tickets[3], "step_ValueError")
    state = json.loads(json.dumps({"ledger": ledger.state_dict(), "buffer": buffer.state_dict()}))
    assert [item["in_flight"] for item in state["buffer"]["groups"]][2:] == [
        ["g2-0", "g2-1"],
        ["g3-0", "g3-1"],
    ]

    other_ledger = TaskLedger(seed=5)
    restored = SampleBuffer(config, other_ledger)
    other_ledger.load_state_dict(state["ledger"])
    restored.load_state_dict(state["buffer"])
    assert _accounted(restored) and restored.buffered == 3 and restored.running == 0
    again = _start_all(restored, version=0, step=0)
    assert [ticket.task_seed for ticket in again] == [ticket.task_seed for ticket in tickets[3:]]
    assert not {ticket.episode_id for ticket in again} & {ticket.episode_id for ticket in tickets}
    _finish(restored, again)
    batch = restored.take(0)
    assert batch is not None and sorted(t.seed for t in batch) == sorted(t.task_seed for t in tickets[:4])
    # The next task is the one that an undisturbed run would have had.
    following = restored.next_episode(version=1, next_step=1)
    expected = [TaskLedger(seed=5).next_seed()]
    undisturbed = TaskLedger(seed=5)
    expected = [undisturbed.next_seed() for _ in range(5)]
    assert following is not None and following.task_seed == expected[4]


def test_a_ledger_that_ends_is_told() -> None:
    buffer = SampleBuffer(RolloutConfig(batch_size=4, asynchrony=0.0), TaskLedger(iter([1, 2])))
    assert len(_start_all(buffer, 0, 0)) == 2
    assert buffer.is_exhausted
    assert math.isclose(buffer.outstanding, 2)


@pytest.mark.parametrize(("step", "started"), [(0, 8), (1, 8), (2, 4), (3, 0)])
def test_nothing_is_started_that_only_a_step_after_the_last_could_take(step: int, started: int) -> None:
    buffer = _buffer(batch_size=4, asynchrony=1.0, num_steps=3)
    assert len(_start_all(buffer, version=step, step=step)) == started
