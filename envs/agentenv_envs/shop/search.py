"""Keyword search: BM25 by bm25s over words and pairs of Han characters.

Invariants:
- The order is by (score, place in the catalogue): the same query gives the same list in every process.
- The order of the words in a query, and words said twice, change nothing.
- An index is never changed once it is made; one that was saved is read by mmap, so that processes share its pages.
- A saved index that is damaged, or of another catalogue, is not used.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from agentenv.errors import MissingExtraError

__all__ = ["SearchIndex", "tokens"]

logger = logging.getLogger(__name__)

_FORM: Final = 1
"""Of tokens and of the folder: a saved index of another form is made anew."""
_STAMP: Final = "agentenv.json"
_MAX_QUERY_TOKENS: Final = 256
_HAN: Final = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_RUN: Final = re.compile(rf"[{_HAN}]+|[^\W_{_HAN}]+")
_IS_HAN: Final = re.compile(rf"[{_HAN}]")


def tokens(text: str) -> list[str]:
    """Words in lower case; of a run of Han characters each pair of neighbours, or the one that stands alone.

    Full-width letters and digits count as plain ones.
    """
    found: list[str] = []
    for run in _RUN.findall(unicodedata.normalize("NFKC", text).lower()):
        if len(run) > 1 and _IS_HAN.match(run):
            found += [run[place : place + 2] for place in range(len(run) - 1)]
        else:
            found.append(run)
    return found


class SearchIndex:
    """BM25 (Lucene's form, k1 = 1.5, b = 0.75) over a list of texts. Made by `build` or `load`."""

    def __init__(self, retriever: Any, num_texts: int) -> None:
        self._retriever = retriever
        self._vocabulary: dict[str, int] = retriever.vocab_dict
        self.num_texts = num_texts

    @classmethod
    def build(cls, texts: Iterable[str]) -> SearchIndex:
        """Index texts; 20,000 product texts take about 2 s.

        Raises:
            MissingExtraError: bm25s is not installed.
        """
        bm25s = _bm25s()
        vocabulary: dict[str, int] = {}
        ids = [[vocabulary.setdefault(token, len(vocabulary)) for token in tokens(text)] for text in texts]
        if not vocabulary:
            vocabulary["\x00"] = 0  # bm25s can't index nothing
            ids = [[0] for _ in ids]
        retriever = bm25s.BM25(method="lucene", backend="numpy")
        retriever.index(
            bm25s.tokenization.Tokenized(ids=ids, vocab=vocabulary), show_progress=False, leave_progress=False
        )
        return cls(retriever, len(ids))

    def top(self, query: str, limit: int) -> list[int]:
        """Places of the best texts, best first; only texts that share a token with the query.

        Args:
            query: keywords; what lies beyond 256 different tokens is left out.
            limit: greatest length of the list.
        """
        import numpy as np

        known = {self._vocabulary[token] for token in tokens(query) if token in self._vocabulary}
        if not known or limit < 1:
            return []
        scores = self._retriever.get_scores(sorted(known)[:_MAX_QUERY_TOKENS])
        (places,) = np.nonzero(scores)
        values = scores[places]
        if len(values) > limit:
            # All that may tie with the last one stay, so that the cut is by (score, place) and not by chance.
            last = np.partition(values, len(values) - limit)[len(values) - limit]
            keep = values >= last
            places, values = places[keep], values[keep]
        # `places` ascend, so a stable sort leaves ties in catalogue order.
        order = np.argsort(-values, kind="stable")[:limit]
        best: list[int] = places[order].tolist()
        return best

    def save(self, folder: Path, key: str) -> None:
        """Write the index, whole or not at all; a folder that is there already stays.

        Args:
            folder: where to.
            key: content hash of the catalogue.

        Raises:
            OSError: it can't be written.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            self._retriever.save(str(new))
            stamp = {
                "form": _FORM,
                "key": key,
                "texts": self.num_texts,
                "bytes": {path.name: path.stat().st_size for path in sorted(new.iterdir())},
            }
            (new / _STAMP).write_text(json.dumps(stamp), encoding="utf-8")
            try:
                os.rename(new, folder)
            except OSError:
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(new, ignore_errors=True)

    @classmethod
    def load(cls, folder: Path, key: str) -> SearchIndex | None:
        """Read a saved index by mmap; None where there is none that can be used.

        Args:
            folder: that `save` wrote.
            key: content hash of the catalogue.

        Raises:
            MissingExtraError: bm25s is not installed.
        """
        bm25s = _bm25s()
        try:
            stamp = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
            if (stamp["form"], stamp["key"]) != (_FORM, key):
                raise ValueError("it is of another catalogue or form")
            for name, size in stamp["bytes"].items():
                if (folder / name).stat().st_size != size:
                    raise ValueError(f"{name} has another size than was written")
            retriever = bm25s.BM25.load(str(folder), mmap=True)
            return cls(retriever, int(stamp["texts"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("the saved index %s is left aside: %s", folder, error)
            return None


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise MissingExtraError("bm25s", "shop") from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets DEBUG, which every program would show
    return bm25s
