"""Sentences of the synthetic shop, in English and Chinese: titles, wishes, personas, and a shopper's answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Protocol

from .records import Need

__all__ = ["Phrases", "phrases"]


class Phrases(Protocol):
    """What has to be said in each language."""

    def title(self, brand: str, good: str, attributes: Sequence[str], code: str) -> str:
        """Of a product."""

    def shop(self, brand: str) -> str:
        """Name of the shop that sells a brand."""

    def instruction(
        self, rng: random.Random, good: str, attributes: Sequence[Need], options: Sequence[Need], cap: float
    ) -> str:
        """The wish with all its needs."""

    def request(self, rng: random.Random, good: str) -> str:
        """The wish as it is first said."""

    def short_wish(self, request: str, options: Sequence[Need], cap: float) -> str:
        """The request with options and budget: what a persona leaves open are the attributes."""

    def persona(
        self, rng: random.Random, attributes: Sequence[Need], elsewhere: Sequence[tuple[str, str]]
    ) -> str:
        """Who wants it; the habits hold the attributes, among others that are beside the point."""

    def attribute_answer(self, need: Need) -> str:
        """A shopper tells an attribute."""

    def option_answer(self, need: Need) -> str:
        """A shopper tells an option."""

    def budget_answer(self, cap: float) -> str:
        """A shopper tells the budget."""

    nothing_more: str
    no_preference: str
    unclear: str


_NAMES: Final = ("Ilse", "Tomas", "Noor", "Bela", "Ravi", "Signe", "Yara", "Otto")
_JOBS: Final = ("nurse", "carpenter", "teacher", "bus driver", "botanist", "baker", "translator", "welder")
_NAMES_ZH: Final = ("小岩", "阿宁", "老周", "若溪", "大川", "念安", "文博", "晓棠")
_JOBS_ZH: Final = ("护士", "木匠", "老师", "司机", "花农", "面包师", "翻译", "焊工")


class _English:
    nothing_more = "Nothing more that I can think of."
    no_preference = "I don't mind about that."
    unclear = "What do you mean? Ask me about the goods, an option such as the colour, or my budget."

    def title(self, brand: str, good: str, attributes: Sequence[str], code: str) -> str:
        return f"{brand} {good} {code}, {', '.join(attributes)}"

    def shop(self, brand: str) -> str:
        return f"{brand} store"

    def instruction(
        self, rng: random.Random, good: str, attributes: Sequence[Need], options: Sequence[Need], cap: float
    ) -> str:
        wanted = ", ".join(need.value for need in attributes)
        chosen = ", ".join(f"{need.axis} {need.value}" for need in options)
        return rng.choice(
            (
                f"Find me a {good} that is {wanted}; {chosen}; at most {cap:g}.",
                f"I want to buy a {good}: {wanted}. Options: {chosen}. It may cost up to {cap:g}.",
                f"Please get a {good} for {cap:g} or less. It has to be {wanted}, with {chosen}.",
            )
        )

    def request(self, rng: random.Random, good: str) -> str:
        return rng.choice((f"I need a {good}.", f"I am looking for a {good}.", f"Can you find me a {good}?"))

    def short_wish(self, request: str, options: Sequence[Need], cap: float) -> str:
        chosen = ", ".join(f"{need.axis} {need.value}" for need in options)
        return f"{request} {chosen + '; at' if chosen else 'At'} most {cap:g}."

    def persona(
        self, rng: random.Random, attributes: Sequence[Need], elsewhere: Sequence[tuple[str, str]]
    ) -> str:
        habits = [f"{need.axis} always {need.value}" for need in attributes]
        habits += [f"for {place}: {value}" for place, value in elsewhere]
        rng.shuffle(habits)
        return (
            f"{rng.choice(_NAMES)}, {rng.randint(19, 78)}, {rng.choice(_JOBS)}. Habits: {'; '.join(habits)}."
        )

    def attribute_answer(self, need: Need) -> str:
        return f"It should be {need.value}."

    def option_answer(self, need: Need) -> str:
        return f"{need.axis}: {need.value}, please." if need.axis else f"{need.value}, please."

    def budget_answer(self, cap: float) -> str:
        return f"I can spend {cap:g} at most."


class _Chinese:
    nothing_more = "没有别的要求了。"
    no_preference = "这个我无所谓。"
    unclear = "没明白。可以问商品本身、颜色之类的规格，或者预算。"

    def title(self, brand: str, good: str, attributes: Sequence[str], code: str) -> str:
        return f"{brand}{good} {code} {' '.join(attributes)}"

    def shop(self, brand: str) -> str:
        return f"{brand}小店"

    def instruction(
        self, rng: random.Random, good: str, attributes: Sequence[Need], options: Sequence[Need], cap: float
    ) -> str:
        wanted = "、".join(need.value for need in attributes)
        chosen = "，".join(f"{need.axis}选{need.value}" for need in options)
        return rng.choice(
            (
                f"帮我找一款{good}，要{wanted}，{chosen}，价格不超过{cap:g}。",
                f"想买{good}：{wanted}。{chosen}，预算{cap:g}以内。",
                f"请在{cap:g}以内挑一个{good}，必须{wanted}，{chosen}。",
            )
        )

    def request(self, rng: random.Random, good: str) -> str:
        return rng.choice((f"想买{good}。", f"帮我找一款{good}。", f"我需要一个{good}。"))

    def short_wish(self, request: str, options: Sequence[Need], cap: float) -> str:
        chosen = "，".join(f"{need.axis}选{need.value}" for need in options)
        return f"{request}{chosen + '，' if chosen else ''}价格不超过{cap:g}。"

    def persona(
        self, rng: random.Random, attributes: Sequence[Need], elsewhere: Sequence[tuple[str, str]]
    ) -> str:
        habits = [f"{need.axis}只要{need.value}" for need in attributes]
        habits += [f"{place}偏好{value}" for place, value in elsewhere]
        rng.shuffle(habits)
        return f"{rng.choice(_NAMES_ZH)}，{rng.randint(19, 78)}岁，{rng.choice(_JOBS_ZH)}。习惯：{'；'.join(habits)}。"

    def attribute_answer(self, need: Need) -> str:
        return f"要{need.value}。"

    def option_answer(self, need: Need) -> str:
        return f"{need.axis}要{need.value}。"

    def budget_answer(self, cap: float) -> str:
        return f"最多花{cap:g}。"


_BY_LANGUAGE: Final[dict[str, Phrases]] = {"en": _English(), "zh": _Chinese()}


def phrases(language: str) -> Phrases:
    """Those of "en" or "zh"."""
    return _BY_LANGUAGE[language]
