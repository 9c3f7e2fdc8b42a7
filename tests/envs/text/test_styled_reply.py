"""StyledReply-v0: quality, style, and their product."""

import itertools
from typing import Any

import pytest

from agentenv_envs.text import StyledReplyEnv
from agentenv_envs.text.styled_reply import STYLES, quality_of, style_of, styled_reward


def _reply(reply: str, wanted: str = "plain") -> tuple[float, dict[str, Any]]:
    """Of "Prices: grey 2, brown 5, green 1. How much is grey?"."""
    env = StyledReplyEnv(split="heldout", wanted=wanted)
    first, _ = env.reset(seed=0)
    assert first == "Prices: grey 2, brown 5, green 1. How much is grey?"
    _, reward, terminated, truncated, info = env.step(reply)
    assert terminated and not truncated
    return reward, info


def test_only_the_right_answer_in_the_wanted_style_is_rewarded() -> None:
    replies = {"plain": "grey 2", "polite": "grey 2, if you please", "loud": "grey 2!!!"}
    for said, wanted in itertools.product(STYLES, STYLES):
        reward, info = _reply(replies[said], wanted)
        assert reward == float(said == wanted)
        assert (info["quality"], info["style"], info["success"]) == (1, said, said == wanted)
        reward, info = _reply(replies[said].replace("2", "5"), wanted)
        assert reward == 0.0 and (info["quality"], info["style"]) == (0, said)


def test_a_judge_can_compute_the_reward_of_another_wish_from_info() -> None:
    for reply, wanted in itertools.product(("grey 2", "2!", "5", "thanks, 2", "please 2!"), STYLES):
        info = _reply(reply)[1]
        assert styled_reward(info["quality"], info["style"], wanted) == _reply(reply, wanted)[0]


def test_what_is_wanted_is_not_said() -> None:
    firsts = set()
    for wanted in STYLES:
        firsts.add(StyledReplyEnv(wanted=wanted).reset(seed=5)[0])
    assert len(firsts) == 1


@pytest.mark.parametrize(
    ("reply", "style"),
    [
        ("7", "plain"),
        ("", "plain"),
        ("It is 7.", "plain"),
        ("seven, I think", "plain"),
        ("displease 7", "plain"),  # a word, not a part of one
        ("7, please", "polite"),
        ("Thank you, 7", "polite"),
        ("Glad to help: 7", "polite"),
        ("7!", "loud"),
        ("IT IS 7", "loud"),
        ("I say 7", "plain"),  # one capital is no shouting
        ("7, PLEASE", "mixed"),
        ("thanks! 7", "mixed"),
    ],
)
def test_every_reply_has_one_style(reply: str, style: str) -> None:
    assert style_of(reply) == style
    assert sum(styled_reward(1, style_of(reply), wanted) for wanted in STYLES) == float(style != "mixed")


@pytest.mark.parametrize(
    ("reply", "quality"),
    [
        ("7", 1),
        ("It is 07.", 1),
        ("7, yes, 7", 1),
        ("7 or 8", 0),
        ("77", 0),
        ("7.5", 0),
        ("seven", 0),
        ("", 0),
    ],
)
def test_quality_is_naming_the_right_number_and_no_other(reply: str, quality: int) -> None:
    assert quality_of(reply, 7) == quality


def test_a_number_of_any_length_is_read() -> None:
    assert quality_of("1" * 10_000, 7) == 0


def test_metrics_count_each_style() -> None:
    metrics = _reply("grey 2!!!")[1]["metrics"]
    assert metrics == {
        "turns": 1,
        "malformed_actions": 0,
        "quality": 1,
        "style_plain": 0,
        "style_polite": 0,
        "style_loud": 1,
        "style_mixed": 0,
    }


def test_a_longer_list_has_as_many_prices_all_different() -> None:
    env = StyledReplyEnv(items=8)
    env.reset(seed=0)
    assert len({name for name, _ in env.task.prices}) == len({price for _, price in env.task.prices}) == 8
