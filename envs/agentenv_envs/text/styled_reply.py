"""StyledReply-v0: a question with one right answer, and a style that is wanted but never said.

The reward is quality times style: 1 where the answer is right and the reply has the wanted style, else 0. `info` names
both, so that a judge can compute the reward anew when another style is wanted, as in the online learning experiment of
SAO (arXiv 2607.07508, section 4.5).

Invariants:
- one action ends the episode, whatever it is;
- quality (0 or 1) depends on the answer alone, style on the wording alone, and a reply has exactly one style;
- what is wanted changes neither the task nor the observation.
"""

import random
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from agentenv.errors import UsageError

from .task_env import Answer, TextTaskEnv, text_policies, whole_number

__all__ = ["STYLES", "Question", "StyledReplyEnv", "quality_of", "style_of", "styled_reward"]

STYLES: Final = ("plain", "polite", "loud")
"""What may be wanted."""
MIXED: Final = "mixed"
"""Polite and loud at once: nobody wants it."""

COLOURS: Final = ("red", "blue", "green", "black", "white", "brown", "pink", "grey")
_POLITE: Final = re.compile(
    r"\b(please|thanks?|thank you|kindly|glad|gladly|pleasure|sir|madam)\b", re.IGNORECASE
)
_LOUD: Final = re.compile(r"!|\b[A-Z]{2,}\b")
_NUMBER: Final = re.compile(r"[0-9]+")
FORMS: Final = {"plain": "{}", "polite": "{}, if you please", "loud": "{}!!!"}
"""How the demonstrator says it."""


class Question(NamedTuple):
    """A task: a price list and the item that is asked for."""

    prices: tuple[tuple[str, int], ...]
    asked: int

    @property
    def answer(self) -> int:
        """The right one."""
        return self.prices[self.asked][1]


class StyledReplyEnv(TextTaskEnv[Question]):
    """A look-up in a short price list; see the module for the reward.

    Args:
        split: "train" or "heldout".
        wanted: the style that is rewarded: "plain", "polite" or "loud".
        items: length of the list, 2 to 8.

    Raises:
        UsageError: an argument is out of its range.
    """

    family = "styled-reply"
    policies = text_policies("RandomReplies", oracle="StyledOracle")

    def __init__(self, *, split: str = "train", wanted: str = "plain", items: int = 3) -> None:
        super().__init__(split=split, max_turns=1)
        if wanted not in STYLES:
            raise UsageError(f"wanted must be one of {', '.join(STYLES)}, got {wanted!r}")
        self.wanted = wanted
        self.items = whole_number("items", items, 2, len(COLOURS))

    def solutions(self) -> Sequence[str]:
        """The right answer in each style: the demonstrator does not know what is wanted."""
        return _replies(self.task, [self.task.answer])

    def mistakes(self) -> Sequence[str]:
        return _replies(self.task, [price for _, price in self.task.prices if price != self.task.answer])

    def _draw(self, rng: random.Random) -> Question:
        names = rng.sample(COLOURS, self.items)
        prices = rng.sample(range(1, 10), self.items)
        return Question(tuple(zip(names, prices, strict=True)), rng.randrange(self.items))

    def _open(self, task: Question) -> str:
        prices = ", ".join(f"{name} {price}" for name, price in task.prices)
        return f"Prices: {prices}. How much is {task.prices[task.asked][0]}?"

    def _answer(self, task: Question, action: str) -> Answer:
        quality, style = quality_of(action, task.answer), style_of(action)
        info: dict[str, Any] = {"quality": quality, "style": style, "wanted": self.wanted}
        info["metrics"] = {"quality": quality} | {
            f"style_{name}": int(style == name) for name in (*STYLES, MIXED)
        }
        reward = styled_reward(quality, style, self.wanted)
        return Answer("", reward=reward, malformed=not _NUMBER.search(action), info=info)


def _replies(task: Question, prices: Sequence[int]) -> list[str]:
    name = task.prices[task.asked][0]
    return [form.format(f"{name} {price}") for price in prices for form in FORMS.values()]


def quality_of(reply: str, answer: int) -> int:
    """1 where the reply names the right number and no other, else 0."""
    return int({digits.lstrip("0") or "0" for digits in _NUMBER.findall(reply)} == {str(answer)})


def style_of(reply: str) -> str:
    """One of `STYLES`, or "mixed".

    Polite is a reply with a word such as please, thanks or glad; loud one with an exclamation mark or a word of two
    or more capitals. Both at once is mixed, neither is plain.
    """
    polite, loud = _POLITE.search(reply) is not None, _LOUD.search(reply) is not None
    if polite and loud:
        return MIXED
    return "polite" if polite else "loud" if loud else "plain"


def styled_reward(quality: int, style: str, wanted: str) -> float:
    """1.0 where the answer is right and its style the wanted one, else 0.0."""
    return float(quality == 1 and style == wanted)
