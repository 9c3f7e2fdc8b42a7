"""The three rewards, by numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentenv_envs.shop.records import Need, Option, Product, Task, price_of
from agentenv_envs.shop.reward import REWARDS, attribute_hit, matches, score

MUG = Product(
    id="M1",
    title="Stone mug, matte glaze",
    shop="",
    category=("home", "mug"),
    attributes=("hand thrown", "oven safe", "matte glaze"),
    price=12.0,
    price_high=20.0,
    options=(
        Option("colour", ("sand", "slate"), (None, None)),
        Option("size", ("small", "tall"), (12.0, 20.0)),
    ),
)
WISH = Task(
    id="t",
    product_id="M1",
    category=("home", "mug"),
    instruction="",
    request="",
    attributes=(Need("", "hand thrown"), Need("", "matte glaze")),
    options=(Need("colour", "slate"), Need("size", "tall")),
    price_cap=20.0,
    persona="",
    language="en",
)


@pytest.mark.parametrize(
    ("chosen", "price", "category", "attributes", "strict", "loose", "success"),
    [
        # 2 of 2 attributes, 2 of 2 options, price kept.
        (["slate", "tall"], 20.0, ("home", "mug"), MUG.attributes, 1.0, 1.0, 1.0),
        # 1 of 2 options: 1 * 1/2; (2 + 1 + 1) / 5.
        (["sand", "tall"], 20.0, ("home", "mug"), MUG.attributes, 0.5, 0.8, 0.0),
        # One cent too much: strict is gone, loose loses one fifth.
        (["slate", "tall"], 20.01, ("home", "mug"), MUG.attributes, 0.0, 0.8, 0.0),
        # Another kind of goods: everything by half.
        (["slate", "tall"], 20.0, ("home", "cup"), MUG.attributes, 0.5, 0.5, 0.0),
        # 1 of 2 attributes (the other one is in the title) and 1 of 2 options: 1 * 1/2; (2 + 1 + 1) / 5.
        (["slate"], 12.0, ("home", "mug"), ("hand thrown",), 0.5, 0.8, 0.0),
        # Nothing chosen: no strict reward at all; (2 + 0 + 1) / 5.
        ([], 12.0, ("home", "mug"), MUG.attributes, 0.0, 0.6, 0.0),
    ],
)
def test_rewards_are_those_of_the_formulas(
    chosen: list[str],
    price: float,
    category: tuple[str, ...],
    attributes: tuple[str, ...],
    strict: float,
    loose: float,
    success: float,
) -> None:
    marks = score(WISH, replace(MUG, category=category, attributes=attributes), chosen, price)
    assert [marks.reward(kind) for kind in ("strict", "loose", "success")] == pytest.approx(
        [strict, loose, success]
    )


def test_a_share_of_no_needs_is_one() -> None:
    bare = replace(WISH, attributes=(), options=())
    assert score(bare, MUG, [], 12.0).strict == 1.0
    assert score(bare, MUG, [], 21.0).loose == 0.0


def test_every_reward_is_between_0_and_1_and_success_is_strict_at_1() -> None:
    for chosen in ([], ["sand"], ["slate"], ["slate", "tall"]):
        for cap in (1.0, 12.0, 20.0):
            for category in (("home", "mug"), ("home", "cup")):
                marks = score(replace(WISH, price_cap=cap), replace(MUG, category=category), chosen, 12.0)
                assert all(0.0 <= marks.reward(kind) <= 1.0 for kind in REWARDS)
                assert (marks.strict == 1.0) == (marks.success == 1.0)


@pytest.mark.parametrize(
    ("wanted", "offered", "match"),
    [
        ("Matte-Glaze!", "matte glaze", True),  # case and punctuation do not count
        ("glaze matte", "matte glaze", True),  # nor does the order
        ("steel", "brushed steel", True),  # all words are there: a ratio of 100
        ("brushed steel", "brushed brass", False),
        ("雾面釉", "雾面釉", True),
        ("雾面釉", "亮面釉", False),  # two of three: 67
    ],
)
def test_a_hit_is_a_token_set_ratio_above_85(wanted: str, offered: str, match: bool) -> None:
    assert matches(wanted, offered) is match


def test_an_attribute_also_counts_where_title_or_attributes_hold_it_as_it_stands() -> None:
    assert attribute_hit("Matte Gl", MUG)
    assert attribute_hit("and thr", MUG)
    assert not attribute_hit("glossy", MUG)


def test_the_price_is_the_highest_of_the_chosen_values_in_any_order() -> None:
    assert price_of(MUG, {}) == 12.0
    assert price_of(MUG, {"colour": "sand"}) == 12.0
    assert (
        price_of(MUG, {"size": "tall", "colour": "sand"})
        == 20.0
        == price_of(MUG, {"colour": "sand", "size": "tall"})
    )
