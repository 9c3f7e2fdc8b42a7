"""A module's source beside its syntax tree: where nodes lie, and edits of whole statements.

Invariants:
- Offsets count bytes of UTF-8, as the columns of the syntax tree do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

__all__ = ["Edit", "SourceText", "bodies_of", "integer_of", "is_docstring", "without"]

Edit = tuple[int, int, str]
"""Offset of what is replaced, offset of the byte after it, and what comes there."""


class SourceText:
    """A module's source with byte offsets, in which the syntax tree counts columns."""

    def __init__(self, source: str) -> None:
        self.data = source.encode()
        self.starts = [0]
        for line in self.data.split(b"\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)

    def span(self, node: ast.expr | ast.stmt | ast.ExceptHandler) -> tuple[int, int]:
        """Offsets of a node's first byte and of the byte after it."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def of(self, node: ast.expr | ast.stmt) -> str:
        """A node's source."""
        begin, end = self.span(node)
        return self.data[begin:end].decode()

    def lines(self, first: ast.stmt, last: ast.stmt) -> tuple[int, int] | None:
        """Offsets of the whole lines from one statement to another; None where they share a line with
        others."""
        begin, (_, end) = self.starts[first.lineno - 1], self.span(last)
        assert last.end_lineno is not None
        stop = min(self.starts[last.end_lineno], len(self.data))
        before, after = self.data[begin : self.span(first)[0]], self.data[end:stop].strip()
        return None if before.strip() or (after and not after.startswith(b"#")) else (begin, stop)

    def token(self, begin: int, end: int, pattern: str, replacement: str) -> Iterator[Edit]:
        """The edit of an operator that stands between two operands, where it can be told apart there."""
        gap = self.data[begin:end].decode()
        word = pattern[0].isalpha()
        found = list(re.finditer(rf"\b{pattern}\b" if word else re.escape(pattern), gap))
        if len(found) == 1 and "#" not in gap:
            offset = len(gap[: found[0].start()].encode())
            yield begin + offset, begin + offset + len(found[0][0].encode()), replacement


def without(body: list[ast.stmt], first: int, last: int, text: SourceText) -> Iterator[Edit]:
    """The edit that takes statements out of a body; the only statement becomes `pass`."""
    others = [s for n, s in enumerate(body) if not first <= n <= last and not is_docstring(s)]
    if others:
        lines = text.lines(body[first], body[last])
        if lines is not None:
            yield (*lines, "")
    else:
        yield text.span(body[first])[0], text.span(body[last])[1], "pass"


def bodies_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Lists of statements that belong to a node itself."""
    if isinstance(node, ast.ClassDef):
        return
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
            yield body


def integer_of(node: ast.expr | None) -> int | None:
    """The value of an integer with or without a minus; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = integer_of(node.operand)
        return None if value is None else -value
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def is_docstring(node: ast.AST) -> bool:
    """Whether a statement is text alone."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str | bytes)
    )
