"""One read-only catalogue per process: products, their index, and the wishes.

Invariants:
- Catalogues of the same content are one object, whatever file they came from: the key is a hash of the content.
- A catalogue is never changed. What an environment pickles is its `CatalogueSpec`.
- Loading happens once, also where many threads ask at the same time; after a fork the child has its own lock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

from agentenv.errors import UsageError

from .official import OfficialTasks, read_catalogue
from .records import Product, Task
from .search import SearchIndex
from .synth import SyntheticTasks, kinds_of, make_products

__all__ = ["Catalogue", "CatalogueSpec", "TaskSource", "load_catalogue"]

_KEPT: Final = 2
"""The latest so many catalogues stay although no environment holds them."""
_SYNTHETIC_FORM: Final = 2
"""Of generator and words: part of the key."""


class TaskSource(Protocol):
    """Where wishes come from."""

    splits: tuple[str, ...]

    def check_split(self, split: str, *, persona: bool) -> None:
        """Raise a UsageError for a split that is unknown or empty."""

    def draw(self, seed: int, split: str, *, persona: bool) -> Task:
        """The wish of a seed; one that has a persona where that is asked for."""


@dataclass(frozen=True, slots=True)
class CatalogueSpec:
    """What is needed to load a catalogue; small, and pickled in its place."""

    data: str | None = None
    """An official file: .json, .json.gz, .jsonl or .jsonl.gz; None: the synthetic catalogue."""
    language: str = "en"
    """Of the synthetic catalogue: "en", "zh" or "mixed"."""
    products: int = 2400
    """Of the synthetic catalogue."""
    cache_dir: str | None = None
    """Folder for the index, by content; None: it is made in memory."""


class Catalogue:
    """Products, index and wishes. Made by `load_catalogue`."""

    def __init__(self, key: str, products: Sequence[Product], index: SearchIndex, tasks: TaskSource) -> None:
        self.key = key
        """Hash of the content."""
        self.products = products
        self.index = index
        self.tasks = tasks
        self.places = {product.id: place for place, product in enumerate(products)}
        """Product id -> place in `products`."""


_lock = threading.Lock()
_loaded: weakref.WeakValueDictionary[str, Catalogue] = weakref.WeakValueDictionary()
_kept: deque[Catalogue] = deque(maxlen=_KEPT)
_file_keys: dict[tuple[str, int, int, int], str] = {}


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def load_catalogue(spec: CatalogueSpec) -> Catalogue:
    """The process's catalogue of this content; loaded if there is none yet.

    Raises:
        UsageError: a field of the spec, or the file, is not what it must be.
        MissingExtraError: bm25s or rapidfuzz is not installed.
    """
    with _lock:
        if spec.data is not None:
            return _official(spec, Path(spec.data).expanduser())
        kinds = kinds_of(spec.language, spec.products)
        key = blake2b(f"synthetic:{_SYNTHETIC_FORM}:{kinds}".encode(), digest_size=12).hexdigest()
        found = _loaded.get(key)
        if found is None:
            products = [product for kind in kinds for product in make_products(kind)]
            found = Catalogue(key, products, _index(spec, key, products), SyntheticTasks(kinds))
        return _keep(found)


def _official(spec: CatalogueSpec, path: Path) -> Catalogue:
    try:
        found_stat = path.stat()
        stamp = (str(path.resolve()), found_stat.st_size, found_stat.st_mtime_ns, found_stat.st_ino)
        key = _file_keys.get(stamp)
        if key is None:
            with path.open("rb") as file:
                digest = blake2b(digest_size=12)
                while block := file.read(1 << 20):
                    digest.update(block)
            # A compressed file and a plain one of the same content are two: to tell would cost reading both.
            key = _file_keys[stamp] = digest.hexdigest()
    except OSError as error:
        raise UsageError(
            f"data={spec.data!r}: {error.strerror or error}; give ShopSimulator's file of products, which its "
            "authors publish, or leave data out for the synthetic catalogue"
        ) from None
    found = _loaded.get(key)
    if found is None:
        products, tasks = read_catalogue(path)
        found = Catalogue(key, products, _index(spec, key, products), OfficialTasks(tasks, path.name))
    return _keep(found)


def _keep(catalogue: Catalogue) -> Catalogue:
    _loaded[catalogue.key] = catalogue
    if catalogue in _kept:
        _kept.remove(catalogue)
    _kept.append(catalogue)
    return catalogue


def _index(spec: CatalogueSpec, key: str, products: Sequence[Product]) -> SearchIndex:
    if spec.cache_dir is None:
        return SearchIndex.build(map(_text, products))
    folder = Path(spec.cache_dir).expanduser() / key
    index = SearchIndex.load(folder, key)
    if index is not None and index.num_texts == len(products):
        return index
    index = SearchIndex.build(map(_text, products))
    try:
        if folder.is_dir():  # one that can't be used
            # Processes that have mapped its files keep them; another one may be quicker.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}-unusable-{os.getpid()}")))
        index.save(folder, key)
    except OSError as error:
        raise UsageError(f"cache_dir={spec.cache_dir!r}: the index can't be saved there: {error}") from None
    return SearchIndex.load(folder, key) or index


def _text(product: Product) -> str:
    """What is searched: not the attributes, which take a look at the product."""
    options = (value for option in product.options for value in option.values)
    return " ".join((product.title, *product.category, product.shop, *options))
