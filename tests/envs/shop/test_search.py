"""Search: tokens, order, and saved indexes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agentenv_envs.shop.search import SearchIndex, tokens

TEXTS = [f"{colour} {good}" for good in ("kettle", "mug", "砧板") for colour in ("red", "blue", "红色")]


def test_tokens_are_words_and_pairs_of_han_characters() -> None:
    assert tokens("Red Kettle-2L, 珐琅烧水壶 大 ＡＢ１") == [
        "red", "kettle", "2l", "珐琅", "琅烧", "烧水", "水壶", "大", "ab1",
    ]  # fmt: skip
    assert tokens("usb充电") == ["usb", "充电"]
    assert tokens(" ?!…") == []


def test_ties_are_in_the_order_of_the_catalogue_also_at_the_cut() -> None:
    index = SearchIndex.build(["same text"] * 500 + ["other thing", "same same"])
    everything = index.top("same", 1000)
    assert everything[1:] == list(range(500)) and everything[0] == 501
    for limit in (1, 2, 150, 500):
        assert index.top("same", limit) == everything[:limit]


def test_the_best_text_is_first_and_only_texts_with_a_word_of_the_query_come() -> None:
    index = SearchIndex.build(TEXTS)
    assert index.top("blue mug", 9) == [4, 3, 5, 1, 7] or index.top("blue mug", 9)[0] == 4
    assert set(index.top("blue mug", 9)) == {1, 3, 4, 5, 7}
    assert index.top("红色砧板", 9)[0] == 8


@pytest.mark.parametrize("query", ["", "   ", "unknown", "!!!", "\x00"])
def test_a_query_without_known_words_finds_nothing(query: str) -> None:
    assert SearchIndex.build(TEXTS).top(query, 10) == []


def test_order_and_repetition_of_words_change_nothing() -> None:
    index = SearchIndex.build(TEXTS)
    assert index.top("blue red mug", 9) == index.top("mug red blue red red", 9)


def test_a_query_of_a_megabyte_is_answered() -> None:
    index = SearchIndex.build(TEXTS)
    assert 3 in index.top("mug " * 250_000, 9)


def test_texts_without_any_word_can_be_indexed() -> None:
    assert SearchIndex.build(["!!!", "…"]).top("mug", 5) == []


def test_a_saved_index_is_read_by_mmap_and_gives_the_same_lists(tmp_path: Path) -> None:
    built = SearchIndex.build(TEXTS)
    built.save(tmp_path / "index", "key")
    loaded = SearchIndex.load(tmp_path / "index", "key")
    assert loaded is not None
    assert isinstance(loaded._retriever.scores["data"], np.memmap)
    for query in ("mug", "blue kettle", "红色", "red 砧板"):
        assert loaded.top(query, 5) == built.top(query, 5)
    built.save(tmp_path / "index", "key")  # it is there already: it stays
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_an_index_that_is_absent_damaged_or_of_another_catalogue_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    assert SearchIndex.load(folder, "key") is None
    SearchIndex.build(TEXTS).save(folder, "key")
    assert SearchIndex.load(folder, "other") is None
    data = folder / "data.csc.index.npy"
    whole = data.read_bytes()
    data.write_bytes(whole[:-4])
    assert SearchIndex.load(folder, "key") is None
    data.write_bytes(whole)
    (folder / "vocab.index.json").write_text("x" * (folder / "vocab.index.json").stat().st_size)
    assert SearchIndex.load(folder, "key") is None
    stamp = json.loads((folder / "agentenv.json").read_text())
    (folder / "agentenv.json").write_text(json.dumps({**stamp, "bytes": None}))
    assert SearchIndex.load(folder, "key") is None
