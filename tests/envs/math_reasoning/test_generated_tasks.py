"""Generated problems: their answers are right, their splits are apart, and the seed decides."""

import contextlib
import io
import re
import subprocess
import sys

import pytest

from agentenv.errors import UsageError
from agentenv_envs.math_reasoning.embedded import FAMILIES, LEVELS, generate_task
from agentenv_envs.math_reasoning.exact import read_values
from agentenv_envs.math_reasoning.grading import grade_answer
from agentenv_envs.math_reasoning.task import MathTask


def printed(task: MathTask) -> str:
    assert task.program is not None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(task.program, {})
    return out.getvalue().strip()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_program_that_knows_the_problems_numbers_finds_the_answer(family: str, level: int) -> None:
    for seed in range(15):
        task = generate_task(seed, levels=[level], families=[family])
        assert task.values is not None
        assert read_values(printed(task), len(task.values)) == task.values, task
        assert grade_answer(task, task.answer).correct
        assert (task.family, task.level) == (family, level)


@pytest.mark.parametrize("level", LEVELS)
def test_no_held_out_problem_is_a_training_problem(level: int) -> None:
    train, heldout = (
        {generate_task(seed, split=split, levels=[level]).task_id for seed in range(1500)}
        for split in ("train", "heldout")
    )
    assert not train & heldout
    assert len(heldout) > 100


def test_another_wording_is_the_same_problem_and_so_in_the_same_split() -> None:
    ids: dict[str, str] = {}
    for seed in range(6000):
        task = generate_task(seed, levels=[0], families=["arithmetic", "word"])
        ids[task.problem] = task.task_id
    turned = [
        (problem, f"What is {sum_[2]} + {sum_[1]}?")
        for problem in ids
        if (sum_ := re.fullmatch(r"What is (\d+) \+ (\d+)\?", problem)) and sum_[1] != sum_[2]
    ]
    pairs = [(one, two) for one, two in turned if two in ids]
    assert len(pairs) > 50
    assert all(ids[one] == ids[two] for one, two in pairs)
    stories: dict[tuple[object, ...], set[str]] = {}
    for problem, id in ids.items():
        if id.startswith("word"):
            stories.setdefault(("gives" in problem, *re.findall(r"\d+", problem)), set()).add(id)
    assert all(len(same) == 1 for same in stories.values())
    assert len(stories) < sum(id.startswith("word") for id in ids.values())


@pytest.mark.parametrize(("family", "level"), [("arithmetic", 2), ("fractions", 1)])
def test_a_sum_or_product_in_another_order_is_in_the_same_split(family: str, level: int) -> None:
    # Operands of + and * in one order, in the innermost brackets first.
    def in_order(problem: str) -> str:
        text = problem.removeprefix("What is ").rstrip("?")
        while found := re.search(r"\(([^()]*) ([-+*/]) ([^()]*)\)", text):
            text = text[: found.start()] + f"<{ordered(*found.groups())}>" + text[found.end() :]
        top = re.fullmatch(r"(<.*>|\S+) ([-+*/]) (<.*>|\S+)", text)
        assert top is not None
        return ordered(*top.groups())

    def ordered(one: str, sign: str, two: str) -> str:
        return sign.join(sorted((one, two)) if sign in "+*" else (one, two))

    train, heldout = (
        {
            in_order(generate_task(seed, split=split, levels=[level], families=[family]).problem)
            for seed in range(3000)
        }
        for split in ("train", "heldout")
    )
    assert len(heldout) > 500
    assert not train & heldout


def test_level_0_is_small_numbers_and_short_problems() -> None:
    for seed in range(400):
        task = generate_task(seed, levels=[0])
        assert task.values is not None
        assert len(task.problem) < 100
        assert all(abs(value) <= 200 for value in task.values)


def test_the_seed_decides_in_another_process_with_another_hash_seed() -> None:
    program = (
        "from agentenv_envs.math_reasoning.embedded import generate_task\n"
        "print([generate_task(seed, levels=(0, 1, 2, 3, 4)) for seed in range(20)])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert shown == repr([generate_task(seed, levels=(0, 1, 2, 3, 4)) for seed in range(20)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "split must be of train, heldout, got 'test'"),
        ({"levels": [5]}, "levels must be of 0, 1, 2, 3, 4, got 5"),
        ({"levels": []}, "levels must be a list of one or more of 0, 1, 2, 3, 4"),
        ({"levels": [True]}, "got True"),
        ({"levels": [2.0]}, "got 2.0"),
        ({"families": ["geometry"]}, "families must be of arithmetic, .*got 'geometry'"),
        ({"families": "linear"}, "families must be a list"),
    ],
)
def test_what_there_is_not_is_refused_by_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate_task(0, **arguments)  # type: ignore[arg-type]
