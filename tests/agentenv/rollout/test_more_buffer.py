"""Single rules of the sample buffer that whole runs hardly show."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentenv.rollout import EpisodeTicket, RolloutConfig, SampleBuffer, TaskLedger
from agentenv.trajectory import Trajectory


def _buffer(**options: Any) -> SampleBuffer:
    settings = {"batch_size": 4, "num_envs": 32, "asynchrony": 0.0, **options}
    return SampleBuffer(RolloutConfig(**settings), TaskLedger(iter(range(1000))))


def _finish(buffer: SampleBuffer, *tickets: EpisodeTicket) -> None:
    for ticket in tickets:
        versions = [ticket.start_version]
        buffer.add(
            ticket,
            Trajectory(
                [1],
                [2],
                [-1.0],
                [True],
                versions,
                episode_id=ticket.episode_id,
                group_id=ticket.group_id,
                seed=ticket.task_seed,
                start_version=ticket.start_version,
            ),
        )


def _start(buffer: SampleBuffer, number: int, version: int = 0, step: int = 0) -> list[EpisodeTicket]:
    tickets = []
    for _ in range(number):
        ticket = buffer.next_episode(version, step)
        assert ticket is not None
        tickets.append(ticket)
    return tickets


def test_redundant_members_of_partial_groups_play_on_when_the_group_has_its_size() -> None:
    buffer = _buffer(group_size=2, redundant_members=1, partial_groups=True)
    _finish(buffer, *_start(buffer, 3)[:2])
    assert buffer.to_cancel() == []


def test_a_member_lost_without_a_retry_leaves_its_group_short() -> None:
    buffer = _buffer(group_size=2, max_retries=5)
    lost, kept, *_ = _start(buffer, 4)
    buffer.discard(lost, "error_KeyError", retry=False)
    _finish(buffer, kept)
    assert buffer.is_ready(lost.group_id) and buffer.next_episode(0, 0) is None


@pytest.mark.parametrize("finished", [True, False])
def test_only_the_stale_members_of_a_group_are_played_again(finished: bool) -> None:
    buffer = _buffer(group_size=2, asynchrony=1.0, batch_size=2)
    (old,) = _start(buffer, 1)
    (young,) = _start(buffer, 1, version=1, step=1)
    if finished:
        _finish(buffer, old, young)
    buffer.expire(2)
    assert buffer.to_cancel() == ([] if finished else [old])
    assert not buffer.is_doomed(young) and buffer.buffered == int(finished)
    assert _start(buffer, 1, version=2, step=2)[0].group_id == old.group_id


def test_with_redundancy_only_stale_groups_are_given_up() -> None:
    buffer = _buffer(asynchrony=1.0, redundant_groups=1)
    (old,) = _start(buffer, 1)
    (young,) = _start(buffer, 1, version=1, step=1)
    buffer.expire(2)
    assert buffer.to_cancel() == [old] and not buffer.is_doomed(young)
    # The task of the old one comes before a new one.
    assert [ticket.task_seed for ticket in _start(buffer, 2, version=2, step=2)] == [old.task_seed, 2]


def test_full_groups_come_before_short_ones_of_their_version() -> None:
    buffer = _buffer(group_size=2, batch_size=2, redundant_groups=1, max_retries=0)
    lost, kept, *full = _start(buffer, 4)
    buffer.discard(lost, "step_OSError")
    _finish(buffer, kept, *full)
    batch = buffer.take(0)
    assert batch is not None and {trajectory.group_id for trajectory in batch} == {full[0].group_id}


def test_a_batch_is_complete_with_enough_groups_at_their_last_chance_whatever_else_runs() -> None:
    # Step 0 was left out: twice a batch has its last chance.
    buffer = _buffer(asynchrony=1.0)
    tickets = _start(buffer, 8)
    _finish(buffer, *tickets[:4])
    assert buffer.take(1) is not None
    assert buffer.discarded == {} and [t.episode_id for t in buffer.to_cancel()] == [
        t.episode_id for t in tickets[4:]
    ]


def test_room_that_a_short_group_leaves_among_partial_groups_is_counted_with_redundant_members() -> None:
    buffer = _buffer(group_size=2, redundant_members=1, partial_groups=True, max_retries=0)
    lost, *others = _start(buffer, 6)
    assert buffer.next_episode(0, 0) is None
    buffer.discard(lost, "step_OSError")
    replacement = _start(buffer, 1)[0]
    assert replacement.group_id not in {ticket.group_id for ticket in others}
    assert buffer.next_episode(0, 0) is None and buffer.outstanding == 6


def test_what_partial_groups_leave_over_is_surplus_and_its_task_comes_again() -> None:
    buffer = _buffer(group_size=2, partial_groups=True, asynchrony=1.0)
    tickets = _start(buffer, 8)
    _finish(buffer, *tickets[:4])
    assert buffer.take(0) is not None
    _finish(buffer, *tickets[4:5])
    replacements = _start(buffer, 4, version=1, step=1)
    _finish(buffer, *replacements[:4])
    assert buffer.take(1) is not None
    assert [ticket.episode_id for ticket in buffer.to_cancel()] == [t.episode_id for t in tickets[5:]]
    assert buffer.state_dict()["again"] == [[tickets[6].task_seed, 1]]
    for ticket in tickets[5:]:
        buffer.discard(ticket, "cancelled")
    assert set(buffer.discarded) == {"surplus"}


def test_episodes_are_numbered_on_after_a_restart() -> None:
    buffer = _buffer()
    last = _start(buffer, 3)[-1]
    restored = _buffer()
    restored.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    # The number seeds the sampling: what is played again is sampled anew.
    assert _start(restored, 1)[0].number == last.number + 1


def test_in_batch_mode_a_slot_that_rests_does_not_let_rewards_begin(virtual_run: Any, tasks: Any) -> None:
    def step_s(seed: int, member: int, turn: int) -> float:
        if seed == 1:
            raise OSError("dead")
        return 1.0

    rewarded: list[float] = []

    async def reward(trajectory: Trajectory) -> float:
        rewarded.append(asyncio.get_running_loop().time())
        return 1.0

    played = tasks(step_s=step_s)
    run = virtual_run(
        played,
        mode="batch",
        batch_size=4,
        num_envs=1,
        max_retries=0,
        reward_fn=reward,
        task_seeds=iter(range(20)),
    )
    run.controller.get_batch(0)
    wave = [time for time in played.times("stepped") if time <= min(rewarded)]
    assert len(wave) == 3 and min(rewarded) >= wave[-1]


def test_in_batch_mode_a_ledger_that_ends_within_a_wave_ends_the_run_at_once(
    virtual_run: Any, tasks: Any
) -> None:
    async def reward(trajectory: Trajectory) -> float:
        return 1.0

    run = virtual_run(
        tasks(step_s=lambda *_: 1.0), mode="batch", batch_size=4, reward_fn=reward, task_seeds=iter(range(6))
    )
    run.train(1)
    with pytest.raises(Exception, match="no task is left for step 1"):
        run.controller.get_batch(1)
    assert run.now == 4.0
