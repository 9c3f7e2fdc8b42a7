"""Code families that the embedded tasks are generated from.

A family is a domain (a shop, a clock, a bank account) with a few small functions. Each function has two
or three *sites*: places where an operator, a number or a name decides what the code does. What a site must
hold is drawn from the seed, so the same function is right with `<` in one task and with `>=` in another:
only the issue says which, and an agent that doesn't read it can only guess.

Invariants:
- every site has a sentence for each value that it can take (`Site.sentence`), and none of them names a line;
- names come from pools shared by all families, so that a held-out family uses known words in new code.
"""

from dataclasses import dataclass
from typing import Final

#: Words that describe a value of a site, by kind of site. The first level of choice is the value
#: (what the code must do), the second the wording.
WORDINGS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "compare": {
        "<": ("below", "under", "less than"),
        "<=": ("up to", "at most", "no more than"),
        ">": ("above", "over", "more than"),
        ">=": ("from", "at least", "no less than"),
    },
    "equal": {"==": ("equal to", "the same as"), "!=": ("other than", "different from")},
    "arithmetic": {
        "+": ("{b} should be added to {a}", "{a} should grow by {b}"),
        "-": ("{b} should be taken off {a}", "{a} should shrink by {b}"),
        "*": ("{a} should be multiplied by {b}", "{a} should be scaled by {b}"),
    },
    "extreme": {"min": ("the smallest", "the lowest"), "max": ("the largest", "the highest")},
    "logic": {"and": ("both", "all of them"), "or": ("one of them", "either")},
    "order": {"True": ("from high to low", "falling"), "False": ("from low to high", "rising")},
    "end": {"0": ("the first", "the front"), "-1": ("the last", "the back")},
    "number": {str(n): (str(n),) for n in range(10)},
}

#: Identifiers by role; `{role}` in a source is replaced by one of them, the same one everywhere in a task.
NAMES: Final[dict[str, tuple[str, ...]]] = {
    "items": ("prices", "costs", "values", "marks", "sizes"),
    "words": ("words", "names", "tags"),
    "item": ("p", "v", "x"),
    "word": ("w", "s"),
    "limit": ("limit", "cap", "bound", "edge"),
    "amount": ("fee", "cut", "bonus", "rate"),
    "step": ("step", "move", "jump"),
    "total": ("total", "result", "score"),
    "out": ("out", "kept", "found"),
    "left": ("start", "near", "base"),
    "right": ("end", "far", "goal"),
    "count": ("n", "k", "count"),
}


@dataclass(frozen=True)
class Site:
    """A place in a function whose value decides the behaviour.

    Args:
        kind: key of WORDINGS.
        sentence: what is wanted, with `{want}` for the wording and names as in the source.
        values: the values it may take; all of the kind's by default.
    """

    kind: str
    sentence: str = "{want}"
    values: tuple[str, ...] = ()
    a: str = ""
    b: str = ""

    @property
    def choices(self) -> tuple[str, ...]:
        return self.values or tuple(WORDINGS[self.kind])


@dataclass(frozen=True)
class Function:
    """One function of a family.

    Args:
        names: what it may be called.
        source: its text; `{f}` is its name, `{A}`, `{B}`, `{C}` are its sites, other fields are roles.
        arguments: one letter each: L list of integers, W list of words, i integer, c letter.
        sites: the sites by their field.
    """

    names: tuple[str, ...]
    source: str
    arguments: str
    sites: dict[str, Site]


def _function(names: str, arguments: str, source: str, **sites: Site) -> Function:
    return Function(tuple(names.split()), source.strip("\n"), arguments, sites)


def _compare(sentence: str) -> Site:
    return Site("compare", sentence)


def _arithmetic(a: str, b: str, values: tuple[str, ...] = ()) -> Site:
    return Site("arithmetic", values=values, a=a, b=b)


FAMILIES: Final[dict[str, tuple[Function, ...]]] = {
    "shop": (
        _function(
            "sale reduce",
            "Lii",
            """
def {f}({items}, {amount}, {limit}):
    {out} = []
    for {item} in {items}:
        if {item} {A} {limit}:
            {item} = {item} {B} {amount}
        {out}.append({item})
    return {out}
""",
            A=_compare("{items} {want} {limit} should be changed"),
            B=_arithmetic("each of {items}", "{amount}"),
        ),
        _function(
            "bill charge",
            "Li",
            """
def {f}({items}, {amount}):
    {total} = {A}
    for {item} in {items}:
        {total} = {total} {B} {item}
    return {total} {C} {amount}
""",
            A=Site("number", "{total} should begin at {want}", ("0", "1", "2", "3")),
            B=_arithmetic("{total}", "each of {items}", ("+", "-")),
            C=_arithmetic("the sum", "{amount}"),
        ),
        _function(
            "best pick",
            "Li",
            """
def {f}({items}, {limit}):
    {out} = [{item} for {item} in {items} if {item} {A} {limit}]
    if not {out}:
        return {C}
    return {B}({out})
""",
            A=_compare("{items} {want} {limit} should be looked at"),
            B=Site("extreme", "{want} of the {items} should be given"),
            C=Site("number", "with no {items} the answer should be {want}", ("0", "1", "5", "9")),
        ),
    ),
    "text": (
        _function(
            "long choose",
            "Wi",
            """
def {f}({words}, {limit}):
    {out} = []
    for {word} in {words}:
        if len({word}) {A} {limit}:
            {out}.append({word})
    return sorted({out}, reverse={B})
""",
            A=_compare("{words} with a length {want} {limit} should stay"),
            B=Site("order", "the {words} should be sorted {want}"),
        ),
        _function(
            "tally letters",
            "Wc",
            """
def {f}({words}, letter):
    {count} = {A}
    for {word} in {words}:
        if {word}[{B}] {C} letter:
            {count} = {count} + 1
    return {count}
""",
            A=Site("number", "{count} should begin at {want}", ("0", "1", "2", "3")),
            B=Site("end", "{want} letter of the {words} should be compared"),
            C=Site("equal", "a letter {want} letter should be counted"),
        ),
        _function(
            "short skip",
            "W",
            """
def {f}({words}):
    {out} = {words}[{A}:]
    {out} = sorted({out}, reverse={B})
    return {out}[{C}]
""",
            A=Site("number", "{want} of the {words} should be skipped", ("0", "1", "2")),
            B=Site("order", "the {words} should be sorted {want}"),
            C=Site("end", "{want} of the sorted {words} should be given"),
        ),
    ),
    "scores": (
        _function(
            "passed accept",
            "Lii",
            """
def {f}({items}, {limit}, {amount}):
    {out} = []
    for {item} in {items}:
        if {item} {A} {limit}:
            {out}.append({item} {B} {amount})
    return sorted({out}, reverse={C})
""",
            A=_compare("{items} {want} {limit} should pass"),
            B=_arithmetic("each of {items}", "{amount}"),
            C=Site("order", "the {items} should be sorted {want}"),
        ),
        _function(
            "final rank",
            "Li",
            """
def {f}({items}, {amount}):
    {out} = sorted({items}, reverse={A})
    {total} = {out}[{B}]
    return {total} {C} {amount}
""",
            A=Site("order", "the {items} should be sorted {want}"),
            B=Site("end", "{want} of the sorted {items} should be used"),
            C=_arithmetic("{total}", "{amount}"),
        ),
        _function(
            "spread gap",
            "Li",
            """
def {f}({items}, {step}):
    {left} = {A}({items})
    {right} = {left} {B} {step}
    return {right}
""",
            A=Site("extreme", "{left} should be {want} of the {items}"),
            B=_arithmetic("{left}", "{step}"),
        ),
    ),
    "clock": (
        _function(
            "late delay",
            "iii",
            """
def {f}({left}, {right}, {limit}):
    {count} = {right} {A} {left}
    if {count} {B} {limit}:
        return {C}
    return {count}
""",
            A=_arithmetic("{right}", "{left}"),
            B=_compare("{count} {want} {limit} should be replaced"),
            C=Site("number", "the replaced {count} should become {want}", ("0", "1", "5", "9")),
        ),
        _function(
            "shift turn",
            "Lii",
            """
def {f}({items}, {step}, {limit}):
    {out} = []
    for {item} in {items}:
        {item} = {item} {A} {step}
        if {item} {B} {limit}:
            {out}.append({item})
    return {out}
""",
            A=_arithmetic("each of {items}", "{step}"),
            B=_compare("moved {items} {want} {limit} should stay"),
        ),
        _function(
            "overlap shared",
            "iii",
            """
def {f}({left}, {right}, {step}):
    {total} = {A}({left}, {right})
    {count} = {total} {B} {step}
    return {count}
""",
            A=Site("extreme", "{total} should be {want} of {left} and {right}"),
            B=_arithmetic("{total}", "{step}"),
        ),
    ),
    "stock": (
        _function(
            "missing order",
            "Lii",
            """
def {f}({items}, {limit}, {step}):
    {total} = {A}
    for {item} in {items}:
        if {item} {B} {limit}:
            {total} = {total} {C} {step}
    return {total}
""",
            A=Site("number", "{total} should begin at {want}", ("0", "1", "2", "3")),
            B=_compare("{items} {want} {limit} should count"),
            C=_arithmetic("{total}", "{step}", ("+", "-")),
        ),
        _function(
            "take use",
            "iii",
            """
def {f}({left}, {amount}, {limit}):
    {total} = {left} {A} {amount}
    if {total} {B} {limit}:
        return {C}
    return {total}
""",
            A=_arithmetic("{left}", "{amount}"),
            B=_compare("{total} {want} {limit} should be replaced"),
            C=Site("number", "the replaced {total} should become {want}", ("0", "1", "5", "9")),
        ),
        _function(
            "low scarce",
            "Li",
            """
def {f}({items}, {limit}):
    {out} = [{item} for {item} in {items} if {item} {A} {limit}]
    {out} = sorted({out}, reverse={B})
    return {out}
""",
            A=_compare("{items} {want} {limit} should be listed"),
            B=Site("order", "the {items} should be sorted {want}"),
        ),
    ),
    "queue": (
        _function(
            "serve call",
            "Li",
            """
def {f}({items}, {step}):
    {out} = {items}[{A}:]
    {total} = {out}[{B}]
    return {total} {C} {step}
""",
            A=Site("number", "{want} of the {items} should be skipped", ("0", "1", "2")),
            B=Site("end", "{want} of the other {items} should be used"),
            C=_arithmetic("{total}", "{step}"),
        ),
        _function(
            "wait hold",
            "Li",
            """
def {f}({items}, {limit}):
    {count} = {A}
    for {item} in {items}:
        if {item} {B} {limit}:
            {count} = {count} + 1
    return {count}
""",
            A=Site("number", "{count} should begin at {want}", ("0", "1", "2", "3")),
            B=_compare("{items} {want} {limit} should be counted"),
        ),
        _function(
            "urgent alert",
            "iii",
            """
def {f}({left}, {right}, {limit}):
    low = {left} {A} {limit}
    high = {right} {B} {limit}
    return low {C} high
""",
            A=_compare("low should say that {left} is {want} {limit}"),
            B=_compare("high should say that {right} is {want} {limit}"),
            C=Site("logic", "{want} of low and high should be needed"),
        ),
    ),
    "grid": (
        _function(
            "inside fits",
            "iiii",
            """
def {f}({left}, {right}, {limit}, {amount}):
    low = {left} {A} {limit}
    high = {right} {B} {amount}
    return low {C} high
""",
            A=_compare("low should say that {left} is {want} {limit}"),
            B=_compare("high should say that {right} is {want} {amount}"),
            C=Site("logic", "{want} of low and high should be needed"),
        ),
        _function(
            "walk path",
            "Lii",
            """
def {f}({items}, {left}, {step}):
    {total} = {left}
    for {item} in {items}:
        {total} = {total} {A} {item}
    return {total} {B} {step}
""",
            A=_arithmetic("{total}", "each of {items}", ("+", "-")),
            B=_arithmetic("the sum", "{step}"),
        ),
        _function(
            "corner side",
            "Li",
            """
def {f}({items}, {amount}):
    {left} = {A}({items})
    {right} = {items}[{B}]
    {left} = {left} {C} {amount}
    return [{left}, {right}]
""",
            A=Site("extreme", "{left} should be {want} of the {items}"),
            B=Site("end", "{right} should be {want} of the {items}"),
            C=_arithmetic("{left}", "{amount}"),
        ),
    ),
    "bank": (
        _function(
            "pay withdraw",
            "iii",
            """
def {f}({left}, {amount}, {limit}):
    if {amount} {A} {limit}:
        return {left}
    return {left} {B} {amount}
""",
            A=_compare("{amount} {want} {limit} should be refused"),
            B=_arithmetic("{left}", "{amount}"),
        ),
        _function(
            "credit earn",
            "Lii",
            """
def {f}({items}, {limit}, {amount}):
    {out} = []
    for {item} in {items}:
        if {item} {A} {limit}:
            {item} = {item} {B} {amount}
        {out}.append({item})
    return {C}({out})
""",
            A=_compare("{items} {want} {limit} should be changed"),
            B=_arithmetic("each of {items}", "{amount}"),
            C=Site("extreme", "{want} of the {items} should be given"),
        ),
        _function(
            "account begin",
            "Li",
            """
def {f}({items}, {step}):
    {total} = {A}
    for {item} in {items}:
        {total} = {total} {B} {item}
    return {total} {C} {step}
""",
            A=Site("number", "{total} should begin at {want}", ("0", "1", "2", "3")),
            B=_arithmetic("{total}", "each of {items}", ("+", "-")),
            C=_arithmetic("the sum", "{step}"),
        ),
    ),
}

#: Families that no training split contains.
HELD_OUT_FAMILIES: Final = ("grid", "bank")
TRAIN_FAMILIES: Final = tuple(name for name in FAMILIES if name not in HELD_OUT_FAMILIES)
