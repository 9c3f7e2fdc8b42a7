"""Fixtures of ALFWorld's tests; those that need the engine skip where the extra is not installed."""

from pathlib import Path

import pytest


@pytest.fixture
def engine_installed() -> None:
    """Skip without the extra `alfworld`."""
    pytest.importorskip("textworld", reason="the extra alfworld is not installed", exc_type=ImportError)
    pytest.importorskip("alfworld", reason="the extra alfworld is not installed", exc_type=ImportError)


@pytest.fixture
def real_game(shared_data: Path) -> Path:
    """A game of the official data, in its layout."""
    files = sorted((shared_data / "alfworld_real").rglob("game.tw-pddl"))
    if not files:
        pytest.skip("no ../shared/data/alfworld_real beside the checkout")
    return files[0]
