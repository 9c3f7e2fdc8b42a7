"""What a recipe's trainer is given: the episodes as they were, or a control's."""

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentenv.report import RunDirectory
from agentenv.report.run_directory import read_lines
from agentenv.trajectory import Trajectory
from agentenv_trainers.recipe.interruption import Interrupted, Interruption
from agentenv_trainers.recipe.rollouts import RecordedRollouts


class Source:
    """Sixteen episodes a step, each with a reward of its own; Ctrl-C may come while a batch is waited for or taken."""

    def __init__(self, *, interrupted: str = "") -> None:
        self.consumed = 0
        self.interrupted = interrupted

    def get_batch(self, step: int) -> list[Trajectory]:
        if self.interrupted == "waiting":
            signal.raise_signal(signal.SIGINT)
        self.consumed += 16
        if self.interrupted == "taken":
            signal.raise_signal(signal.SIGINT)
        return [
            Trajectory([1], [2], [-0.5], [True], [0], reward=float(i), episode_id=f"{step}-{i}")
            for i in range(16)
        ]

    def counts(self) -> dict[str, Any]:
        return {"consumed": self.consumed}

    def start(self) -> None: ...

    def sync_weights(self, weights: Mapping[str, Any], version: int) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    run = RunDirectory.create(tmp_path / "run", {"name": "test"})
    yield run
    run.close()


def test_the_trainer_gets_the_rewards_that_the_episodes_had(run: RunDirectory) -> None:
    batch = RecordedRollouts(Source(), run, Interruption()).get_batch(0)
    assert [item.reward for item in batch] == [float(i) for i in range(16)]


def test_a_control_deals_the_same_rewards_to_other_episodes_and_writes_down_the_true_ones(
    run: RunDirectory,
) -> None:
    rollouts = RecordedRollouts(Source(), run, Interruption(), shuffle_seed=0)
    first, second = rollouts.get_batch(0), rollouts.get_batch(1)
    true = [float(i) for i in range(16)]
    for batch in (first, second):
        rewards = [item.reward for item in batch]
        assert sorted(rewards) == true
        assert sum(a == b for a, b in zip(rewards, true, strict=True)) < 8
    assert [item.reward for item in first] != [item.reward for item in second]
    assert [line["reward"] for line in read_lines(run.trajectories_path)] == true * 2


def test_a_control_is_the_same_for_the_same_seed(run: RunDirectory) -> None:
    batches = [RecordedRollouts(Source(), run, Interruption(), shuffle_seed=3).get_batch(5) for _ in range(2)]
    assert [item.reward for item in batches[0]] == [item.reward for item in batches[1]]


def test_a_batch_is_written_under_the_step_that_trains_on_it(run: RunDirectory) -> None:
    rollouts = RecordedRollouts(Source(), run, Interruption())
    rollouts.get_batch(0)
    rollouts.get_batch(1)
    written = [(line["step"], line["episode_id"]) for line in read_lines(run.trajectories_path)]
    assert written == [(step + 1, f"{step}-{i}") for step in (0, 1) for i in range(16)]


def test_only_so_many_episodes_of_a_step_are_kept_but_all_are_trained_on(run: RunDirectory) -> None:
    assert len(RecordedRollouts(Source(), run, Interruption(), keep=2).get_batch(0)) == 16
    assert [line["episode_id"] for line in read_lines(run.trajectories_path)] == ["0-0", "0-1"]


@pytest.mark.parametrize(("moment", "lost"), [("waiting", False), ("taken", True)])
def test_an_interrupted_wait_tells_whether_a_batch_was_lost(
    run: RunDirectory, moment: str, lost: bool
) -> None:
    with Interruption() as interruption:
        rollouts = RecordedRollouts(Source(interrupted=moment), run, interruption)
        with pytest.raises(Interrupted):
            rollouts.get_batch(0)
    assert rollouts.batch_lost is lost
    assert not run.trajectories_path.exists()


def test_episodes_are_written_under_the_training_step_that_uses_them(run: RunDirectory) -> None:
    # Two updates a batch: the second batch is used from the third step on, and so a checkpoint of step 2 knows no more
    # than the first.
    steps_done = 0
    rollouts = RecordedRollouts(Source(), run, Interruption(), next_step=lambda: steps_done + 1)
    rollouts.get_batch(0)
    steps_done = 2
    rollouts.get_batch(1)
    assert {line["step"] for line in read_lines(run.trajectories_path)} == {1, 3}
    run.rewind(2)
    assert {line["step"] for line in read_lines(run.trajectories_path)} == {1}
