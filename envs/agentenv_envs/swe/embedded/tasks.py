"""Embedded tasks: a small module with a bug, an issue, a visible test script and hidden checks, from a seed.

Invariants:
- the same (seed, split, levels, families) gives the same task on every machine;
- splits are disjoint by content: a task's fingerprint decides whether it may be trained on, so no held-out
  task is a training task under another seed; held-out families are in no training split at all;
- every task is valid: the buggy module fails at least one visible and one hidden check and passes at least
  one hidden check, the gold module passes all of them;
- what the hidden checks expect never enters a sandbox: a probe reports results, the parent compares them.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentenv.errors import UsageError

from .families import FAMILIES, HELD_OUT_FAMILIES, NAMES, TRAIN_FAMILIES, WORDINGS, Function

#: train: to learn on. heldout: same families, other tasks. heldout_families: families never trained on.
SPLITS: Final = ("train", "heldout", "heldout_families")
LEVELS: Final = {
    1: "the failing call is named, with what it gives and what is wanted",
    2: "only the wanted behaviour is described",
    3: "two bugs, both described",
    4: "a function is gone and has to be written again",
}
#: Where the files of a task lie in its sandbox.
EMBEDDED_WORKDIR: Final = "/work"
MODULE: Final = "app.py"
TEST_SCRIPT: Final = "test.py"
TEST_COMMAND: Final = f"python {TEST_SCRIPT}"

_HELD_OUT_SHARE = 5  # one fingerprint in five is held out
_VISIBLE_CALLS, _HIDDEN_CALLS = 3, 8  # per function
_WORDS = ("a", "b", "ab", "ba", "abc", "cab", "bcd", "dab")


@dataclass(frozen=True)
class Edit:
    """Replace the first `old` in line `line` (from 1) of the module by `new`."""

    line: int
    old: str
    new: str

    def apply(self, source: str) -> str:
        lines = source.split("\n")
        lines[self.line - 1] = lines[self.line - 1].replace(self.old, self.new, 1)
        return "\n".join(lines)


@dataclass(frozen=True)
class EmbeddedTask:
    """One generated repair task.

    Args:
        task_id: family, level and fingerprint.
        issue: what the agent is told.
        files: what its sandbox holds at first: the buggy module and the visible test script.
        gold: the right module.
        gold_edits: the edits that turn the buggy module into the gold one; empty on level 4.
        candidate_edits: every single edit of a site of the buggy module, the right ones among them.
        hidden_calls: (function, arguments) of the hidden checks.
        expected: what the gold module answers to each, kept out of every sandbox.
    """

    task_id: str
    family: str
    level: int
    issue: str
    files: dict[str, str]
    gold: str
    gold_edits: tuple[Edit, ...]
    candidate_edits: tuple[Edit, ...]
    hidden_calls: tuple[tuple[str, list[Any]], ...] = field(repr=False)
    expected: tuple[Any, ...] = field(repr=False)


def generate_task(
    seed: int, *, split: str = "train", levels: Sequence[int] = (1, 2), families: Sequence[str] | None = None
) -> EmbeddedTask:
    """The task of a seed.

    Args:
        seed: any integer.
        split: one of SPLITS.
        levels: levels to draw from, keys of LEVELS.
        families: families to draw from; all of the split's by default.

    Raises:
        UsageError: unknown split, level or family, or a family that the split does not have.
    """
    allowed = _allowed_families(split, levels, families)
    rng = random.Random(f"agentenv-swe:{split}:{seed}")
    while True:  # about one draw in two is valid and of the split
        task = _draw(rng, rng.choice(allowed), rng.choice(list(levels)))
        if task is None:
            continue
        held_out = int(task.task_id.rsplit("-", 1)[1], 16) % _HELD_OUT_SHARE == 0
        if split == "heldout_families" or held_out == (split == "heldout"):
            return task


def run_calls(source: str, calls: Sequence[tuple[str, list[Any]]]) -> list[Any]:
    """Answers of a generated module in this process; never call it with text that an agent wrote.

    An exception is answered as {"error": its class name}, as the probe in the sandbox does.
    """
    namespace: dict[str, Any] = {}
    exec(compile(source, MODULE, "exec"), namespace)
    return [_answer(namespace.get(name), arguments) for name, arguments in calls]


def _answer(function: Any, arguments: list[Any]) -> Any:
    try:
        return function(*json.loads(json.dumps(arguments)))
    except Exception as error:
        return {"error": type(error).__name__}


def _allowed_families(split: str, levels: Sequence[int], families: Sequence[str] | None) -> list[str]:
    if split not in SPLITS:
        raise UsageError(f"split is {split!r}; allowed: {', '.join(SPLITS)}")
    if not levels or any(level not in LEVELS for level in levels):
        raise UsageError(f"levels is {list(levels)}; allowed: one or more of {list(LEVELS)}")
    of_split = HELD_OUT_FAMILIES if split == "heldout_families" else TRAIN_FAMILIES
    wrong = [name for name in families or () if name not in of_split]
    if wrong:
        raise UsageError(f"family {wrong[0]!r} is not in split {split!r}; allowed: {', '.join(of_split)}")
    return list(families or of_split)


@dataclass(frozen=True)
class _Placed:
    """A site in the module's text."""

    function: str
    line: int
    value: str
    others: tuple[str, ...]
    kind: str
    sentence: str  # with {want}, and {a}, {b} filled in


def _draw(rng: random.Random, family: str, level: int) -> EmbeddedTask | None:
    """One candidate; None where it is not valid."""
    roles = {role: rng.choice(pool) for role, pool in NAMES.items()}
    functions = rng.sample(FAMILIES[family], 2)
    bodies, sites, names, line = [], [], [], 1
    for function in functions:
        body, placed, name = _write(rng, function, roles, line)
        bodies.append(body)
        sites += placed
        names.append(name)
        line += body.count("\n") + 3
    gold = "\n\n\n".join(bodies) + "\n"
    visible, hidden = (
        [(n, _arguments(rng, f)) for f, n in zip(functions, names, strict=True) for _ in range(count)]
        for count in (_VISIBLE_CALLS, _HIDDEN_CALLS)
    )
    if level == 4:
        buggy, broken = _without_function(rng, bodies, names, sites)
        edits: tuple[Edit, ...] = ()
        current = {site: site.value for site in sites}
    else:
        broken = rng.sample(sites, 2 if level == 3 else 1)
        current = {site: rng.choice(site.others) if site in broken else site.value for site in sites}
        buggy = gold
        for site in broken:
            buggy = Edit(site.line, site.value, current[site]).apply(buggy)
        edits = tuple(Edit(site.line, current[site], site.value) for site in broken)
        repaired = buggy
        for edit in edits:
            repaired = edit.apply(repaired)
        if repaired != gold or buggy == gold:
            return None  # the value is not the first of its kind on the line
    expected, visible_wanted = run_calls(gold, hidden), run_calls(gold, visible)
    right = [got == want for got, want in zip(run_calls(buggy, hidden), expected, strict=True)]
    visible_got = run_calls(buggy, visible)
    failing = [i for i, got in enumerate(visible_got) if got != visible_wanted[i]]
    if not failing or all(right) or not any(right):
        return None
    first = failing[0]
    issue = _issue(rng, level, broken, visible[first], visible_got[first], visible_wanted[first])
    files = {MODULE: buggy, TEST_SCRIPT: _test_script(names, visible, visible_wanted)}
    fingerprint = hashlib.sha256(f"{issue}\n{buggy}".encode()).hexdigest()[:12]
    return EmbeddedTask(
        task_id=f"{family}-{level}-{fingerprint}",
        family=family,
        level=level,
        issue=issue,
        files=files,
        gold=gold,
        gold_edits=edits,
        candidate_edits=_candidates(buggy, sites, current),
        hidden_calls=tuple(hidden),
        expected=tuple(expected),
    )


def _write(
    rng: random.Random, function: Function, roles: dict[str, str], first_line: int
) -> tuple[str, list[_Placed], str]:
    """A function's text with a value drawn for each site."""
    name = rng.choice(function.names)
    values = {key: rng.choice(site.choices) for key, site in function.sites.items()}
    body = function.source.format(f=name, **roles, **values)
    placed = []
    for key, site in function.sites.items():
        offset = next(i for i, text in enumerate(function.source.split("\n")) if f"{{{key}}}" in text)
        wording = rng.choice(WORDINGS[site.kind][values[key]])
        wording = wording.format(a=site.a, b=site.b) if site.kind == "arithmetic" else wording
        sentence = site.sentence.replace("{want}", wording).format(**roles)
        others = tuple(value for value in site.choices if value != values[key])
        placed.append(_Placed(name, first_line + offset, values[key], others, site.kind, sentence))
    return body, placed, name


def _arguments(rng: random.Random, function: Function) -> list[Any]:
    """Arguments of a call; integers often equal an element, so that borders are met."""
    values: list[Any] = []
    for letter in function.arguments:
        numbers = [v for value in values for v in (value if isinstance(value, list) else [value])]
        if letter == "L":
            values.append([rng.randrange(10) for _ in range(3)])
        elif letter == "W":
            values.append(rng.sample(_WORDS, 3))
        elif letter == "c":
            values.append(rng.choice("abcd"))
        elif numbers and isinstance(numbers[0], int) and rng.random() < 0.5:
            values.append(rng.choice(numbers))
        else:
            values.append(rng.randrange(1, 5))
    return values


def _without_function(
    rng: random.Random, bodies: list[str], names: list[str], sites: list[_Placed]
) -> tuple[str, list[_Placed]]:
    gone = rng.randrange(len(bodies))
    signature = bodies[gone].split("\n")[0]
    left = [f"{signature}\n    raise NotImplementedError" if i == gone else b for i, b in enumerate(bodies)]
    return "\n\n\n".join(left) + "\n", [site for site in sites if site.function == names[gone]]


def _issue(
    rng: random.Random, level: int, broken: list[_Placed], call: tuple[str, list[Any]], got: Any, want: Any
) -> str:
    wanted = f"Wanted: {'; '.join(site.sentence for site in broken)}."
    if level == 1:
        return f"{show_call(call)} gives {show(got)}, not {show(want)}. {wanted}"
    if level == 4:
        return f"{broken[0].function} is gone; write it again. {wanted} {TEST_SCRIPT} has calls of it."
    return wanted


def show_call(call: tuple[str, list[Any]]) -> str:
    """A call as Python writes it."""
    return f"{call[0]}({', '.join(map(repr, call[1]))})"


def show(answer: Any) -> str:
    """An answer as the test script prints it: the value, or the exception's name."""
    return str(answer["error"]) if isinstance(answer, dict) else repr(answer)


def _test_script(names: list[str], calls: list[tuple[str, list[Any]]], wanted: list[Any]) -> str:
    rows = "".join(
        f"    ({show_call(call)!r}, {show(want)!r}),\n" for call, want in zip(calls, wanted, strict=True)
    )
    return f"""import sys

from app import {", ".join(names)}

CALLS = [
{rows}]

for call, wanted in CALLS:
    try:
        got = repr(eval(call))
    except Exception as error:
        got = type(error).__name__
    if got != wanted:
        sys.exit(f"FAIL {{call}} gives {{got}}, not {{wanted}}")
print("ok")
"""


def _candidates(buggy: str, sites: list[_Placed], current: dict[_Placed, str]) -> tuple[Edit, ...]:
    """Every edit of one site that changes just that site, in the order of the module."""
    lines = buggy.split("\n")
    edits = []
    for site in sites:
        now = current[site]
        for value in (*site.others, site.value):
            if value != now and site.line <= len(lines) and now in lines[site.line - 1]:
                edits.append(Edit(site.line, now, value))
    return tuple(edits)
