"""Scripted agents and the simulated workspace that the warm start learns from."""

import random

from agentenv_envs.swe.embedded.demonstrations import (
    GUESS_AND_TEST,
    MEDIOCRE,
    ORACLE,
    SimulatedWorkspace,
    first_edit,
    next_edit,
    simulate,
)
from agentenv_envs.swe.embedded.tasks import Edit, generate_task
from agentenv_envs.swe.protocols import SUBMIT, as_action


def test_the_oracle_solves_every_single_bug() -> None:
    assert all(simulate(generate_task(seed), ORACLE, random.Random(0))[1] for seed in range(100))


def test_the_mediocre_demonstrator_solves_some_and_not_most() -> None:
    rng = random.Random(0)
    solved = sum(simulate(generate_task(seed), MEDIOCRE, rng)[1] for seed in range(500)) / 500
    assert 0.3 < solved < 0.55


def test_guess_and_test_never_tries_the_same_edit_twice_and_always_tests() -> None:
    rng = random.Random(0)
    for seed in range(50):
        turns, _ = simulate(generate_task(seed), GUESS_AND_TEST, rng)
        edits = [action.split("'")[1] for action, _ in turns if "sed" in action]
        assert len(edits) == len(set(edits))
        assert sum("test.py" in action for action, _ in turns) == len(edits)
        assert turns[-1][0] == as_action(SUBMIT)


def test_a_later_edit_starts_from_the_module_as_it_was() -> None:
    task = generate_task(3)
    workspace = SimulatedWorkspace(task)
    wrong = next(edit for edit in task.candidate_edits if edit not in task.gold_edits)
    workspace.edit(wrong)
    assert workspace.test() != "ok"
    workspace.edit(task.gold_edits[0])
    assert workspace.solved and workspace.test() == "ok"


def test_the_commands_of_an_edit() -> None:
    edit = Edit(4, "<", "<=")
    assert first_edit(edit) == "sed -i.bak '4s/</<=/' app.py"
    assert next_edit(edit) == "sed '4s/</<=/' app.py.bak >app.py"
