"""Generated tasks: reproducible, valid, disjoint between splits."""

import subprocess
import sys

import pytest

from agentenv.errors import UsageError
from agentenv_envs.swe.embedded.families import FAMILIES, HELD_OUT_FAMILIES, TRAIN_FAMILIES
from agentenv_envs.swe.embedded.tasks import MODULE, generate_task, run_calls

SEEDS = range(60)


def test_the_same_seed_gives_the_same_task_in_another_process() -> None:
    code = (
        "from agentenv_envs.swe.embedded import generate_task as g; print([g(s).task_id for s in range(5)])"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    ).stdout
    assert there.strip() == repr([generate_task(seed).task_id for seed in range(5)])


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_gold_passes_every_hidden_check_and_the_bug_fails_some_but_not_all(level: int) -> None:
    for seed in SEEDS:
        task = generate_task(seed, levels=(level,))
        assert run_calls(task.gold, task.hidden_calls) == list(task.expected)
        right = [
            a == b
            for a, b in zip(run_calls(task.files[MODULE], task.hidden_calls), task.expected, strict=True)
        ]
        assert any(right) and not all(right), task.task_id


def test_the_gold_edits_turn_the_buggy_module_into_the_gold_one() -> None:
    for seed in SEEDS:
        task = generate_task(seed, levels=(1, 2, 3))
        source = task.files[MODULE]
        for edit in task.gold_edits:
            source = edit.apply(source)
        assert source == task.gold


def test_the_gold_edit_is_one_of_many_candidates() -> None:
    for seed in SEEDS:
        task = generate_task(seed)
        assert set(task.gold_edits) <= set(task.candidate_edits)
        assert len(set(task.candidate_edits)) >= 4


def test_no_held_out_task_is_a_training_task() -> None:
    train = {generate_task(seed).task_id for seed in range(3000)}
    held_out = {generate_task(seed, split="heldout").task_id for seed in range(1000)}
    assert not train & held_out


def test_held_out_families_appear_in_no_other_split() -> None:
    assert set(TRAIN_FAMILIES) | set(HELD_OUT_FAMILIES) == set(FAMILIES)
    assert {generate_task(s).family for s in range(200)} == set(TRAIN_FAMILIES)
    assert {generate_task(s, split="heldout_families").family for s in range(50)} == set(HELD_OUT_FAMILIES)


def test_the_issue_never_names_a_line_and_level_two_never_the_function() -> None:
    for seed in SEEDS:
        task = generate_task(seed, levels=(2,))
        assert "line" not in task.issue
        assert not any(f"{name}(" in task.issue for f in FAMILIES[task.family] for name in f.names)


def test_hidden_calls_differ_from_what_the_visible_script_shows() -> None:
    for seed in SEEDS:
        task = generate_task(seed)
        shown = sum(
            f"{name}({', '.join(map(repr, args))})" in task.files["test.py"]
            for name, args in task.hidden_calls
        )
        assert shown < len(task.hidden_calls) / 2
        assert repr(list(task.expected)) not in "".join(task.files.values())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"split": "test"}, "'test'"),
        ({"levels": (5,)}, r"\[5\]"),
        ({"levels": ()}, r"\[\]"),
        ({"families": ["grid"]}, "'grid'"),
        ({"families": ["nothing"]}, "'nothing'"),
    ],
)
def test_a_bad_argument_is_refused_by_name(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        generate_task(0, **arguments)  # type: ignore[arg-type]
