"""One visit to the shop: the page that is open, and what its buttons lead to.

Invariants:
- Only what the open page shows can be clicked; what is clicked elsewhere changes nothing.
- A page's text and buttons are a function of catalogue and clicks.
- A search shows the best 150 products at most.
"""

from __future__ import annotations

from typing import Final

from .actions import fold
from .catalogue import Catalogue
from .records import Product, price_of

__all__ = ["BUY", "MOST_RESULTS", "Session", "money"]

MOST_RESULTS: Final = 150
BUY: Final = "buy now"
_SEARCH, _RESULTS, _ITEM, _ATTRIBUTES, _DETAILS = "search", "results", "item", "attributes", "details"
_TO_SEARCH, _TO_RESULTS, _TO_ITEM = "back to search", "back to results", "back to product"
_NEXT, _PREVIOUS = "next page", "prev page"
_MOST_SHOWN_QUERY: Final = 80


class Session:
    """A visit, from the search page on.

    Args:
        catalogue: of the shop.
        page_size: results on a page.
    """

    def __init__(self, catalogue: Catalogue, page_size: int) -> None:
        self._catalogue = catalogue
        self._page_size = page_size
        self._page = _SEARCH
        self._query = ""
        self._results: list[int] = []
        self._first = 0
        self.product: Product | None = None
        """The one whose page, or sub-page, is open."""
        self.chosen: dict[str, str] = {}
        """Axis -> value, of the open product."""

    @property
    def can_search(self) -> bool:
        """Whether the open page has a search bar."""
        return self._page in (_SEARCH, _RESULTS)

    @property
    def can_buy(self) -> bool:
        """Whether the open page has the button `BUY`."""
        return self._page == _ITEM

    @property
    def shown(self) -> list[Product]:
        """The products of the open page of results."""
        if self._page != _RESULTS:
            return []
        places = self._results[self._first : self._first + self._page_size]
        return [self._catalogue.products[place] for place in places]

    def search(self, query: str) -> None:
        """Open the results of a search; only where `can_search`."""
        self._query = query
        self._results = self._catalogue.index.top(query, MOST_RESULTS)
        self._first = 0
        self._page = _RESULTS

    def click(self, value: str) -> bool:
        """Press a button; False where the open page has none of this name. `BUY` is one, and changes nothing here."""
        wanted = fold(value)
        if self._page == _RESULTS:
            for product in self.shown:
                if wanted == fold(product.id):
                    return self._open(product)
            if wanted in self._controls():
                return self._go(wanted)
            titled = [product for product in self.shown if wanted == fold(product.title)]
            return len(titled) == 1 and self._open(titled[0])
        if wanted in self._controls():
            return self._go(wanted)
        return self._page == _ITEM and self._choose(wanted)

    def buttons(self) -> list[str]:
        """What `click` takes, each once: ids on results, option values on a product's page."""
        names = self._controls()
        if self._page == _RESULTS:
            return [*(product.id for product in self.shown), *names]
        if self._page == _ITEM and self.product is not None:
            taken, values = set(names), []
            for option in self.product.options:
                for value in option.values:
                    # A value that another button has already is told apart by its axis.
                    name = value if fold(value) not in taken else f"{option.axis}: {value}"
                    taken.add(fold(name))
                    values.append(name)
            return [*values, *names]
        return names

    def price(self) -> float:
        """Of the open product with what is chosen."""
        assert self.product is not None
        return price_of(self.product, self.chosen)

    def text(self) -> str:
        """The open page."""
        if self._page == _SEARCH:
            return "Search page. Write search[keywords]."
        if self._page == _RESULTS:
            return self._results_text()
        product = self.product
        assert product is not None
        if self._page == _ITEM:
            lines = [f"{product.id} | {product.title} | {money(self.price())}"]
            for option in product.options:
                values = (
                    value if price is None else f"{value} ({money(price)})"
                    for value, price in zip(option.values, option.prices, strict=True)
                )
                lines.append(f"{option.axis}: {' / '.join(values)}")
            if self.chosen:
                lines.append(f"Chosen: {'; '.join(f'{axis} {value}' for axis, value in self.chosen.items())}")
        elif self._page == _ATTRIBUTES:
            lines = [f"Attributes of {product.id}: {', '.join(product.attributes) or 'none'}"]
        else:
            lines = [
                f"{product.id}: {' > '.join(product.category)}" + (f"; {product.shop}" * bool(product.shop))
            ]
        return "\n".join([*lines, self.buttons_text()])

    def buttons_text(self) -> str:
        """The line about buttons; those of the results and options stand above it, and are not said again."""
        names = self._controls()
        if self._page == _SEARCH:
            return "This page has no buttons. Write search[keywords]."
        if self._page == _RESULTS:
            names = [*(["a product's id"] if self._results else []), *names]
        elif self._page == _ITEM and self.product is not None and self.product.options:
            names = ["an option's value", *names]
        return f"Buttons: {', '.join(names)}"

    def _controls(self) -> list[str]:
        if self._page == _SEARCH:
            return []
        if self._page == _RESULTS:
            pages = [_NEXT] if self._first + self._page_size < len(self._results) else []
            return [*pages, *([_PREVIOUS] if self._first else []), _TO_SEARCH]
        if self._page == _ITEM:
            return [_ATTRIBUTES, _DETAILS, _TO_RESULTS, _TO_SEARCH, BUY]
        return [_TO_ITEM, _TO_SEARCH]

    def _go(self, name: str) -> bool:
        if name == _TO_SEARCH:
            self._page = _SEARCH
        elif name == _TO_RESULTS:
            self._page = _RESULTS
        elif name == _TO_ITEM:
            self._page = _ITEM
        elif name in (_NEXT, _PREVIOUS):
            self._first += self._page_size if name == _NEXT else -self._page_size
        elif name in (_ATTRIBUTES, _DETAILS):
            self._page = name
        return True

    def _open(self, product: Product) -> bool:
        self.product, self.chosen, self._page = product, {}, _ITEM
        return True

    def _choose(self, wanted: str) -> bool:
        assert self.product is not None
        for exact in (True, False):
            for option in self.product.options:
                for value in option.values:
                    name = value if exact else f"{option.axis}: {value}"
                    if fold(name) == wanted:
                        self.chosen = {**self.chosen, option.axis: value}
                        return True
        return False

    def _results_text(self) -> str:
        query = (
            self._query if len(self._query) <= _MOST_SHOWN_QUERY else f"{self._query[:_MOST_SHOWN_QUERY]}..."
        )
        shown = self.shown
        if not shown:
            head = f"No product has a word of {query!r}. Write search[other keywords]."
        else:
            head = (
                f"Results {self._first + 1}-{self._first + len(shown)} of {len(self._results)} for {query!r}"
            )
        lines = [f"{product.id} | {product.title} | {money(product.price)}" for product in shown]
        return "\n".join([head, *lines, self.buttons_text()])


def money(price: float) -> str:
    """A price, with cents where it has some."""
    return f"{price:.2f}".removesuffix("00").removesuffix(".") if price == int(price) else f"{price:.2f}"
