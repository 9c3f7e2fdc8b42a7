"""The policies that recipes start from: what they are taught, what ships, and a run of the script at a tiny size."""

from __future__ import annotations

import importlib
import json
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentenv.evaluation import wilson_interval

FOLDERS = {"math": "math_reasoning", "alfworld": "alfworld", "shop": "shop"}
"""Environments whose policies ship, but for those that are tested with them."""


@pytest.fixture(autouse=True)
def benchmarks(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))


def without_docker(lessons: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run as well, sooner, and where there is no engine."""
    if lessons.__name__ == "embedded_math":
        options = {**lessons.OPTIONS["MathPython-v0"], "sandbox": "local-unisolated"}
        monkeypatch.setitem(lessons.OPTIONS, "MathPython-v0", options)


@pytest.fixture(params=FOLDERS)
def env(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lessons(env: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if env == "alfworld":
        pytest.importorskip("textworld", reason="the extra alfworld is not installed", exc_type=ImportError)
        pytest.importorskip("alfworld", reason="the extra alfworld is not installed", exc_type=ImportError)
    if env == "shop":
        pytest.importorskip("bm25s", reason="the extra shop is not installed")
        pytest.importorskip("rapidfuzz", reason="the extra shop is not installed")
    module = importlib.import_module(f"embedded_{env}")
    if env == "alfworld":
        monkeypatch.setattr(module, "NUM_GAMES", 8)  # each takes the engine a tenth of a second
    return module


@pytest.fixture
def folder(repository: Path, env: str) -> Path:
    return repository / "envs" / "agentenv_envs" / FOLDERS[env] / "policy"


def test_the_tokenizer_that_ships_is_the_one_that_the_script_makes(lessons: ModuleType, folder: Path) -> None:
    made = json.loads((folder / "made.json").read_text())["arguments"]
    tokenizer = lessons.build_tokenizer(made["seed"], made["vocab_size"])
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()


def test_texts_come_back_from_their_tokens(lessons: ModuleType, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in (
        "Straße: 1743!\n",
        "click[buy now] ",
        r"\boxed{12, 7}",
        "```python\nprint((3 + 140) // 2)\n```",
    ):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_while_it_learns_to_read_mistakes_are_shown_but_not_imitated(
    lessons: ModuleType, folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shares = {}
    for phase in ("reading", "mediocre"):
        rows = lessons.COURSE.lessons(tokenizer, phase, seed=0)
        said = [weight for _ in range(100) for weight in rows.one()[1] if weight not in (0.05,)]
        shares[phase] = sum(said) / len(said)
    assert shares["mediocre"] == 1.0
    assert 0.6 < shares["reading"] < 0.99


def test_a_policy_has_the_success_that_its_folder_says(
    lessons: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num = 64 if lessons.__name__ == "embedded_math" else 24
    made = json.loads((folder / "made.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == made["parameters"] < 600_000
    without_docker(lessons, monkeypatch)
    played = lessons.evaluate(model, AutoTokenizer.from_pretrained(folder), Namespace(evaluation_tasks=num))
    assert played.keys() == made["heldout"]["mediocre"].keys()
    for name, said in made["heldout"]["mediocre"].items():
        assert said["failed"] == 0 and played[name]["failed"] == 0
        assert 0.1 < said["success"] < 0.6
        low, high = wilson_interval(round(num * played[name]["success"]), num, confidence=0.999)
        assert low <= said["success"] <= high


def test_the_readme_gives_the_success_that_was_measured(folder: Path) -> None:
    made = json.loads((folder / "made.json").read_text())
    readme = (folder.parent / "README.md").read_text(encoding="utf-8")
    assert f"{made['parameters']:,} parameters" in readme
    for name, result in made["heldout"]["mediocre"].items():
        low, high = result["interval"]
        cell = f"{result['success']:.2f} [{low:.2f}, {high:.2f}]"
        assert f"| `{name}` | {cell} | {result['greedy']:.2f} |" in readme


def test_all_policies_together_stay_below_12_megabytes(repository: Path) -> None:
    files = (repository / "envs" / "agentenv_envs").glob("*/policy*/*")
    assert 1e6 < sum(file.stat().st_size for file in files) < 12e6


def test_a_tiny_run_writes_a_policy_and_how_it_was_made(
    lessons: ModuleType,
    env: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = importlib.import_module("make_embedded_policy")
    without_docker(lessons, monkeypatch)
    sizes = {
        "reading_steps": 2,
        "mediocre_steps": 1,
        "batch_size": 2,
        "hidden_size": 16,
        "evaluation_tasks": 2,
    }
    options = [str(part) for name, value in sizes.items() for part in (f"--{name}", value)]
    with torch.random.fork_rng():
        script.main([env, "--output_dir", str(tmp_path), *options])
    assert "held-out tasks after mediocre" in capsys.readouterr().out
    made = json.loads((tmp_path / "made.json").read_text())
    assert made["arguments"] == {**lessons.COURSE.defaults, **sizes, "seed": 0, "env": env}
    assert made["heldout"].keys() == {"reading", "mediocre"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == made["parameters"]


def test_shown_programs_print_the_answer_where_they_are_right_and_run_where_they_are_not() -> None:
    math = importlib.import_module("embedded_math")
    rows = math.Lessons(None, "mediocre", seed=0)
    for seed in range(200):
        task = math.generate_task(seed, levels=math.LEVELS)
        assert math._printed(task.program) == task.answer
        assert math._printed(rows._changed_program(task.program))


def test_demonstrations_are_of_training_tasks() -> None:
    math = importlib.import_module("embedded_math")
    assert {math.generate_task(seed, levels=math.LEVELS).task_id for seed in range(50)}.isdisjoint(
        math.generate_task(seed, levels=math.LEVELS, split="heldout").task_id for seed in range(50)
    )


def test_the_shops_demonstrator_does_what_pages_offer_and_buys_the_wish_where_it_makes_no_mistakes() -> None:
    pytest.importorskip("bm25s", reason="the extra shop is not installed")
    shop = importlib.import_module("embedded_shop")
    rng, bought = random.Random(0), {}
    for skill in (
        shop.MEDIOCRE,
        shop.Skill(search=1.0, open=1.0, check=1.0, reject=1.0, option=1.0, slip=0.0),
    ):
        ends = []
        for seed in range(60):
            env = shop.open_shop()
            env.reset(seed=seed)
            demonstrator, ended = shop.Demonstrator(env, skill, rng), False
            while not ended:
                _, _, terminated, truncated, info = env.step(demonstrator.act()[0])
                assert info["action_valid"] or skill == shop.MEDIOCRE
                ended = terminated or truncated
            ends.append(info["success"])
        bought[skill] = sum(ends)
    mediocre, perfect = bought.values()
    assert mediocre < 30 and perfect > 40


def test_the_shop_that_was_demonstrated_is_the_one_that_the_recipe_trains_in(
    load_program: Callable[[str], ModuleType],
) -> None:
    pytest.importorskip("bm25s", reason="the extra shop is not installed")
    recipe, shop = load_program("recipes/shop_sao.py"), importlib.import_module("embedded_shop")
    assert {**recipe.EMBEDDED_SHOP, "max_turns": recipe.EMBEDDED["max_turns"]} == shop.OPTIONS
