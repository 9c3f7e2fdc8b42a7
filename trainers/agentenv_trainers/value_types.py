"""Whether the fields of a config hold what they are declared as: Python and YAML put anything there.

Invariant: only whole numbers, numbers and switches are looked at, by their annotation; None passes where it is the
default.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

_ALLOWED = {"int": "a whole number", "float": "a finite number", "bool": "true or false"}


def misfit(config: Any, may_be_infinite: Collection[str] = ()) -> tuple[str, object, str] | None:
    """The first field that holds something else: its name, its value, and what is allowed.

    Args:
        config: a dataclass instance.
        may_be_infinite: names of the fields for which infinity has a meaning.
    """
    # Not Field.type: the parser of transformers changes it.
    annotations: dict[str, Any] = {}
    for kind_of_config in reversed(type(config).__mro__):
        annotations |= inspect.get_annotations(kind_of_config)
    for definition in fields(config):
        value = getattr(config, definition.name)
        kinds = _members(annotations[definition.name]) - {"None"}
        if len(kinds) != 1 or (value is None and definition.default is None):
            continue
        (kind,) = kinds
        if kind in _ALLOWED and not _fits(kind, value, definition.name in may_be_infinite):
            return definition.name, value, _ALLOWED[kind]
    return None


def _members(declared: Any) -> set[str]:
    """Of the union that a field is declared as; under postponed evaluation it is a text already."""
    text = declared.__name__ if isinstance(declared, type) else str(declared)
    return {part.strip() for part in text.split("|")}


def _fits(kind: str, value: object, may_be_infinite: bool) -> bool:
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    if kind == "int":
        return isinstance(value, Integral)
    return isinstance(value, Real) and not math.isnan(value) and (may_be_infinite or math.isfinite(value))
