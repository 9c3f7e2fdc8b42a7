"""What the shop sells and what people want: plain data, shared by all environments of a process.

Invariants:
- Records never change: every environment of a process reads the same ones.
- Prices are in the catalogue's own currency; a price of 0 or below, or one that is no number, is no record.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Need", "Option", "Product", "Task", "price_of"]


@dataclass(frozen=True, slots=True)
class Option:
    """A choice that a buyer has, such as the colour."""

    axis: str
    values: tuple[str, ...]
    prices: tuple[float | None, ...]
    """Of the product with each value; None: the value does not change the price."""

    def price(self, value: str) -> float | None:
        """Of the product with this value, if the value has a price."""
        return self.prices[self.values.index(value)]


@dataclass(frozen=True, slots=True)
class Product:
    """An item of the catalogue."""

    id: str
    title: str
    shop: str
    category: tuple[str, ...]
    """From the department down to the kind of goods."""
    attributes: tuple[str, ...]
    price: float
    """The lowest: what it costs where no chosen value has a price of its own."""
    price_high: float
    """The highest of the range that the catalogue gives."""
    options: tuple[Option, ...]

    @property
    def leaf(self) -> str:
        """Kind of goods: the last part of the category."""
        return self.category[-1] if self.category else ""


@dataclass(frozen=True, slots=True)
class Need:
    """Something that must hold of what is bought."""

    axis: str
    """What it is about; empty where the catalogue does not say."""
    value: str


@dataclass(frozen=True, slots=True)
class Task:
    """One wish, and the product that it was made from."""

    id: str
    product_id: str
    category: tuple[str, ...]
    instruction: str
    """The wish with all needs."""
    request: str
    """The wish as somebody first says it: the kind of goods and little more."""
    attributes: tuple[Need, ...]
    options: tuple[Need, ...]
    price_cap: float
    persona: str
    """Who wants it; empty where the catalogue has none."""
    language: str

    @property
    def family(self) -> str:
        """Department, for figures by kind of task."""
        return self.category[0] if self.category else "other"


def price_of(product: Product, chosen: dict[str, str]) -> float:
    """What the product costs with these values: the highest price among them, else the product's own.

    Args:
        product: what is bought.
        chosen: axis -> value, of the product's options.
    """
    prices = [
        price
        for option in product.options
        if option.axis in chosen and (price := option.price(chosen[option.axis])) is not None
    ]
    return max(prices, default=product.price)
