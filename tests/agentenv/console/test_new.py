"""`agentenv new`: the package works as it is written, and nothing half-written or hidden comes of a mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv import cli


def _new(folder: Path, name: str = "street_walk") -> Path:
    assert cli.main(["new", name, "--dir", str(folder)]) == 0
    return folder


def test_the_package_passes_its_own_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _new(tmp_path / "walk")
    assert capsys.readouterr().out.startswith(
        f"{folder} has the environment StreetWalk-v0. Next:\n  cd {folder}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "24 passed" in done.stdout


def test_nothing_of_the_templates_names_is_left(tmp_path: Path) -> None:
    folder = _new(tmp_path / "walk", "StreetWalk")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    package = [f"street_walk/{name}" for name in ("__init__.py", "env.py", "policies.py")]
    assert files == ["README.md", "pyproject.toml", *package, "tests/test_env.py", "train.yaml"]
    for file in files:
        text = (folder / file).read_text()
        assert not {"my_game", "my-game", "MyGame"} & {
            word for word in ("my_game", "my-game", "MyGame") if word in text
        }
    assert '"StreetWalk-v0" = "street_walk:StreetWalkEnv"' in (folder / "pyproject.toml").read_text()


def test_once_installed_it_is_listed_and_played_by_its_id(tmp_path: Path) -> None:
    """Installed as pip does it in editable form: the folder on the path, beside the distribution's metadata."""
    folder = _new(tmp_path / "walk")
    metadata = tmp_path / "site" / "street_walk-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: street-walk\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[agentenv.envs]\nStreetWalk-v0 = street_walk:StreetWalkEnv\n")
    path = os.pathsep.join([str(folder), str(metadata.parent), *sys.path])
    program = (
        "from agentenv.cli import main\n"
        "assert main(['list']) == 0\n"
        "assert main(['play', 'StreetWalk-v0', '--seed', '7', '--policy', 'oracle']) == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "of street-walk 0.1.0" in next(
        line for line in done.stdout.splitlines() if "StreetWalk-v0" in line
    )
    assert "You have the key." in done.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-game", "must be a Python name"),
        ("2games", "must be a Python name"),
        ("_game", "must be a Python name"),
        ("spiël", "must be a Python name"),
        ("../game", "must be a Python name"),
        ("lambda", "is a word of Python"),
        ("json", "a module json is installed"),
        ("Agentenv", "a module agentenv is installed"),
        ("echo", "there is an environment Echo-v0"),
    ],
)
def test_a_name_that_cannot_be_is_refused(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", name]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full, file, link = tmp_path / "full", tmp_path / "file", tmp_path / "link"
    full.mkdir()
    (full / "notes").write_text("mine")
    file.write_text("mine")
    link.symlink_to(tmp_path / "elsewhere")
    for folder, said in (
        (full, "not empty"),
        (file, "no folder"),
        (link, "no folder"),
        (tmp_path / "absent" / "walk", "parent folder does not exist"),
    ):
        assert cli.main(["new", "street_walk", "--dir", str(folder)]) == 2
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link"]
    assert [path.read_text() for path in (full / "notes", file)] == ["mine", "mine"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    folder = tmp_path / "walk"
    folder.mkdir()
    assert (_new(folder) / "street_walk" / "env.py").is_file()


def test_a_disk_that_fills_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = Path.write_text

    def fill(path: Path, text: str, **options: object) -> int:
        if path.name == "env.py":
            raise OSError(28, "No space left on device")
        return written(path, text, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", fill)
    assert cli.main(["new", "street_walk", "--dir", str(tmp_path / "walk")]) == 2
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
