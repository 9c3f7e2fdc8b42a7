"""A tiny tested package: `shop.py` with its tests."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SHOP = '''\
"""A shop."""


def total(prices, discount=0):
    """What prices add up to."""
    result = sum(prices) - discount
    if result < 0:
        result = 0
    return result


def spin(number):
    """Turn so often."""
    turns = []
    for turn in range(number):
        turns.append(turn)
    return len(turns)


def unused(x):
    return x + 1
'''
TESTS = """\
import pathlib

import pytest

import shop


@pytest.mark.parametrize("prices, wanted", [([], 0), ([1, 2], 3)])
def test_total_of_prices(prices, wanted):
    assert shop.total(prices) == wanted


def test_a_discount_is_never_more_than_the_total():
    assert shop.total([2], 5) == 0


class TestSpin:
    def test_end(self):
        assert shop.spin(3) == 3


def test_nothing():
    pass


def test_that_passes_once():
    path = pathlib.Path("@MARK@")
    assert not path.exists()
    path.touch()


def test_that_always_fails():
    assert shop.total([1]) == 5
"""
BACKEND = """\
import os
import zipfile


def build_wheel(folder, settings=None, metadata=None):
    name = "shop-1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.write("shop.py")
        wheel.writestr("shop-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: shop\\nVersion: 1.0\\n")
        tags = "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr("shop-1.0.dist-info/WHEEL", tags)
        wheel.writestr("shop-1.0.dist-info/RECORD", "shop-1.0.dist-info/RECORD,,\\n")
    return name
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """The package's folder; pip can build it without a network."""
    folder = tmp_path / "shop"
    (folder / "tests").mkdir(parents=True)
    (folder / "shop.py").write_text(SHOP)
    (folder / "tests" / "test_shop.py").write_text(TESTS.replace("@MARK@", str(tmp_path / "mark")))
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "backend.py").write_text(BACKEND)
    return folder


@pytest.fixture
def installed_shop(shop: Path) -> Path:
    """A folder as `ensure_package_folder` makes it: `repository` with one commit, and `environment`."""
    folder = shop.parent / "installed"
    (folder / "environment" / "bin").mkdir(parents=True)
    python = folder / "environment" / "bin" / "python"
    # The host's pytest may have plug-ins that take longer to load than these tests to run. The runners name
    # an option of xdist's where it is installed.
    quick = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 " if importlib.util.find_spec("xdist") is None else ""
    python.write_text(f'#!/bin/sh\n{quick}exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    shop.rename(folder / "repository")
    git = ["git", "-C", str(folder / "repository"), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "Import"]):
        subprocess.run([*git, *command], check=True)
    return folder
