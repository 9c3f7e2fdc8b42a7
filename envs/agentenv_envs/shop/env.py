"""ShopSimulator's environments: find in a shop of near-identical goods what somebody wants, and buy it.

Source: ShopSimulator, arXiv 2601.18225; engine, texts and synthetic data are our own.

Invariants:
- The seed of `reset` chooses the wish, in every process (`compat="fixed"`).
- `click[buy now]` on a product's page terminates; nothing else does, and only it is rewarded.
- An environment holds no catalogue of its own: all of a process share one. What is pickled is the spec.
- An action that is none, or a button that the page does not have, is answered by a line, costs a turn and is counted.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from agentenv.env import BaseEnv
from agentenv.errors import UsageError

from . import upstream
from .actions import Action, fold, parse_action
from .catalogue import Catalogue, CatalogueSpec, load_catalogue
from .chat import OpenAIChat
from .phrases import phrases
from .records import Product, Task
from .reward import REWARDS, Score, score
from .session import BUY, Session, money
from .shopper import Chat, LLMShopper, ScriptedShopper, Shopper

__all__ = ["COMPATS", "ShopEnv", "ShopMultiTurnEnv", "ShopPersonaEnv", "ShopSingleTurnEnv"]

COMPATS: Final = ("fixed", "upstream")
SCRIPTED: Final = "scripted"
_MOST_QUESTION: Final = 500


class ShopEnv(BaseEnv):
    """A shop and a wish. Its three subclasses differ in what the wish tells at first.

    Args:
        split: "train", "heldout" or "heldout_leaves" of the synthetic shop; "train" or "eval" of an official file. By
            default "train".
        data: an official file (.json, .json.gz, .jsonl, .jsonl.gz); None: the synthetic shop.
        language: of the synthetic shop: "en", "zh" or "mixed".
        products: of the synthetic shop, rounded up to whole kinds of goods of 120.
        cache_dir: folder for the search index, which processes then share; None: it is made in memory.
        reward: "strict", "loose" or "success"; `info["metrics"]` has all three.
        compat: "fixed", or "upstream" with the published engine's faults (see the README).
        slot: of the published service whose random numbers `compat="upstream"` plays.
        page_size: results on a page, 1 to 50.
        max_turns: actions after which the episode is truncated.
        persona: whether attributes are told by who wants the goods instead of by the wish.
        multi_turn: whether needs have to be asked for.
        shopper: who answers: "scripted", a function of messages, or an OpenAI-compatible URL.
        shopper_model: name of the model behind that URL.

    Raises:
        UsageError: an argument is not what it may be, or the file is damaged.
        MissingExtraError: bm25s or rapidfuzz is not installed.
    """

    worker: ClassVar[Literal["inline", "thread", "process"]] = "inline"
    policies: ClassVar[Mapping[str, str]] = {
        "careful": "agentenv_envs.shop.policies:Careful",
        "oracle": "agentenv_envs.shop.policies:Oracle",
        "random": "agentenv_envs.shop.policies:Random",
        "scripted": "agentenv_envs.shop.policies:Scripted",
    }
    _persona: ClassVar[bool] = False
    _multi_turn: ClassVar[bool] = False
    _turns: ClassVar[int] = 30

    def __init__(
        self,
        *,
        split: str = "train",
        data: str | None = None,
        language: str = "en",
        products: int = 2400,
        cache_dir: str | None = None,
        reward: str = "strict",
        compat: str = "fixed",
        slot: int = 0,
        page_size: int = 20,
        max_turns: int | None = None,
        persona: bool | None = None,
        multi_turn: bool | None = None,
        shopper: str | Chat = SCRIPTED,
        shopper_model: str = "default",
    ) -> None:
        self.persona = _yes_or_no("persona", persona, self._persona)
        self.multi_turn = _yes_or_no("multi_turn", multi_turn, self._multi_turn)
        if max_turns is None:
            max_turns = ShopMultiTurnEnv._turns if self.multi_turn else self._turns
        self.max_turns: int = _whole_number("max_turns", max_turns, 1, 10_000)
        self.page_size = _whole_number("page_size", page_size, 1, 50)
        self.slot = _whole_number("slot", slot, 0, 10**9)
        self.reward = _one_of("reward", reward, REWARDS)
        self.compat = _one_of("compat", compat, COMPATS)
        self._chat = _chat_of(shopper, shopper_model)
        for name, value in (("data", data), ("cache_dir", cache_dir)):
            if value is not None and not (
                isinstance(value, str | Path) and str(value).strip() and "\0" not in str(value)
            ):
                raise UsageError(f"{name} must be the name of a file or folder, or None, got {value!r}")
        self.spec_of_catalogue = CatalogueSpec(data, language, products, cache_dir)
        self._catalogue: Catalogue = load_catalogue(self.spec_of_catalogue)
        self._catalogue.tasks.check_split(split, persona=self.persona)
        self.split = split
        self._task: Task | None = None
        self._session = Session(self._catalogue, self.page_size)
        self._shopper: Shopper | None = None
        self._slot_random = random.Random(f"slot:{slot}") if compat == "upstream" else None
        self._counts = {"turns": 0, "invalid_actions": 0, "questions": 0}

    @property
    def catalogue(self) -> Catalogue:
        """The process's, read-only."""
        return self._catalogue

    @property
    def task(self) -> Task:
        """The running episode's.

        Raises:
            RuntimeError: none is running.
        """
        if self._task is None:
            raise RuntimeError(f"{type(self).__name__} has no running episode: call reset first")
        return self._task

    @property
    def session(self) -> Session:
        """The running episode's visit."""
        return self._session

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**40))
        task = self._catalogue.tasks.draw(seed, self.split, persona=self.persona)
        if self._slot_random is not None:
            task = upstream.with_random_cap(task, self._target(task), self._slot_random)
        self._task = task
        self._session = Session(self._catalogue, self.page_size)
        self._shopper = self._new_shopper(task) if self.multi_turn else None
        self._counts = dict.fromkeys(self._counts, 0)
        info: dict[str, Any] = {"task_id": task.id, "family": task.family}
        if self._slot_random is not None:
            info["goal"] = upstream.leaked_goal(task, self._target(task))
        return self._opening(task), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action.

        Raises:
            RuntimeError: called before `reset` or after the end.
            InfrastructureError: a model that plays the shopper did not answer.
        """
        task = self.task
        parsed = parse_action(action)
        if parsed is not None and parsed.verb == "ask" and self._shopper is not None and parsed.value:
            # First of all: where it raises, the turn was not taken.
            said = self._shopper.answer(parsed.value[:_MOST_QUESTION])
            return self._go_on(f"Shopper: {said}", asked=True)
        if parsed is not None and parsed.verb == "search" and parsed.value and self._session.can_search:
            self._session.search(parsed.value)
            return self._go_on(self._session.text())
        can_buy = self._session.can_buy
        if parsed is not None and parsed.verb == "click" and self._session.click(parsed.value):
            if can_buy and fold(parsed.value) == BUY:
                return self._buy(task)
            return self._go_on(self._session.text())
        return self._go_on(self._complaint(parsed), invalid=True)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what the process holds in common."""
        state = self.__dict__.copy()
        del state["_catalogue"]
        state["_session"] = {key: value for key, value in vars(self._session).items() if key != "_catalogue"}
        state["_catalogue_key"] = self._catalogue.key
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the process's catalogue, which is loaded if there is none yet.

        Raises:
            UsageError: the file has another content than when the environment was pickled.
        """
        state = dict(state)
        key = state.pop("_catalogue_key")
        self._catalogue = load_catalogue(state["spec_of_catalogue"])
        if self._catalogue.key != key:
            raise UsageError(f"data={state['spec_of_catalogue'].data!r} has changed since")
        self._session = Session(self._catalogue, state["page_size"])
        vars(self._session).update(state.pop("_session"))
        self.__dict__.update(state)

    def _opening(self, task: Task) -> str:
        ask = ", click[button] or ask[question to the shopper]" if self.multi_turn else " or click[button]"
        rules = (
            f"You shop for somebody. Each turn, write one action: search[keywords]{ask}. "
            "Choose a product's options by their values; click[buy now] on its page buys it and ends the task."
        )
        if self.multi_turn:
            wish = f"{task.request}\n(Ask for what else matters.)"
        elif self.persona:
            wish = phrases(task.language).short_wish(task.request, task.options, task.price_cap)
        else:
            wish = task.instruction
        who = f"\nShopper: {task.persona}" if self.persona else ""
        return f"{rules}{who}\nWish: {wish}\n{self._session.text()}"

    def _complaint(self, action: Action | None) -> str:
        verbs = "search[keywords], click[button] or ask[question]" if self.multi_turn else (
            "search[keywords] or click[button]"
        )  # fmt: skip
        if action is None or not action.value or (action.verb == "ask" and not self.multi_turn):
            why = f"Not understood: write exactly one action, {verbs}."
        elif action.verb == "search":
            why = "This page has no search bar: click[back to search] first."
        else:
            why = f"This page has no button {action.value[:80]!r}."
        return f"{why}\n{self._session.buttons_text()}"

    def _go_on(
        self, text: str, *, invalid: bool = False, asked: bool = False
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._counts["turns"] += 1
        self._counts["invalid_actions"] += invalid
        self._counts["questions"] += asked
        truncated = self._counts["turns"] >= self.max_turns
        info: dict[str, Any] = {
            "action_valid": not invalid,
            "invalid_actions": self._counts["invalid_actions"],
        }
        if truncated:
            info |= self._last(None)
        return text, 0.0, False, truncated, info

    def _buy(self, task: Task) -> tuple[str, float, bool, bool, dict[str, Any]]:
        product = self._session.product
        assert product is not None
        self._counts["turns"] += 1
        price, r_type = self._session.price(), None
        if self._slot_random is not None:
            price, r_type = upstream.random_price(product, self._slot_random), upstream.R_TYPE
        marks = score(task, product, self._session.chosen.values(), price, r_type=r_type)
        chosen = "".join(f", {axis} {value}" for axis, value in self._session.chosen.items())
        text = f"Bought: {product.title}{chosen}, for {money(price)}."
        invalid = self._counts["invalid_actions"]
        info = {
            "action_valid": True,
            "invalid_actions": invalid,
            "bought": product.id,
            **self._last(marks),
        }
        return text, marks.reward(self.reward), True, False, info

    def _last(self, marks: Score | None) -> dict[str, Any]:
        """What `info` says at the end; without a purchase all marks are 0."""
        self._task = None
        metrics: dict[str, float] = dict(self._counts)
        metrics["bought"] = float(marks is not None)
        for name in (*REWARDS, "r_type", "attribute_share", "option_share", "price_ok"):
            metrics[name] = float(getattr(marks, name)) if marks is not None else 0.0
        return {"success": metrics["success"] == 1.0, "metrics": metrics}

    def _target(self, task: Task) -> Product:
        return self._catalogue.products[self._catalogue.places[task.product_id]]

    def _new_shopper(self, task: Task) -> Shopper:
        if self._chat is not None:
            return LLMShopper(task, self._chat)
        return ScriptedShopper(task, [option.axis for option in self._target(task).options])


class ShopSingleTurnEnv(ShopEnv):
    """ShopSimulator-SingleTurn-v0: the first observation has the whole wish. Arguments: see `ShopEnv`."""


class ShopMultiTurnEnv(ShopEnv):
    """ShopSimulator-MultiTurn-v0: the needs have to be asked for. Arguments: see `ShopEnv`."""

    worker = "thread"  # a model may play the shopper
    _multi_turn = True
    _turns = 40


class ShopPersonaEnv(ShopEnv):
    """ShopSimulator-Persona-v0: the shopper's habits say which attributes. Arguments: see `ShopEnv`."""

    worker = "thread"
    _persona = True


def _chat_of(shopper: str | Chat, model: str) -> Chat | None:
    if callable(shopper):
        return shopper
    if shopper == SCRIPTED:
        return None
    if isinstance(shopper, str) and "://" in shopper:
        return OpenAIChat(shopper, model)
    raise UsageError(f"shopper must be 'scripted', a function of messages or a URL, got {shopper!r}")


def _yes_or_no(name: str, value: Any, default: bool) -> bool:
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, got {value!r}")
    return default if value is None else value


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UsageError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return str(value)


def _whole_number(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
    return value
