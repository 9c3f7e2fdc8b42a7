"""Reading the action out of what a policy wrote."""

from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv_envs.shop.actions import Action, fold, parse_action

MARKS = set("[]【】\"'`“”‘’")
WORDS = st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=40).filter(
    lambda text: not MARKS & set(unicodedata.normalize("NFKC", text))
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("click[size [M]]", "size [M]"),
        ("I see [three] kettles. click[a]", "a"),
        ("click[a] because [b] is dear", "a"),
        ("【】 click【珐琅】", "珐琅"),
        ('Action: CLICK [ "a  b" ]', "a b"),
        ("click[“湖蓝”]", "湖蓝"),
        ("click[it's]", "it's"),
        ("动作click[a]", "a"),
        ("ｃｌｉｃｋ［ａ］", "a"),
        ("clic\u212a[ﬁne]", "fine"),
        ("<think>which one?</think>\nclick\n[\na\n]", "a"),
    ],
)
def test_the_value_is_what_the_matching_brackets_hold(text: str, value: str) -> None:
    assert parse_action(text) == Action("click", value)


@pytest.mark.parametrize(
    "text", ["click", "click]", "click[", "click[[a]", "double_click[a]", "click[a]search[b]", "点击[a]"]
)
def test_none_or_several_or_unclosed_is_no_action(text: str) -> None:
    assert parse_action(text) is None


@given(st.text(max_size=300))
def test_no_text_breaks_the_reader(text: str) -> None:
    action = parse_action(text)
    assert action is None or action.verb in ("search", "click", "ask")


@given(st.sampled_from(["search", "Click", "ASK"]), WORDS, WORDS)
def test_an_action_is_found_whatever_stands_around_it(verb: str, value: str, around: str) -> None:
    action = parse_action(f"{around} {verb} [ {value} ] {around}")
    assert action is not None and action.verb == verb.lower()
    assert fold(action.value) == fold(value)


@pytest.mark.parametrize(
    "text",
    [
        "search[" * 300_000,
        "[" * 2_000_000,
        "x" * 2_000_000 + "click[a]",
        "】" * 1_000_000,
        "\u0301\u0323" * 250_000 + "click[a]",  # marks that the normal form sorts, one by one
        "click[" + "\u0301\u0323" * 250_000 + "]",
    ],
    ids=["actions", "brackets", "letters", "wide", "marks", "marks inside"],
)
def test_a_text_of_megabytes_is_read_in_a_moment(text: str) -> None:
    began = time.process_time()
    parse_action(text)
    assert time.process_time() - began < 2.0
