"""The benchmark of the viewer at a small size: what it measures, what it writes, and when it fails."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from agentenv.testing.browser import missing_browser

pytest.importorskip("fastapi")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(missing_browser() != "", reason=missing_browser()),
]

FIGURES = {
    "serve": 0.5, "load": 0.5, "open": 1.0, "open_cpu": 0.9, "open_greatest": 1.1, "episode": 0.1,
    "episode_greatest": 0.2, "filter": 0.2, "tokens": 0.3, "index_us_per_episode": 20.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def viewer(load_program: Callable[[str], ModuleType]) -> ModuleType:
    return load_program("benchmarks/viewer.py")


def test_a_small_run_is_opened_and_the_file_holds_what_is_printed(
    viewer: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(viewer, "TRIED", 1)
    monkeypatch.setattr(viewer, "LONG_TOKENS", 300)
    file = tmp_path / "new" / "viewer.json"
    assert viewer.main(["--episodes", "40", "--repeats", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["assumed"]["episodes"] == 40
    assert 5_000 < written["assumed"]["bytes of an episode"] < 100_000
    assert written["figures"].keys() == FIGURES.keys()
    assert 0 < written["figures"]["serve"] < written["figures"]["open"]
    for bar in written["bars"]:
        assert bar["name"] in printed


def test_check_fails_exactly_where_a_bar_is_missed(
    viewer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--episodes", "2", "--check"]
    monkeypatch.setattr(viewer, "measure", lambda *_: FIGURES)
    assert viewer.main(arguments) == 0
    for name, slow in (
        ("open", 2.1),
        ("episode", 0.31),
        ("episode_greatest", 0.31),
        ("filter", 1.1),
        ("tokens", 1.1),
    ):
        monkeypatch.setattr(viewer, "measure", lambda *_, name=name, slow=slow: FIGURES | {name: slow})
        assert viewer.main(arguments) == 1, name
        assert viewer.main(arguments[:2]) == 0


def test_without_a_browser_it_says_so(
    viewer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert viewer.main(["--episodes", "2"]) == 2
    assert "no Chromium is installed" in capsys.readouterr().err


def test_a_picture_of_the_documentation_is_taken_of_a_run(
    viewer: ModuleType, load_program: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    from PIL import Image

    viewer.make_run(tmp_path / "run", 40).close()
    image = tmp_path / "new" / "viewer.png"
    arguments = ["viewer", str(tmp_path / "run"), "--image", str(image)]
    assert load_program("benchmarks/screenshots.py").main(arguments) == 0
    with Image.open(image) as picture:
        assert picture.size == (1240, 900)
        assert len(picture.convert("RGB").getcolors(256) or []) > 50
    assert image.stat().st_size < 200_000
