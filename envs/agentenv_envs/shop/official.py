"""ShopSimulator's own file of products and wishes, which its users bring along.

One JSON array (.json, .json.gz) or one JSON object a line (.jsonl, .jsonl.gz). What is read of a product:

    asin, title, category "A›B›C", attribute [...], pricing, customization_options {axis: [{value, price}]}, tag
    train | eval, instructions [{instruction, instruction_simple, attributes [...], options | instruction_options}],
    and where they are there shop_name and user_persona; reason_key and other fields are allowed and not used.

Invariants:
- A file is accepted whole or refused. A refusal names file, line or record, and field.
- A field that looks like a misspelt one of these is refused: it would be missing in silence otherwise.
- The file holds no budget. One that the instruction states is taken, if the product that the wish was made from keeps
  within it; otherwise it is that product's price, and a tenth, rounded up, and the instruction is made to say so. It is
  the same in every process: the published service draws it anew in every slot.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agentenv.errors import UsageError

from .json_files import kind_of, read_records
from .records import Need, Option, Product, Task, price_of
from .reward import wished_values

__all__ = ["OfficialTasks", "read_catalogue"]

_TAGS: Final = ("train", "eval")
_REQUIRED: Final = (
    "asin",
    "title",
    "category",
    "attribute",
    "pricing",
    "customization_options",
    "tag",
    "instructions",
)
_KNOWN: Final = (*_REQUIRED, "shop_name", "user_persona", "reason_key")
_WISH_REQUIRED: Final = ("instruction", "attributes")
_WISH_KNOWN: Final = (
    *_WISH_REQUIRED, "instruction_simple", "options", "instruction_options", "user_persona", "reason_key"
)  # fmt: skip
_NUMBER: Final = re.compile(r"\d[\d,]*(?:\.\d+)?")
_BUDGET: Final = re.compile(
    r"(?:不超过|不高于|低于|预算|budget|under|within|at most|less than|below|up to)\D{0,8}?(\d[\d,]*(?:\.\d+)?)"
    r"|(\d[\d,]*(?:\.\d+)?)\s*元?\s*(?:以内|以下|之内)",
    re.IGNORECASE,
)
_HAN: Final = re.compile("[\u4e00-\u9fff]")


class _FieldError(ValueError):
    """What is wrong with a record."""


class OfficialTasks:
    """The wishes of an official file.

    Args:
        tasks: split -> its wishes, in the file's order.
        name: of the file, for messages.
    """

    splits: tuple[str, ...] = _TAGS

    def __init__(self, tasks: Mapping[str, list[Task]], name: str) -> None:
        self._tasks = tasks
        self._with_persona = {split: [task for task in tasks[split] if task.persona] for split in tasks}
        self._name = name

    def check_split(self, split: str, *, persona: bool) -> None:
        """Refuse an unknown split, and one that the file has nothing for.

        Raises:
            UsageError: it is one of these.
        """
        if split not in self.splits:
            raise UsageError(f"split of {self._name} must be one of {', '.join(self.splits)}, got {split!r}")
        if not self.count(split, persona=persona):
            whose = " and that has a user_persona" if persona else ""
            raise UsageError(f"{self._name} has no wish whose tag is {split!r}{whose}")

    def count(self, split: str, *, persona: bool) -> int:
        """How many wishes a split has, or how many of these have a persona."""
        return len((self._with_persona if persona else self._tasks)[split])

    def draw(self, seed: int, split: str, *, persona: bool) -> Task:
        """The wish number `seed` of the split, counted round: seeds 0 to n - 1 bring each one once."""
        tasks = (self._with_persona if persona else self._tasks)[split]
        return tasks[seed % len(tasks)]


def read_catalogue(path: Path) -> tuple[list[Product], dict[str, list[Task]]]:
    """Read an official file.

    Args:
        path: see `json_files.read_records`.

    Returns:
        products in the file's order, and by split the wishes.

    Raises:
        UsageError: the file can't be read, or a record is not what it must be.
        MissingExtraError: rapidfuzz is not installed.
    """
    products: list[Product] = []
    tasks: dict[str, list[Task]] = {tag: [] for tag in _TAGS}
    first: dict[str, str] = {}
    texts: dict[str, str] = {}
    for where, record in read_records(path):
        try:
            product = _product(record, texts)
            if product.id in first:
                raise _FieldError(f"asin {product.id!r} is that of {first[product.id]} already")
            first[product.id] = where
            tag = record["tag"]
            if tag not in _TAGS:
                raise _FieldError(f"tag must be one of {', '.join(_TAGS)}, got {tag!r}")
            tasks[tag] += _wishes(record, product, len(products))
        except _FieldError as error:
            raise UsageError(f"{path}: {where}: {error}") from None
        products.append(product)
    if not products:
        raise UsageError(f"{path}: it holds no product")
    return products, tasks


def _product(record: dict[str, Any], texts: dict[str, str]) -> Product:
    _check_names(record, _REQUIRED, _KNOWN)

    def shared(text: str) -> str:
        """The same text only once in memory."""
        return texts.setdefault(text, text)

    options = tuple(_options(record["customization_options"], shared))
    prices = _prices(record["pricing"], "pricing")
    if not prices:
        prices = [price for option in options for price in option.prices if price is not None]
    if not prices:
        raise _FieldError(f"pricing holds no number ({record['pricing']!r}), and no option has a price")
    category = tuple(shared(part.strip()) for part in _text(record, "category").split("›") if part.strip())
    if not category:
        raise _FieldError("category is empty; 'A›B›C' is needed")
    return Product(
        id=_text(record, "asin"),
        title=_text(record, "title"),
        shop=shared(_text(record, "shop_name", empty="")),
        category=category,
        attributes=tuple(map(shared, _texts(record["attribute"], "attribute"))),
        price=min(prices),
        price_high=max(prices),
        options=options,
    )


def _options(value: Any, shared: Any) -> Iterator[Option]:
    if value is None:
        return
    if not isinstance(value, dict):
        raise _FieldError(f"customization_options must be an object of lists, got {kind_of(value)}")
    for axis, entries in value.items():
        name = f"customization_options[{axis!r}]"
        if not isinstance(entries, list):
            raise _FieldError(f"{name} must be a list of {{value, price}}, got {kind_of(entries)}")
        offered: dict[str, float | None] = {}
        for entry in entries:
            if isinstance(entry, dict):
                _check_names(entry, ("value",), ("value", "price"), name)
                prices = _prices(entry.get("price"), f"{name}: price")
                offered.setdefault(shared(_text(entry, "value", name=name)), prices[0] if prices else None)
            elif isinstance(entry, str) and entry.strip():
                offered.setdefault(shared(entry.strip()), None)
            else:
                raise _FieldError(f"{name}: {{value, price}} is needed, got {entry!r}")
        if offered:
            yield Option(shared(axis.strip()), tuple(offered), tuple(offered.values()))


def _wishes(record: dict[str, Any], product: Product, place: int) -> Iterator[Task]:
    wishes = record["instructions"]
    if wishes is None:
        return
    if not isinstance(wishes, list):
        raise _FieldError(f"instructions must be a list of objects, got {kind_of(wishes)}")
    for number, wish in enumerate(wishes):
        name = f"instructions[{number}]"
        if not isinstance(wish, dict):
            raise _FieldError(f"{name} must be an object, got {kind_of(wish)}")
        _check_names(wish, _WISH_REQUIRED, _WISH_KNOWN, name)
        if "options" not in wish and "instruction_options" not in wish:
            raise _FieldError(f"{name} has neither options nor instruction_options")
        options = tuple(_needs(wish.get("options", wish.get("instruction_options")), f"{name}: options"))
        attributes = tuple(Need("", text) for text in _texts(wish["attributes"], f"{name}: attributes"))
        instruction = _text(wish, "instruction", name=name)
        language = "zh" if _HAN.search(instruction) else "en"
        cap, said = _budget(instruction, product, options)
        if not said:
            instruction += f"（价格不超过{cap:g}）" if language == "zh" else f" (It may cost up to {cap:g}.)"
        yield Task(
            id=f"shop-{place}-{number}",  # the product's own id would give the goal away
            product_id=product.id,
            category=product.category,
            instruction=instruction,
            request=_text(wish, "instruction_simple", empty=product.leaf, name=name),
            attributes=attributes,
            options=options,
            price_cap=cap,
            persona=_persona(wish.get("user_persona") or record.get("user_persona")),
            language=language,
        )


def _needs(value: Any, name: str) -> Iterator[Need]:
    if value is None:
        return
    if isinstance(value, dict):
        for axis, wanted in value.items():
            for text in _texts(wanted if isinstance(wanted, list) else [wanted], f"{name}[{axis!r}]"):
                yield Need(axis, text)
    else:
        for text in _texts(value, name):
            yield Need("", text)


def _budget(instruction: str, product: Product, options: tuple[Need, ...]) -> tuple[float, bool]:
    """The highest price that counts as kept, and whether the instruction says it."""
    price = price_of(product, wished_values(options, product))
    for found in _BUDGET.finditer(instruction):
        stated = float((found[1] or found[2]).replace(",", ""))
        if stated >= price:
            return stated, True
    step = 10 ** max(0, math.floor(math.log10(price)) - 1) * 5 if price >= 10 else 1
    return float(math.ceil(price * 1.1 / step) * step), False


def _persona(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_persona(item)}" for key, item in value.items() if item)
    if isinstance(value, list):
        return ", ".join(_persona(item) for item in value if item)
    return "" if value is None else str(value).strip()


def _prices(value: Any, name: str) -> list[float]:
    """The numbers of a price: a number, a text such as "¥12.50 - 20", or a list of these."""
    if value is None:
        return []
    if isinstance(value, list):
        return [price for item in value for price in _prices(item, name)]
    if isinstance(value, str):
        found = [float(number.replace(",", "")) for number in _NUMBER.findall(value)]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            found = [float(value)]
        except OverflowError:
            found = [math.inf]
    else:
        raise _FieldError(
            f"{name} must be a number, a text with one, or a list of these, got {kind_of(value)}"
        )
    for price in found:
        if not 0.0 < price < 1e12:
            raise _FieldError(f"{name} must be above 0 and finite, got {value!r}")
    return found


def _text(record: dict[str, Any], field: str, *, empty: str | None = None, name: str = "") -> str:
    value = record.get(field)
    full = f"{name}: {field}" if name else field
    if value is None and empty is not None:
        return empty
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or (not value.strip() and empty is None):
        raise _FieldError(f"{full} must be a text that is not empty, got {value!r}")
    return " ".join(value.split()) or (empty or "")


def _texts(value: Any, name: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str | int | float) for item in value):
        raise _FieldError(f"{name} must be a list of texts, got {kind_of(value)}")
    return [text for item in value if (text := " ".join(str(item).split()))]


def _check_names(
    record: dict[str, Any], required: tuple[str, ...], known: tuple[str, ...], name: str = ""
) -> None:
    """Refuse missing names, and unknown ones that look like a known one that is missing."""
    where = f"{name}: " if name else ""
    others = [field for field in record if field not in known]
    for field in required:
        if field not in record:
            raise _FieldError(
                f"{where}the field {field!r} is missing; there are {', '.join(map(repr, record)) or 'none'}, and "
                f"needed are {', '.join(required)}"
            )
    for field in others:
        for close in difflib.get_close_matches(str(field).casefold(), known, n=1, cutoff=0.8):
            if close not in record:
                raise _FieldError(f"{where}unknown field {field!r}; did you mean {close!r}?")
