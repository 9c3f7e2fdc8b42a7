"""The sample buffer and the prompt ledger under every order of calls: hypothesis plays scheduler and trainer.

The machine keeps its own account of each episode and each task and compares after every call. It learns which episodes
are to be cancelled as the scheduler does (``to_cancel``), and which finished ones are gone from the buffer's groups.
"""

import copy
import json
import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentenv.rollout import EpisodeTicket, RolloutConfig, SampleBuffer, TaskLedger
from agentenv.trajectory import Trajectory

_STEPS = 40


class LimitedLedger:
    """A TaskLedger's endless seeds, of which only the first ``most`` are handed out. Notes them."""

    def __init__(self, most: int | None) -> None:
        self._ledger = TaskLedger(seed=3)
        self._most = most
        self.handed_out: list[int] = []

    def next_seed(self) -> int:
        if self._most is not None and len(self.handed_out) >= self._most:
            raise StopIteration
        self.handed_out.append(self._ledger.next_seed())
        return self.handed_out[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"ledger": self._ledger.state_dict(), "handed_out": self.handed_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ledger.load_state_dict(state["ledger"])
        self.handed_out = list(state["handed_out"])


def keep_two_in_three(group: list[Trajectory]) -> bool:
    """A user's filter: one task in three is not wanted."""
    return group[0].seed % 3 != 0


def random_config(chance: random.Random) -> RolloutConfig:
    """Any of the settings that the buffer knows, in sizes in which everything happens often."""
    group_size = chance.choice([1, 2, 3])
    partial = group_size > 1 and chance.random() < 0.3
    mode = chance.choice(["async", "async", "async", "sync", "batch"])
    # In lock-step nothing is redundant.
    groups, members = (
        (0, 0) if mode == "batch" else (chance.choice([0, 0, 1, 2]), chance.choice([0, 0, 1, 2]))
    )
    return RolloutConfig(
        num_envs=64,
        group_size=group_size,
        batch_size=group_size * chance.choice([1, 2, 3]),
        asynchrony=chance.choice([0.0, 0.5, 1.0, 1.5, 2.0, 4.0]),
        mode=mode,
        redundant_groups=groups,
        redundant_members=members,
        partial_groups=partial,
        filter_zero_variance=group_size > 1 and not partial and chance.random() < 0.4,
        on_stale=chance.choice(["wait", "abort"]),
        num_steps=chance.choice([None, None, 3, 6]),
        max_retries=chance.choice([0, 1, 2]),
    )


class BufferMachine(RuleBasedStateMachine):
    """Plays against one buffer."""

    @initialize(
        config=st.integers(0, 10**6).map(lambda seed: random_config(random.Random(seed))),
        filtered=st.booleans(),
        most=st.sampled_from([None, None, None, 4, 12]),
    )
    def begin(self, config: RolloutConfig, filtered: bool, most: int | None) -> None:
        self.config = config
        self.most = most
        self.filtered = filtered and not config.partial_groups
        self.ledger = LimitedLedger(most)
        self.buffer = self._new_buffer(self.ledger)
        self.version = self.step = 0
        self.running: dict[str, EpisodeTicket] = {}
        self.doomed: dict[str, tuple[EpisodeTicket, str]] = {}
        self.finished: dict[str, Trajectory] = {}
        self.taken: set[str] = set()
        self.gone: set[str] = set()
        """Discarded, in whatever way."""
        self.names: set[str] = set()
        self.discarded: Counter[str] = Counter()
        self.discarded_tokens: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        """Members of each group that failed or became stale."""
        self.given_up_by_caller: set[str] = set()
        """Groups with a member that was not to be tried again."""
        self.consumed_tasks: Counter[int] = Counter()
        self.ended_tasks: Counter[int] = Counter()
        """Filtered, or given up after failures."""
        self.open_tasks: dict[str, int] = {}
        self.times_surplus: Counter[int] = Counter()
        self.tasks_given_up = 0
        """Those that were surplus too often."""

    def _new_buffer(self, ledger: LimitedLedger) -> SampleBuffer:
        return SampleBuffer(self.config, ledger, keep_group=keep_two_in_three if self.filtered else None)

    @property
    def alpha(self) -> float:
        return self.config.asynchrony if self.config.mode == "async" else 0.0

    @property
    def last_step(self) -> float:
        return math.inf if self.config.num_steps is None else self.config.num_steps - 1

    # What the scheduler does.

    @precondition(lambda self: self.step < _STEPS)
    @rule(most=st.integers(1, 12))
    def start(self, most: int) -> None:
        for _ in range(most):
            ticket = self.buffer.next_episode(self.version, self.step)
            if ticket is None:
                break
            self._note_ticket(ticket)
        self._follow("start")

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 10**6), reward=st.sampled_from([0.0, 1.0]), tokens=st.integers(0, 4))
    def finish(self, pick: int, reward: float, tokens: int) -> None:
        ticket = self.running.pop(self._pick(self.running, pick))
        trajectory = _trajectory(ticket, reward, tokens)
        self.finished[ticket.episode_id] = trajectory
        self.buffer.add(ticket, trajectory)
        self._follow("finish")

    @precondition(lambda self: self.running)
    @rule(
        pick=st.integers(0, 10**6), retry=st.sampled_from([True, True, True, False]), tokens=st.integers(0, 4)
    )
    def fail(self, pick: int, retry: bool, tokens: int) -> None:
        ticket = self.running.pop(self._pick(self.running, pick))
        self.lost[ticket.group_id] += 1
        if not retry:
            self.given_up_by_caller.add(ticket.group_id)
        self._note_loss(ticket.episode_id, "step_ValueError", tokens)
        self.buffer.discard(ticket, "step_ValueError", tokens=tokens, retry=retry)
        self._follow("fail")

    @precondition(lambda self: self.doomed)
    @rule(pick=st.integers(0, 10**6), well=st.booleans(), tokens=st.integers(0, 4))
    def end_doomed(self, pick: int, well: bool, tokens: int) -> None:
        ticket, reason = self.doomed.pop(self._pick(self.doomed, pick))
        assert self.buffer.is_doomed(ticket)
        self._note_loss(ticket.episode_id, reason, tokens)
        if well:
            self.buffer.add(ticket, _trajectory(ticket, 1.0, tokens))
        else:
            self.buffer.discard(ticket, "whatever", tokens=tokens)
        assert not self.buffer.is_doomed(ticket)
        self._follow("end_doomed")

    # What the trainer does.

    @precondition(lambda self: self.version < self.step)
    @rule()
    def sync_weights(self) -> None:
        self.version += 1

    @precondition(lambda self: self.step < _STEPS)
    @rule()
    def skip_a_step(self) -> None:
        self.step += 1
        self.version = self.step
        self.buffer.expire(self.step)
        self._follow("expire")

    @rule()
    def expire(self) -> None:
        self.buffer.expire(self.step)
        self._follow("expire")

    @precondition(lambda self: self.step < _STEPS)
    @rule()
    def take(self) -> None:
        groups = {name: (g.oldest_version, g.is_ready) for name, g in self.buffer._groups.items()}
        batch = self.buffer.take(self.step)
        if batch is None:
            self._follow("expire")
            return
        self._check_batch(batch, groups)
        for trajectory in batch:
            del self.finished[trajectory.episode_id]
            self.taken.add(trajectory.episode_id)
        for name in {trajectory.group_id for trajectory in batch}:
            self.consumed_tasks[self.open_tasks.pop(name)] += 1
        self.step += 1
        self._follow("take")

    @rule()
    def save_and_restore(self) -> None:
        state = json.loads(
            json.dumps({"ledger": self.ledger.state_dict(), "buffer": self.buffer.state_dict()})
        )
        counts = self.buffer.counts()
        in_flight = {name for group in state["buffer"]["groups"] for name in group["in_flight"]}
        assert in_flight == set(self.running)
        self.ledger = LimitedLedger(self.most)
        self.ledger.load_state_dict(state["ledger"])
        self.buffer = self._new_buffer(self.ledger)
        self.buffer.load_state_dict(state["buffer"])
        self.running, self.doomed = {}, {}
        assert self.buffer.counts() == {**counts, "running": 0}
        self._follow("restore")

    @rule(seed=st.integers(0, 100))
    def whatever_runs_ends_and_a_batch_comes(self, seed: int) -> None:
        """No state is a dead end: in a copy, ending what runs and starting what may start gives a batch."""
        if self.step > self.last_step:
            return
        chance = random.Random(seed)
        buffer = copy.deepcopy(self.buffer)
        to_end = [*self.running.values(), *(ticket for ticket, _ in self.doomed.values())]
        chance.shuffle(to_end)
        rounds = 6 * (self.config.max_groups + 4)
        for _ in range(rounds):
            while (ticket := buffer.next_episode(max(self.version, self.step), self.step)) is not None:
                to_end.append(ticket)
            for place, ticket in enumerate(to_end):
                buffer.add(ticket, _trajectory(ticket, float(place % 2), 1))
            to_end = []
            if buffer.take(self.step) is not None:
                return
            if buffer.is_exhausted and buffer.outstanding == buffer.buffered:
                return  # the scheduler says so and ends the run
        raise AssertionError(f"no batch in {rounds} rounds: {buffer.counts()}")

    # What must hold.

    @invariant()
    def the_account_is_right(self) -> None:
        buffer = self.buffer
        assert buffer.produced == buffer.consumed + buffer.buffered + sum(buffer.discarded.values())
        assert buffer.buffered == len(self.finished)
        assert buffer.running == len(self.running) + len(self.doomed)
        assert buffer.consumed == len(self.taken)
        assert +buffer.discarded == +self.discarded
        assert +buffer.discarded_tokens == +self.discarded_tokens
        assert not self.taken & self.gone

    @invariant()
    def the_bound_holds(self) -> None:
        config = self.config
        assert self.buffer.outstanding <= config.max_outstanding
        groups = (1.0 + self.alpha) * config.batch_size / config.group_size + config.redundant_groups
        # Where batches are counted in episodes, the groups that have lost members may be more.
        assert config.partial_groups or len(self.buffer._groups) <= groups

    @invariant()
    def the_indices_equal_what_they_index(self) -> None:
        groups = self.buffer._groups
        assert self.buffer._standing == Counter((g.oldest_version, g.is_ready) for g in groups.values())
        assert set(self.buffer._unstarted) == {name for name, group in groups.items() if group.waiting}
        for name, group in groups.items():
            assert group.size > 0 and group.waiting >= 0
            assert self.buffer.is_ready(name) == group.is_ready
            assert len(group.finished) <= most_finished(self.config)

    @invariant()
    def no_task_is_lost_or_doubled(self) -> None:
        assert self.buffer.tasks_given_up == self.tasks_given_up
        places = Counter(self.consumed_tasks)
        places.update(self.ended_tasks)
        places.update(group.task_seed for group in self.buffer._groups.values())
        places.update(seed for seed, _ in self.buffer._again)
        assert places == Counter(self.ledger.handed_out)

    # The machine's own books.

    def _pick(self, among: Mapping[str, Any], pick: int) -> str:
        return sorted(among)[pick % len(among)]

    def _note_ticket(self, ticket: EpisodeTicket) -> None:
        assert ticket.episode_id not in self.names, "an episode's name came twice"
        assert ticket.start_version == self.version
        usable = min(self.last_step, self.version + self.alpha)
        assert self.step <= usable, "no step can take what was started"
        self.names.add(ticket.episode_id)
        self.running[ticket.episode_id] = ticket
        assert self.buffer._groups[ticket.group_id].task_seed == ticket.task_seed

    def _note_loss(self, name: str, reason: str, tokens: int) -> None:
        self.gone.add(name)
        self.discarded[reason] += 1
        self.discarded_tokens[reason] += tokens

    def _follow(self, what: str) -> None:
        """Note what the call did to other episodes and to groups."""
        doomed = dict(self.buffer._doomed)
        for ticket in self.buffer.to_cancel():
            assert ticket.episode_id in self.running, "named twice, or not running"
            del self.running[ticket.episode_id]
            self.doomed[ticket.episode_id] = (ticket, doomed[ticket.episode_id])
            if doomed[ticket.episode_id] == "stale":
                self.lost[ticket.group_id] += 1
        assert set(self.buffer._doomed) == set(self.doomed)
        assert set(self.running) == {name for g in self.buffer._groups.values() for name in g.running}
        held = {item.episode_id for group in self.buffer._groups.values() for item in group.finished}
        for name in set(self.finished) - held:
            trajectory = self.finished.pop(name)
            reason = self._reason(what, trajectory)
            if reason == "stale":
                self.lost[trajectory.group_id] += 1
            self._note_loss(name, reason, trajectory.num_action_tokens)
        assert set(self.finished) == held
        self._follow_groups(what)

    @property
    def _is_redundant(self) -> bool:
        config = self.config
        return bool(config.redundant_groups or config.redundant_members or config.partial_groups)

    def _reason(self, what: str, gone: Trajectory) -> str:
        """Under which a finished episode must have been discarded."""
        if what in ("finish", "fail"):
            return "filtered"
        if self._is_redundant:
            return "surplus" if what == "take" else "stale"
        # What is left of a group that lost its oldest members may be filtered.
        return "stale" if gone.start_version < self.step - self.alpha else "filtered"

    def _follow_groups(self, what: str) -> None:
        now = {name: group.task_seed for name, group in self.buffer._groups.items()}
        again = Counter(seed for seed, _ in self.buffer._again)
        for name in set(self.open_tasks) - set(now):
            seed = self.open_tasks.pop(name)
            if again[seed] > 0:
                assert self._is_redundant and what in ("expire", "take")
                self.times_surplus[seed] += 1
                assert (seed, self.times_surplus[seed]) in self.buffer._again
                continue
            too_often = self._is_redundant and self.times_surplus[seed] == self.config.max_retries
            if too_often and self.buffer.tasks_given_up > self.tasks_given_up:
                assert what in ("expire", "take")
                self.tasks_given_up += 1
                self.ended_tasks[seed] += 1
                continue
            self.ended_tasks[seed] += 1
            was_filtered = self.filtered or self.config.filter_zero_variance
            exhausted = self.lost[name] > self.config.max_retries or name in self.given_up_by_caller
            assert was_filtered or exhausted, f"{name} was given up without a reason"
            assert exhausted or what in ("finish", "fail", "expire", "take")
        self.open_tasks.update(now)

    def _check_batch(self, batch: list[Trajectory], before: Mapping[str, tuple[float, bool]]) -> None:
        """Check a batch; ``before`` has the oldest version and the readiness of all groups."""
        config = self.config
        names = [trajectory.episode_id for trajectory in batch]
        assert len(set(names)) == len(names) and set(names) <= set(self.finished)
        assert all(trajectory.start_version >= self.step - self.alpha for trajectory in batch)
        groups = Counter(trajectory.group_id for trajectory in batch)
        if config.partial_groups:
            assert len(batch) == config.batch_size
            return
        assert len(groups) == config.groups_per_batch
        for name, members in groups.items():
            assert members <= config.group_size
            failed = self.lost[name] > config.max_retries or name in self.given_up_by_caller
            assert members == config.group_size or failed or before[name][0] < self.step - self.alpha
            assert len({trajectory.seed for trajectory in batch if trajectory.group_id == name}) == 1
        # The oldest are taken first, and with "wait" none of them is passed over while it runs.
        next_oldest = self.step + 1 - self.alpha
        oldest = self.step - self.alpha
        last_chance = {name for name, (version, _) in before.items() if oldest <= version < next_oldest}
        if set(groups) - last_chance:
            left = last_chance - set(groups)
            assert not any(before[name][1] for name in left)
            if config.on_stale == "wait":
                assert len(left) <= config.redundant_groups


def most_finished(config: RolloutConfig) -> int:
    """Most finished members of a group."""
    return config.launched_per_group if config.partial_groups else config.group_size


def _trajectory(ticket: EpisodeTicket, reward: float, tokens: int) -> Trajectory:
    return Trajectory(
        [1],
        [2] * tokens,
        [-1.0] * tokens,
        [True] * tokens,
        [ticket.start_version] * tokens,
        reward=reward,
        episode_id=ticket.episode_id,
        group_id=ticket.group_id,
        seed=ticket.task_seed,
        start_version=ticket.start_version,
    )


BufferMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
TestSampleBuffer = BufferMachine.TestCase


@pytest.mark.parametrize("block", range(8))
def test_long_schedules_keep_every_account(block: int) -> None:
    """The machine's rules with the odds of a run: hypothesis alone seldom gets past the first few steps."""
    for seed in range(25 * block, 25 * (block + 1)):
        try:
            play_long_schedule(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def play_long_schedule(seed: int) -> BufferMachine:
    """One schedule and all checks."""
    chance = random.Random(seed)
    machine = BufferMachine()
    machine.begin(random_config(chance), chance.random() < 0.4, chance.choice([None, None, None, 12, 40]))
    invariants = [
        machine.the_account_is_right,
        machine.the_bound_holds,
        machine.the_indices_equal_what_they_index,
        machine.no_task_is_lost_or_doubled,
    ]
    for _ in range(250):
        draw = chance.random()
        pick, tokens = chance.randrange(10**6), chance.randrange(5)
        if draw < 0.3:
            machine.start(most=chance.randint(1, 12))
        elif draw < 0.65 and machine.running:
            machine.finish(pick=pick, reward=float(chance.random() < 0.5), tokens=tokens)
        elif draw < 0.72 and machine.running:
            machine.fail(pick=pick, retry=chance.random() < 0.8, tokens=tokens)
        elif draw < 0.78 and machine.doomed:
            machine.end_doomed(pick=pick, well=chance.random() < 0.5, tokens=tokens)
        elif draw < 0.88 and machine.step < 30:
            machine.take()
        elif draw < 0.95 and machine.version < machine.step:
            machine.sync_weights()
        elif draw < 0.965:
            machine.save_and_restore()
        elif draw < 0.975:
            machine.expire()
        elif draw < 0.98 and machine.step < 30:
            machine.skip_a_step()
        elif draw > 0.99:
            machine.whatever_runs_ends_and_a_batch_comes(seed=pick)
        for check in invariants:
            check()
    machine.whatever_runs_ends_and_a_batch_comes(seed=seed)
    return machine


def test_partial_groups_replace_what_a_group_has_lost() -> None:
    config = RolloutConfig(
        num_envs=8, batch_size=4, group_size=2, asynchrony=0.0, partial_groups=True, max_retries=0
    )
    buffer = SampleBuffer(config, TaskLedger(seed=0))
    tickets = [buffer.next_episode(0, 0) for _ in range(4)]
    for ticket in tickets[1:]:
        assert ticket is not None
        buffer.add(ticket, _trajectory(ticket, 1.0, 1))
    assert tickets[0] is not None
    buffer.discard(tickets[0], "step_ValueError")
    # Three of four episodes are there, nothing runs: without another one the batch never comes.
    another = buffer.next_episode(0, 0)
    assert another is not None
    buffer.add(another, _trajectory(another, 1.0, 1))
    batch = buffer.take(0)
    assert batch is not None and len(batch) == 4


class LedgerMachine(RuleBasedStateMachine):
    """Hands out, saves, restores and goes back, against the sequence written down beforehand."""

    @initialize(
        kind=st.sampled_from(["endless", "epochs", "one", "stream", "short stream"]), seed=st.integers(0, 5)
    )
    def begin(self, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed
        ledger = self._new()
        self.sequence: list[int] = []
        while len(self.sequence) < 200:
            try:
                self.sequence.append(ledger.next_seed())
            except StopIteration:
                break
        self.ledger = self._new()
        self.position = 0
        self.saved: list[tuple[int, dict[str, Any]]] = []

    def _new(self) -> TaskLedger:
        tasks: Any = {
            "endless": None,
            "epochs": [7, 3, 9, 4, 1],
            "one": [5],
            "stream": iter(range(100, 1000)),
            "short stream": iter([8, 2, 6]),
        }[self.kind]
        return TaskLedger(tasks, seed=self.seed)

    @precondition(lambda self: self.position < 150)
    @rule(number=st.integers(1, 12))
    def take(self, number: int) -> None:
        for _ in range(number):
            if self.position == len(self.sequence):
                with pytest.raises(StopIteration):
                    self.ledger.next_seed()
                return
            assert self.ledger.next_seed() == self.sequence[self.position]
            self.position += 1

    @rule()
    def save(self) -> None:
        self.saved.append((self.position, json.loads(json.dumps(self.ledger.state_dict()))))

    @precondition(lambda self: self.saved)
    @rule(pick=st.integers(0, 100))
    def restore_in_a_new_one(self, pick: int) -> None:
        self.position, state = self.saved[pick % len(self.saved)]
        self.ledger = self._new()
        self.ledger.load_state_dict(state)

    @precondition(lambda self: self.saved and "stream" not in self.kind)
    @rule(pick=st.integers(0, 100))
    def go_back_in_the_same(self, pick: int) -> None:
        self.position, state = self.saved[pick % len(self.saved)]
        self.ledger.load_state_dict(state)

    @invariant()
    def each_epoch_has_every_task_once(self) -> None:
        if self.kind == "epochs":
            for start in range(0, 50, 5):
                assert sorted(self.sequence[start : start + 5]) == [1, 3, 4, 7, 9]


LedgerMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestTaskLedger = LedgerMachine.TestCase
