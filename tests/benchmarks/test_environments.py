"""The benchmark of all environments: its parts, what it writes, and when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def environments(load_program: Callable[[str], ModuleType]) -> ModuleType:
    return load_program("benchmarks/environments.py")


@pytest.fixture
def few(environments: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        environments,
        "PLAYED",
        (environments.Played("KeyDoor-v0", 20, 1.0, 0.1), environments.Played("Absent-v0", 20, 1.0, 0.1)),
    )


def test_every_part_is_found_and_baselines_come_last(environments: ModuleType, repository: Path) -> None:
    files = {path.stem for path in (repository / "benchmarks").glob("environments_*.py")}
    assert [f"environments_{name}" for name in environments.parts()[:-1]] == sorted(files)
    assert environments.parts()[-1] == "baselines"


def test_figures_and_bars_of_baselines_are_written(
    environments: ModuleType, few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / "environments.json"
    assert environments.main(["--only", "baselines", "--check", "--json", str(file)]) == 0
    results = json.loads(file.read_text())["baselines"]
    assert results["figures"]["KeyDoor-v0"]["oracle"]["success"] == 1.0
    assert results["figures"]["KeyDoor-v0"]["random"]["success"] < 0.1
    assert [bar["holds"] for bar in results["bars"]] == [True, True]
    said = capsys.readouterr().out
    assert "Absent-v0" in said and "is not part of this version" in said


def test_a_missed_bar_fails_only_where_that_was_asked_for(
    environments: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "PLAYED", (environments.Played("KeyDoor-v0", 20, 1.0, -1.0),))
    assert environments.main(["--only", "baselines", "--check"]) == 1
    assert environments.main(["--only", "baselines"]) == 0


def test_an_environment_that_lacks_something_misses_its_bars_and_says_what(
    environments: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # An option that it does not take stands for what is not installed: both are one line of the command.
    odd = environments.Played("KeyDoor-v0", 20, 1.0, 0.1, ("sise=5",))
    monkeypatch.setattr(environments, "PLAYED", (odd,))
    assert environments.main(["--only", "baselines", "--check"]) == 1
    assert "takes no argument 'sise'" in capsys.readouterr().out


def test_a_part_that_fails_is_said_and_misses_a_bar(
    environments: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "environments_good.py").write_text(
        "import json, sys\n"
        "bar = {'name': 'speed', 'value': 2.0, 'relation': '>=', 'limit': 1.0, 'unit': 'x'}\n"
        "json.dump({'bars': [bar], 'smoke': '--smoke' in sys.argv}, open(sys.argv[2], 'w'))\n"
    )
    (tmp_path / "environments_bad.py").write_text("raise SystemExit(3)\n")
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    file = tmp_path / "out.json"
    assert environments.main(["--only", "good", "--check", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["good"]["smoke"] is False
    assert environments.main(["--only", "good", "bad", "--smoke", "--check", "--json", str(file)]) == 1
    assert json.loads(file.read_text())["bad"]["error"] == "environments_bad.py ended with exit code 3"
    assert json.loads(file.read_text())["good"]["smoke"] is True


def test_a_part_that_is_not_there_is_refused(environments: ModuleType) -> None:
    with pytest.raises(SystemExit) as ended:
        environments.main(["--only", "chess"])
    assert ended.value.code == 2
