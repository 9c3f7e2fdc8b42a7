"""Who answers `ask[...]`: a script that tells a need when it is asked for, or a language model.

Invariants:
- A need is told only in answer to a question: all that the question names, or one for a question in general.
- The script's answers are a function of the wish and the questions so far.
- A model that does not answer is infrastructure: the episode is left out, and nobody's reward suffers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from agentenv.errors import InfrastructureError

from .phrases import phrases
from .records import Need, Task
from .search import tokens

__all__ = ["Chat", "LLMShopper", "ScriptedShopper", "Shopper"]

Chat = Callable[[Sequence[Mapping[str, str]]], str]
"""Messages with "role" and "content" -> the next message's content."""

_SAME_WORD: Final = {
    "color": "colour",
    "colors": "colour",
    "colours": "colour",
    "sizes": "size",
    "prices": "price",
}
_BUDGET: Final = {"budget", "price", "cost", "spend", "pay", "expensive", "money", "cheap"}
_BUDGET_ZH: Final = ("预算", "价格", "价位", "多少钱", "花多少", "贵")
_OPTIONS: Final = {"option", "options", "variant", "choice", "version", "choose"}
_OPTIONS_ZH: Final = ("规格", "选项", "款式", "型号")
_NOT_WANTED: Final = {"brand", "shop", "colour", "size", "material", "delivery", "maker"}
_NOT_WANTED_ZH: Final = ("品牌", "店铺", "颜色", "尺寸", "大小", "材质", "快递")
_OPEN: Final = {
    "what", "which", "any", "anything", "else", "more", "need", "needs", "want", "requirements", "preferences",
    "prefer", "features", "feature", "attributes", "details", "how", "should", "like", "tell", "important",
}  # fmt: skip
_OPEN_ZH: Final = (
    "什么",
    "哪",
    "还有",
    "要求",
    "需求",
    "特点",
    "功能",
    "偏好",
    "怎么",
    "吗",
    "呢",
    "介绍",
    "其他",
)


class Shopper(Protocol):
    """Answers questions about one wish."""

    def answer(self, question: str) -> str:
        """What the shopper says."""


class ScriptedShopper:
    """Tells needs when asked.

    Args:
        task: the wish.
        axes: names of options that the goods have; asked for one that is not in the wish, the shopper does not mind.
    """

    def __init__(self, task: Task, axes: Sequence[str] = ()) -> None:
        self._task = task
        self._say = phrases(task.language)
        self._axes = axes
        self._told: list[Need] = []
        self._budget_told = False
        self._order = [*task.attributes, *task.options]
        random.Random(f"shopper:{task.id}").shuffle(self._order)

    def answer(self, question: str) -> str:
        """The needs that the question names; or the budget; or, to a question in general, one that is untold."""
        words = {_SAME_WORD.get(word, word) for word in tokens(question)}
        text = question.casefold()
        named = [
            need for need in self._order if _names(need.axis, words, text) or _names(need.value, words, text)
        ]
        answers = [self._tell(need) for need in named]
        if words & _BUDGET or any(word in text for word in _BUDGET_ZH):
            answers.append(self._tell_budget())
        if answers:
            return " ".join(answers)
        if words & _OPTIONS or any(word in text for word in _OPTIONS_ZH):
            return self._next([need for need in self._order if need in self._task.options])
        known = words & _NOT_WANTED or any(word in text for word in _NOT_WANTED_ZH)
        if known or any(_names(axis, words, text) for axis in self._axes):
            return self._say.no_preference
        if words & _OPEN or any(word in text for word in _OPEN_ZH):
            return self._next(self._order)
        return self._say.unclear

    def _next(self, needs: Sequence[Need]) -> str:
        for need in needs:
            if need not in self._told:
                return self._tell(need)
        if needs is self._order and not self._budget_told:
            return self._tell_budget()
        return self._say.nothing_more

    def _tell(self, need: Need) -> str:
        self._told.append(need)
        if need in self._task.options:
            return self._say.option_answer(need)
        return self._say.attribute_answer(need)

    def _tell_budget(self) -> str:
        self._budget_told = True
        return self._say.budget_answer(self._task.price_cap)


class LLMShopper:
    """A language model plays the shopper.

    Args:
        task: the wish.
        chat: gives the model's next message.
    """

    def __init__(self, task: Task, chat: Chat) -> None:
        self._chat = chat
        needs = [
            *(
                f"- {need.axis + ': ' if need.axis else ''}{need.value}"
                for need in (*task.attributes, *task.options)
            ),
            f"- costs at most {task.price_cap:g}",
        ]
        language = "Chinese" if task.language == "zh" else "English"
        self._messages: list[Mapping[str, str]] = [
            {
                "role": "system",
                "content": "You are a customer; an assistant shops for you and asks you questions. Answer in one short "
                f"sentence of {language}. Say only what the question asks for, never the whole list. What is not in "
                "the list does not matter to you.\nYou want: "
                + "; ".join((" > ".join(task.category), task.request))
                + "\nYour needs:\n"
                + "\n".join(needs),
            }
        ]

    def answer(self, question: str) -> str:
        """What the model says.

        Raises:
            InfrastructureError: the model did not answer.
        """
        self._messages.append({"role": "user", "content": question})
        try:
            text = self._chat(tuple(self._messages))
        except InfrastructureError:
            raise
        except Exception as error:
            raise InfrastructureError(f"the shopper's model did not answer: {error!r}") from error
        if not isinstance(text, str) or not text.strip():
            raise InfrastructureError(f"the shopper's model answered {text!r}, not a text")
        text = " ".join(text.split())
        self._messages.append({"role": "assistant", "content": text})
        return text


def _names(name: str, words: set[str], text: str) -> bool:
    """Whether a question has all words of a name, or the name as it stands if it is not English."""
    if not name:
        return False
    if name.isascii():
        parts = set(tokens(name))
        return bool(parts) and parts <= words
    return name.casefold() in text
