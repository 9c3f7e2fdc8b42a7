"""Mutation operators: small edits of a module's functions, each of which may be a bug.

Invariants:
- An edit replaces one stretch of the source; every other byte stays, comments and layout included, so that the
  diff of a mutation is as small as a person's mistake.
- What `Mutation.apply` gives parses, and its syntax tree differs from the original's.
- Only bodies and defaults of functions are edited: no docstring, no annotation, no f-string, nothing that runs
  at import alone.
- The same source gives the same mutations in the same order.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .source_text import Edit, SourceText, bodies_of, integer_of, is_docstring, without

__all__ = ["OPERATORS", "Function", "Mutation", "functions_of", "mutations_of"]

_FLIPPED = {
    ast.Lt: "<:>",
    ast.Gt: ">:<",
    ast.LtE: "<=:>=",
    ast.GtE: ">=:<=",
    ast.Eq: "==:!=",
    ast.NotEq: "!=:==",
    ast.In: "in:not in",
    ast.NotIn: r"not\s+in:in",
    ast.Is: "is:is not",
    ast.IsNot: r"is\s+not:is",
}
_BOUNDARY = {ast.Lt: "<:<=", ast.Gt: ">:>=", ast.LtE: "<=:<", ast.GtE: ">=:>"}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_SIBLINGS = (
    ("min", "max"),
    ("any", "all"),
    ("startswith", "endswith"),
    ("lower", "upper"),
    ("lstrip", "rstrip"),
    ("find", "rfind"),
    ("split", "rsplit"),
    ("partition", "rpartition"),
    ("append", "extend"),
    ("ljust", "rjust"),
    ("floor", "ceil"),
)
_SIBLING_OF = {**dict(_SIBLINGS), **{b: a for a, b in _SIBLINGS}}
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """A function of a module.

    Attributes:
        name: qualified name inside the module, such as "Store.get".
        line: its first line, decorators included, as `co_firstlineno` counts.
    """

    name: str
    line: int


@dataclass(frozen=True)
class Mutation:
    """One edit of a module.

    Attributes:
        operator: key of `OPERATORS`.
        function: the innermost function that is changed.
        begin: offset in bytes of what is replaced.
        end: offset of the byte after it.
        replacement: what comes there.
    """

    operator: str
    function: Function
    begin: int
    end: int
    replacement: str

    def apply(self, source: str) -> str | None:
        """The module after the edit; None where that does not parse, or means the same."""
        data = source.encode()
        changed = (data[: self.begin] + self.replacement.encode() + data[self.end :]).decode()
        try:
            return changed if ast.dump(_parse(changed)) != ast.dump(_parse(source)) else None
        except (SyntaxError, ValueError):
            return None


def _comparison(node: ast.AST, text: SourceText, table: dict[type[ast.cmpop], str]) -> Iterator[Edit]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in table:
        pattern, _, replacement = table[type(node.ops[0])].partition(":")
        yield from text.token(
            text.span(node.left)[1], text.span(node.comparators[0])[0], pattern, replacement
        )


def _comparison_flip(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    yield from _comparison(node, text, _FLIPPED)


def _boundary(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    yield from _comparison(node, text, _BOUNDARY)


def _negation(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield (
            *text.span(node),
            f"({text.of(node.operand)})" if "\n" in text.of(node) else text.of(node.operand),
        )
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield (*text.span(node), str(not node.value))


def _and_or(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp):
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from text.token(text.span(left)[1], text.span(right)[0], *words)


def _inverted_condition(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        test = text.of(node.test)
        plain = isinstance(node.test, ast.Name | ast.Call | ast.Attribute | ast.Subscript)
        yield (*text.span(node.test), f"not {test}" if plain else f"not ({test})")


def _arithmetic(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        if isinstance(node.left, ast.Constant | ast.JoinedStr) and text.of(node.left)[-1] in "'\"":
            return  # text is put together: anything else is an error of types
        begin, end = text.span(node.left)[1], text.span(node.right)[0]
        yield from text.token(begin, end, *_ARITHMETIC[type(node.op)])
    elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        old, new = _ARITHMETIC[type(node.op)]
        begin, end = text.span(node.target)[1], text.span(node.value)[0]
        yield from text.token(begin, end, f"{old}=", f"{new}=")


def _index_shift(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    if not isinstance(node, ast.Subscript):
        return
    places = [node.slice.lower, node.slice.upper] if isinstance(node.slice, ast.Slice) else [node.slice]
    for place in places:
        value = integer_of(place)
        if place is not None and value is not None:
            yield (*text.span(place), str(value + 1 if value >= 0 else value - 1))


def _off_by_one(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield (*text.span(node), str(node.value + 1))
        if node.value > 0:
            yield (*text.span(node), str(node.value - 1))


def _wrong_constant(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, str):
        source = text.of(node)
        # Pieces that are put together in one constant, and texts over several lines, are left alone.
        match = re.fullmatch(r"""([rRuU]?)(['"])([^'"\\\n]*)\2""", source)
        if match is not None:
            prefix, quote, inner = match[1], match[2], match[3]
            yield (*text.span(node), f"{prefix}{quote}{inner[:-1] if inner else ' '}{quote}")
            if inner.swapcase() != inner:
                yield (*text.span(node), f"{prefix}{quote}{inner.swapcase()}{quote}")
    elif isinstance(node.value, float):
        yield (*text.span(node), repr(node.value * 10 if node.value else 1.0))


def _swapped_arguments(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    if isinstance(node, ast.Call):
        for left, right in zip(node.args, node.args[1:], strict=False):
            if isinstance(left, ast.Starred) or isinstance(right, ast.Starred):
                continue
            (begin, middle), (after, end) = text.span(left), text.span(right)
            gap = text.data[middle:after].decode()
            if gap.strip() == ",":  # no comment and no parenthesis between them
                yield begin, end, text.of(right) + gap + text.of(left)


def _sibling_call(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in _SIBLING_OF:
        end = text.span(node.func)[1]
        yield end - len(name), end, _SIBLING_OF[name]


def _wrong_default(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    if not isinstance(node, _FunctionNode):
        return
    for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
        for operator in (_negation, _off_by_one, _wrong_constant):
            yield from operator(default, text)
        if isinstance(default, ast.Constant) and default.value is None:
            yield (*text.span(default), "True")


def _removed_statement(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    for body in bodies_of(node):
        for number, statement in enumerate(body):
            call = isinstance(statement, ast.Expr) and isinstance(
                statement.value, ast.Call | ast.Await | ast.Yield | ast.YieldFrom
            )
            # An assignment to a name mostly leaves the name unknown: an error too plain to be a task.
            kept = isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Name)
            if call or kept or isinstance(statement, ast.AugAssign | ast.Delete | ast.Raise):
                yield from without(body, number, number, text)


def _removed_branch(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    for body in bodies_of(node):
        for number, statement in enumerate(body):
            if isinstance(statement, ast.If) and text.of(statement).startswith("if"):
                if not statement.orelse:
                    yield from without(body, number, number, text)
                    continue
                # What follows the first branch: from its end to the end of the statement.
                last = text.lines(statement.body[-1], statement.body[-1])
                whole = text.lines(statement, statement)
                if last is not None and whole is not None:
                    yield last[1], whole[1], ""


def _changed_return(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    if isinstance(node, ast.Return) and node.value is not None and text.of(node.value) != "None":
        yield (*text.span(node.value), "None")
    for body in bodies_of(node):
        for number, statement in enumerate(body):
            if isinstance(statement, ast.Return) and len(body) > 1:
                yield from without(body, number, number, text)


def _exception_handling(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[0], ast.Raise):
        yield text.span(node.body[0])[0], text.span(node.body[-1])[1], "raise"


def _loop_control(node: ast.AST, text: SourceText) -> Iterator[Edit]:
    if isinstance(node, ast.Break):
        yield (*text.span(node), "continue")
    elif isinstance(node, ast.Continue):
        yield (*text.span(node), "break")


OPERATORS: dict[str, Callable[[ast.AST, SourceText], Iterator[Edit]]] = {
    "comparison_flip": _comparison_flip,
    "boundary": _boundary,
    "negation": _negation,
    "and_or": _and_or,
    "inverted_condition": _inverted_condition,
    "arithmetic": _arithmetic,
    "index_shift": _index_shift,
    "wrong_default": _wrong_default,
    "off_by_one": _off_by_one,
    "wrong_constant": _wrong_constant,
    "swapped_arguments": _swapped_arguments,
    "sibling_call": _sibling_call,
    "removed_statement": _removed_statement,
    "removed_branch": _removed_branch,
    "changed_return": _changed_return,
    "exception_handling": _exception_handling,
    "loop_control": _loop_control,
}
"""Each operator gives the edits of one node; `Mutation.apply` drops what does not parse or changes nothing."""


def functions_of(source: str) -> dict[int, Function]:
    """The functions of a module by their first line.

    Raises:
        SyntaxError, ValueError: this Python can't parse the module.
    """
    found: dict[int, Function] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _FunctionNode):
                line = _first_line(child)
                found[line] = Function(prefix + child.name, line)
                visit(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(_parse(source), "")
    return found


def mutations_of(source: str) -> list[Mutation]:
    """Every edit of a module's functions, equal ones once; `Mutation.apply` tells which of them are mutations.

    Raises:
        SyntaxError, ValueError: this Python can't parse the module.
    """
    if "\r" in source or "\f" in source:  # lines are counted by line feeds here
        return []
    tree, text, functions = _parse(source), SourceText(source), functions_of(source)
    found: dict[tuple[int, int, str], Mutation] = {}
    for function, node in _nodes(tree, None, functions):
        for operator, edits in OPERATORS.items():
            for edit in edits(node, text):
                found.setdefault(edit, Mutation(operator, function, *edit))
    return list(found.values())


def _nodes(
    node: ast.AST, function: Function | None, functions: dict[int, Function]
) -> Iterator[tuple[Function, ast.AST]]:
    """Nodes that operators may look at, each with its innermost function."""
    if isinstance(node, _FunctionNode):
        function = functions[_first_line(node)]
        yield function, node
        for child in node.body:
            if not is_docstring(child):
                yield from _nodes(child, function, functions)
        return
    if isinstance(node, ast.JoinedStr) or is_docstring(node):
        return
    if function is not None:
        yield function, node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child, function, functions)


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in other people's code
        return ast.parse(source)
