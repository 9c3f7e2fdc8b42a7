"""The prompt ledger: order, epochs and resume."""

import itertools

import pytest

from agentenv.errors import UsageError
from agentenv.rollout import Ledger, TaskLedger


def _take(ledger: TaskLedger, number: int) -> list[int]:
    return [ledger.next_seed() for _ in range(number)]


def test_each_epoch_hands_out_every_task_once_in_an_order_of_its_own() -> None:
    ledger = TaskLedger(range(20), seed=1)
    epochs = [_take(ledger, 20) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != _take(TaskLedger(range(20), seed=2), 20)


def test_without_tasks_the_stream_is_endless_and_follows_from_the_seed() -> None:
    first = _take(TaskLedger(seed=1), 200)
    assert first == _take(TaskLedger(seed=1), 200)
    assert first[:50] != _take(TaskLedger(seed=2), 50)
    assert len(set(first)) == 200 and all(0 <= seed < 2**31 for seed in first)


@pytest.mark.parametrize("kind", ["endless", "epochs", "iterator"])
def test_a_resumed_ledger_skips_nothing_and_repeats_nothing(kind: str) -> None:
    def make() -> TaskLedger:
        tasks = {"endless": None, "epochs": range(7), "iterator": itertools.count(100)}[kind]
        return TaskLedger(tasks, seed=3)

    whole = _take(make(), 40)
    before = make()
    taken = _take(before, 17)
    after = make()
    after.load_state_dict(before.state_dict())
    assert taken + _take(after, 23) == whole


def test_the_state_of_another_ledger_is_refused() -> None:
    state = TaskLedger(range(5), seed=1).state_dict()
    for other in (TaskLedger(range(6), seed=1), TaskLedger(range(5), seed=2), TaskLedger(seed=1)):
        with pytest.raises(UsageError, match="ledger to resume"):
            other.load_state_dict(state)


def test_an_iterator_ends_and_an_empty_sequence_is_refused() -> None:
    ledger = TaskLedger(iter([4, 5]))
    assert _take(ledger, 2) == [4, 5]
    with pytest.raises(StopIteration):
        ledger.next_seed()
    with pytest.raises(UsageError, match="empty"):
        TaskLedger([])
    assert isinstance(ledger, Ledger)
