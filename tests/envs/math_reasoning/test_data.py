"""Rows of mathematics data sets: known forms are read, others are one clear error."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import MissingExtraError, UsageError
from agentenv_envs.math_reasoning import MathEnv
from agentenv_envs.math_reasoning.data import RefusedRow, load_tasks
from agentenv_envs.math_reasoning.source import DataSetTasks

DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line is of the form Answer: $Answer.\n\n"
    'What is 2 + 3?\n\nRemember to put your answer on its own line after "Answer:".'
)

# Invented content in the fields of the data sets' own rows.
ROWS: dict[str, dict[str, Any]] = {
    "DAPO-Math-17k": {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": DAPO_PROMPT}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "5", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    },
    "DAPO-Math-17k-Processed": {
        "prompt": "What is 2 + 3?",
        "solution": "5",
        "data_source": "math_dapo",
        "source_prompt": [{"role": "user", "content": DAPO_PROMPT}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "5", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    },
    "MATH-500": {
        "problem": "What is 2 + 3?",
        "solution": r"It is $\boxed{5}$.",
        "answer": "5",
        "subject": "Prealgebra",
        "level": 2,
        "unique_id": "test/prealgebra/1.json",
    },
    "MATH": {
        "problem": "What is 2 + 3?",
        "level": "Level 2",
        "type": "Prealgebra",
        "solution": r"It is not $\boxed{4}$, it is $\boxed{5}$.",
    },
    "AIME_2024": {"ID": "2024-I-1", "Problem": "What is 2 + 3?", "Solution": "Add.", "Answer": 5},
    "aime_2024": {"id": 60, "problem": "What is 2 + 3?", "solution": "Add.", "answer": "5", "url": "u", "year": "2024"},
    "AIME2025": {"question": "What is 2 + 3?", "answer": "5"},
    "gsm8k": {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    "DeepMath": {"question": "What is 2 + 3?", "final_answer": "5", "difficulty": 1.0, "topic": "Sums"},
    "one answer in a list": {"problem": "What is 2 + 3?", "answer": ["5"]},
    "a number": {"problem": "What is 2 + 3?", "answer": 5.0},
}  # fmt: skip


def write(path: Path, *rows: Any) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("name", ROWS)
def test_the_rows_of_each_data_set_are_read(tmp_path: Path, name: str, kind: str) -> None:
    (task,) = load_tasks(write(tmp_path / f"rows.{kind}", ROWS[name]))
    assert (task.problem, task.answer) == ("What is 2 + 3?", "5")
    assert task.values is None and task.program is None


def test_names_families_and_levels_are_the_data_sets_own_where_it_has_them(tmp_path: Path) -> None:
    read = {
        name: load_tasks(write(tmp_path / "rows.jsonl", row))[0]
        for name, row in ROWS.items()
        if name[0] != "o"
    }
    shown = {name: (task.task_id, task.family, task.level) for name, task in read.items()}
    assert shown["MATH-500"] == ("test/prealgebra/1.json", "Prealgebra", 2)
    assert shown["MATH"][1:] == ("Prealgebra", 2)
    assert shown["AIME_2024"] == ("2024-I-1", "rows", None)
    assert shown["aime_2024"] == ("rows-60", "rows", None)
    assert shown["DAPO-Math-17k"] == ("9a9b6eb4", "math_dapo", None)
    assert shown["AIME2025"][0].startswith("rows-")


def test_a_problem_that_is_there_already_is_left_out_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = ROWS["MATH-500"]
    path = write(
        tmp_path / "rows.jsonl", row, row, {**row, "answer": "6"}, {**row, "problem": "What is 1 + 3?"}
    )
    with caplog.at_level(logging.WARNING):
        tasks = load_tasks(path)
    assert [task.answer for task in tasks] == ["5", "5"]
    assert len({task.task_id for task in tasks}) == 2
    assert "2 rows repeat a problem and are left out, 1 of them with another answer" in caplog.text


def test_unknown_fields_are_one_error_with_file_line_fields_found_and_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS["MATH-500"], {"q": "What is 2 + 3?", "a": "5"})
    with pytest.raises(UsageError) as caught:
        load_tasks(path, refused=[])
    text = str(caught.value)
    assert text.startswith(
        f"{path}: line 2: has the fields a, q; needed are prompt and reward_model.ground_truth"
    )
    assert "problem and answer (MATH-500, AIME)" in text and "fields={'problem': ..., 'answer': ...}" in text
    assert "\n" not in text


def test_unknown_fields_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"q": "What is 2 + 3?", "label": {"a": "5"}, "n": "seven"})
    fields = {"problem": "q", "answer": "label.a", "id": "n"}
    (task,) = load_tasks(path, fields=fields)
    assert (task.problem, task.answer, task.task_id) == ("What is 2 + 3?", "5", "seven")
    with pytest.raises(UsageError, match=r"line 1: has the fields label, n, q; needed are q and answer"):
        load_tasks(path, fields={"problem": "q", "answer": "answer"})
    for bad in ({"problem": "q"}, {"question": "q", "answer": "a"}, {"problem": "q", "answer": 3}):
        with pytest.raises(UsageError, match="fields"):
            load_tasks(path, fields=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "answer"),
    [(1e-7, "0.0000001"), (0.1, "0.1"), (1e22, "1" + "0" * 22), (-0.0, "0"), (-2.5, "-2.5")],
)
def test_a_number_is_an_answer_in_digits_alone(tmp_path: Path, number: float, answer: str) -> None:
    (task,) = load_tasks(write(tmp_path / "rows.jsonl", {"problem": "p", "answer": number}))
    assert task.answer == answer


def test_names_and_families_can_be_written_as_utf_8(tmp_path: Path) -> None:
    row = {"problem": "p", "answer": "1", "id": "a\ud800", "subject": "b\udfff"}
    (task,) = load_tasks(write(tmp_path / "rows.jsonl", row))
    assert (task.task_id, task.family) == ("a?", "b?")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": None}, "field 'answer' must be a string or a number, got None"),
        ({"answer": ""}, "field 'answer' must not be empty"),
        ({"answer": True}, "field 'answer' must be a string or a number, got True"),
        ({"answer": float("nan")}, "field 'answer' must be a string or a number, got nan"),
        ({"answer": float("-inf")}, "field 'answer' must be a string or a number, got -inf"),
        ({"answer": ["1", "2"]}, r"field 'answer' must be a string or a number, got \['1', '2'\]"),
        ({"answer": "7" * 5000}, "at most 2000 characters, has 5000"),
        ({"answer": r"\boxed{7"}, r"must hold \\boxed\{ANSWER\}"),
        ({"problem": " "}, "field 'problem' must not be empty"),
        ({"problem": 7}, "field 'problem' must be a string"),
        ({"problem": [{"role": "system", "content": "x"}]}, "a conversation with a user's turn"),
    ],
)
def test_a_value_that_is_none_is_refused_with_its_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS["AIME2025"], {**ROWS["MATH-500"], **change})
    with pytest.raises(UsageError, match=f"line 2: .*{message}"):
        load_tasks(path)
    refused: list[RefusedRow] = []
    assert len(load_tasks(path, refused=refused)) == 1
    assert [row.row for row in refused] == ["line 2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"problem": "x", "answer": "1"}\n{"problem": ', "rows.jsonl: line 2: is not JSON"),
        ("rows.jsonl", "", "holds no rows"),
        ("rows.jsonl", "[1]", "line 1: must be an object with fields, got list"),
        ("rows.json", "{}", "must hold an array of rows"),
        ("rows.parquet", "PAR1", "can't be read as Parquet"),
        ("rows.csv", "a,b", "unknown kind of file '.csv'; allowed: .jsonl, .json, .parquet"),
    ],
)
def test_a_damaged_file_is_told_by_name_and_line(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises((UsageError, MissingExtraError), match=f"{message}|pyarrow"):
        load_tasks(path)
    with pytest.raises(UsageError, match="no such file"):
        load_tasks(tmp_path / "other.jsonl")


def test_a_hub_name_goes_to_datasets_with_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None = None, *, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return [ROWS["AIME2025"]]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config=None: ["test"])
    load_tasks("opencompass/AIME2025", config="AIME2025-I")
    load_tasks("HuggingFaceH4/MATH-500", "test")
    assert asked == [("opencompass/AIME2025", "AIME2025-I", "test"), ("HuggingFaceH4/MATH-500", None, "test")]


def numbered(path: Path, count: int) -> str:
    return str(write(path, *({"problem": f"What is {n} + 0?", "answer": n, "id": n} for n in range(count))))


def test_an_unknown_split_of_a_file_is_told_with_those_that_there_are(tmp_path: Path) -> None:
    rows = [{**ROWS["MATH-500"], "split": split} for split in ("train", "test")]
    path = write(tmp_path / "rows.jsonl", *rows)
    assert len(load_tasks(path, "test")) == 1
    with pytest.raises(UsageError, match=r"holds no rows of split 'dev'; there are: test, train"):
        load_tasks(path, "dev")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"fields": "problem"}, "fields is 'problem'"),
        ({"fields": {"problem": 1, "answer": "a"}}, "fields: 'problem': 1"),
        ({"heldout_share": "0.1"}, "heldout_share is '0.1'"),
        ({"heldout_share": True}, "heldout_share is True"),
    ],
)
def test_a_bad_argument_of_a_data_set_is_refused_by_name(
    tmp_path: Path, arguments: dict[str, Any], named: str
) -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(UsageError, match=named):
        MathEnv(dataset=numbered(tmp_path / "rows.jsonl", 3), **arguments)


def test_the_first_n_seeds_are_the_n_problems_each_once(tmp_path: Path) -> None:
    source = DataSetTasks(numbered(tmp_path / "rows.jsonl", 30))
    answers = [source.task(seed).answer for seed in range(60)]
    assert sorted(map(int, answers[:30])) == list(range(30))
    assert answers[:30] == answers[30:] != sorted(answers[:30], key=int)


def test_a_held_out_share_is_apart_from_the_rest_and_stays_when_rows_are_added(tmp_path: Path) -> None:
    def problems(count: int, split: str) -> set[str]:
        source = DataSetTasks(numbered(tmp_path / f"{count}.jsonl", count), split=split, heldout_share=0.2)
        return {task.problem for task in source.tasks}

    train, heldout = problems(300, "train"), problems(300, "heldout")
    assert not train & heldout and len(train | heldout) == 300
    assert 30 < len(heldout) < 90
    assert heldout <= problems(400, "heldout")


def test_a_held_out_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = numbered(tmp_path / "rows.jsonl", 3)
    with pytest.raises(UsageError, match=r"split is 'heldout'.*give heldout_share"):
        DataSetTasks(path, split="heldout")
    with pytest.raises(UsageError, match=r"split is 'test'; with heldout_share there are train and heldout"):
        DataSetTasks(path, split="test", heldout_share=0.1)
    with pytest.raises(UsageError, match=r"heldout_share is 1.5"):
        DataSetTasks(path, heldout_share=1.5)


def test_an_environment_plays_and_grades_a_data_set(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    row = {**ROWS["MATH-500"], "answer": r"\frac{\sqrt{2}}{2}"}
    env = MathEnv(dataset=str(write(tmp_path / "rows.jsonl", row)))
    observation, info = env.reset(seed=0)
    assert observation.endswith("Problem: What is 2 + 3?")
    assert info == {"task_id": "test/prealgebra/1.json", "family": "Prealgebra", "level": 2}
    assert env.step(r"\boxed{1/\sqrt{2}}")[1] == 1.0
    env.reset(seed=1)
    assert env.step(r"\boxed{\sqrt{2}}")[1] == 0.0


def test_without_the_verifier_a_data_set_is_refused_with_the_extras_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentenv_envs.math_reasoning import verifier

    monkeypatch.setattr(verifier.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"agentenv-rl\[math\]"):
        MathEnv(dataset=str(write(tmp_path / "rows.jsonl", ROWS["MATH-500"])))
    MathEnv()
