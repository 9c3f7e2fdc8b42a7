"""The shop's benchmark at a small size: what it compares, what it writes, and when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("bm25s")
pytest.importorskip("rapidfuzz")

from agentenv_envs.shop.catalogue import CatalogueSpec, load_catalogue


@pytest.fixture(scope="module")
def shop(load_program: Callable[[str], ModuleType]) -> ModuleType:
    return load_program("benchmarks/environments_shop.py")


def test_the_usual_build_finds_what_ours_finds_and_holds_its_own_goods(shop: ModuleType) -> None:
    ours = load_catalogue(CatalogueSpec(products=360))
    one, other = shop.UsualShop(360), shop.UsualShop(360)
    assert one.catalogue.products == other.catalogue.products == ours.products
    assert one.catalogue.products[0] is not other.catalogue.products[0]
    for product in ours.products[::30]:
        assert one.catalogue.index.top(product.title, 20) == ours.index.top(product.title, 20)


def test_figures_and_bars_are_written_and_a_missed_bar_fails(
    shop: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shop, "EPISODES_PER_S", 1.0)
    file = tmp_path / "out" / "shop.json"
    assert shop.main(["--smoke", "--check", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert results["figures"]["oracle"]["success"] == 1.0
    assert results["figures"]["memory"]["envs"] == 20
    assert len(results["bars"]) == 5 and len(shop.shop_bars(results["figures"])) == 7
    assert all(bar["holds"] for bar in results["bars"]) and "MISSED" not in capsys.readouterr().out
    monkeypatch.setattr(shop, "shop_figures", lambda **_: results["figures"])
    monkeypatch.setattr(shop, "MEMORY_MB", 1.0)
    assert shop.main(["--smoke", "--check"]) == 1
    assert shop.main(["--smoke"]) == 0


def test_sizes_out_of_range_are_refused(shop: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--envs", "0"], ["--products", "5"], ["--products", "20161"]):
        with pytest.raises(SystemExit) as caught:
            shop.main(argv)
        assert caught.value.code == 2
    assert "must be from 120 to 20160" in capsys.readouterr().err
