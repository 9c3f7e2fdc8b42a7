"""The engine's grammar, derived without parsing and copying anew at every step.

TextWorld 1.7 parses each text and each condition whenever it is used and copies every symbol with its context. Here
each is parsed once, by TextWorld's own parser, and derived by recursion.

Invariant: `FastGrammar.derive` returns what TextWorld's `ContextSensitiveGrammar.derive` returns for the same state.
"""

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["FastGrammar", "parse_symbols"]

Context = tuple[Any, Mapping[str, Any], Mapping[Any, Any], Mapping[str, Any]]
"""State, variables by name, placeholders' values, and what is known of each entity."""

_symbols: dict[str, list[Any]] = {}
_conditions: dict[str, Any] = {}
_expressions: dict[str, Any] = {}


def parse_symbols(text: str) -> list[Any]:
    """The symbols of a text, by TextWorld's parser; parsed once."""
    found = _symbols.get(text)
    if found is None:
        from textworld.envs.pddl import textgen

        found = _symbols[text] = textgen._parse_and_convert(text, rule_name="symbols")
    return found


def _condition(text: str) -> Any:
    found = _conditions.get(text)
    if found is None:
        from textworld.logic import Rule

        found = _conditions[text] = Rule.parse_conjunctive_query(text)
    return found


class FastGrammar:
    """In place of a `ContextSensitiveGrammar`.

    Args:
        rules: of the one it stands for: name -> productions.
        replaced: name -> text of the only production that it has instead.
    """

    def __init__(self, rules: Mapping[str, list[Any]], replaced: Mapping[str, str]) -> None:
        self._productions: dict[str, list[tuple[str, list[Any]]]] = {
            name: [(rule.condition, rule.rhs) for rule in alternatives]
            for name, alternatives in rules.items()
        }
        for name, text in replaced.items():
            self._productions[name] = [("", parse_symbols(text))]

    def derive(self, start: str, context: Mapping[str, Any]) -> str:
        """The text that a text with symbols stands for.

        Raises:
            KeyError: it names a symbol that the grammar lacks.
        """
        known = (context["state"], context["variables"], context["mapping"], context["entity_infos"])
        return "".join(self._text(symbol, known) for symbol in parse_symbols(start))

    def _text(self, symbol: Any, context: Context) -> str:
        kind = type(symbol).__name__
        if kind == "TerminalSymbol":
            return str(symbol.symbol)
        if kind == "NonterminalSymbol":
            return self._production(str(symbol.symbol), context)
        if kind == "EvalSymbol":
            return _value(symbol.expression, context[1])
        if kind == "ListSymbol":
            return self._list(self._items(symbol.symbol, context), context)
        return "".join(self._items(symbol, context))

    def _production(self, name: str, context: Context) -> str:
        for condition, symbols in self._productions[name]:
            if not condition or next(_matches(condition, context), None) is not None:
                return "".join(self._text(symbol, context) for symbol in symbols)
        raise KeyError(f"no production of #{name}# applies")

    def _items(self, symbol: Any, context: Context) -> list[str]:
        """What the list is made of."""
        if type(symbol).__name__ != "ConditionalSymbol":
            return [self._text(symbol, context)]
        if not symbol.given:
            return [self._text(symbol.expression, context)]
        return [self._text(symbol.expression, match) for match in _matches(symbol.given, context)]

    def _list(self, items: list[str], context: Context) -> str:
        if not items:
            return self._production("list_empty", context)
        if len(items) == 1:
            return items[0]
        separator = self._production("list_separator", context)
        return separator.join(items[:-1]) + self._production("list_last_separator", context) + items[-1]


def _matches(condition: str, context: Context) -> Iterator[Context]:
    """A context for each assignment that makes the condition true."""
    state, variables, mapping, infos = context
    for assignment in state.all_assignments(_condition(condition), mapping):
        known = {
            **variables,
            **{placeholder.name: infos[var.name] for placeholder, var in assignment.items()},
        }
        yield state, known, {**mapping, **assignment}, infos


def _value(expression: str, variables: Mapping[str, Any]) -> str:
    code = _expressions.get(expression)
    if code is None:
        code = _expressions[expression] = compile(expression.strip(), "<grammar>", "eval")
    return str(eval(code, {"__builtins__": {}}, dict(variables)))
