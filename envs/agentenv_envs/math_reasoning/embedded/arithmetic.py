"""Families about numbers: arithmetic, fractions, modular, sequence.

Invariant: each answer is computed here and, by another way, by the draft's program.
"""

import math
import operator
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Final, NamedTuple

from .draft import Draft

__all__ = ["arithmetic", "fractions", "modular", "sequence"]

_OPERATORS: Final[dict[str, Callable[[Fraction, Fraction], Fraction]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


class _Expression(NamedTuple):
    """An expression in full brackets, its value, the same as Python, and in one order whatever that of its sums is."""

    text: str
    value: Fraction
    python: str
    key: str


def arithmetic(rng: random.Random, level: int) -> Draft:
    """What is (17 + 4) * 12? From sums within 40 at level 0 to six numbers of up to three digits at level 4."""
    if level <= 1:
        sign = rng.choice("+-" if level == 0 else "+-*")
        most = {"+": (20, 99), "-": (20, 99), "*": (0, 12)}[sign][level]
        a, b = sorted((rng.randint(0, most), rng.randint(0, most)))
        # The greater number first where something is taken away; where order does not matter it is no part of the key.
        first, second = (b, a) if sign == "-" or rng.random() < 0.5 else (a, b)
        value = _OPERATORS[sign](Fraction(first), Fraction(second))
        text = f"{first} {sign} {second}"
        return Draft(f"What is {text}?", (value,), f"print({text})", (sign, a, b))
    leaves, most = {2: (3, 30), 3: (4, 99), 4: (6, 999)}[level]

    def leaf() -> _Expression:
        number = rng.randint(2, most)
        return _Expression(str(number), Fraction(number), str(number), str(number))

    made = _tree(rng, leaves, "+-*", leaf)
    return Draft(f"What is {made.text}?", (made.value,), f"print({made.python})", (made.key,))


def fractions(rng: random.Random, level: int) -> Draft:
    """What is 1/6 + 3/4? From a common denominator at level 0 to five fractions at level 4."""
    if level == 0:
        under = rng.randint(3, 12)
        a, b = sorted((rng.randint(1, under - 1), rng.randint(1, under - 1)))
        value = Fraction(a + b, under)
        program = f"from fractions import Fraction\nprint(Fraction({a} + {b}, {under}))"
        return Draft(f"What is {a}/{under} + {b}/{under}?", (value,), program, (a, b, under))
    leaves, most, signs = {1: (2, 9, "+-"), 2: (2, 15, "*/"), 3: (3, 12, "+-*"), 4: (5, 20, "+-*/")}[level]

    def leaf() -> _Expression:
        under = rng.randint(2, most)
        over = rng.choice([n for n in range(1, 2 * under) if math.gcd(n, under) == 1])
        text = f"{over}/{under}"
        return _Expression(text, Fraction(over, under), f"F({over}, {under})", text)

    while True:
        made = _tree(rng, leaves, signs, leaf)
        if made.value.denominator < 10**8:
            break
    program = f"from fractions import Fraction as F\nprint({made.python})"
    return Draft(f"What is {made.text}?", (made.value,), program, (made.key,))


def modular(rng: random.Random, level: int) -> Draft:
    """Remainders: of a number at level 0, of powers, solutions of congruences, and of three of them at level 4."""
    if level == 0:
        a, n = rng.randint(10, 99), rng.randint(2, 12)
        problem = f"What is the remainder of {a} divided by {n}?"
        return Draft(problem, (Fraction(a - n * (a // n)),), f"print({a} % {n})", (a, n))
    if level in (1, 2):
        most, powers, moduli = ((12, (2, 4), (3, 12)), (99, (20, 999), (13, 97)))[level - 1]
        a, power, n = rng.randint(2, most), rng.randint(*powers), rng.randint(*moduli)
        value = 1
        for bit in bin(power)[2:]:
            value = value * value * (a if bit == "1" else 1) % n
        problem = f"What is the remainder of {a}^{power} divided by {n}?"
        return Draft(problem, (Fraction(value),), f"print(pow({a}, {power}, {n}))", (a, power, n))
    if level == 3:
        n = rng.randint(11, 99)
        a = rng.choice([number for number in range(2, n) if math.gcd(number, n) == 1])
        b = rng.randint(1, n - 1)
        value = pow(a, -1, n) * b % n
        problem = f"What is the least whole number x of at least 0 for which {a}x - {b} is divisible by {n}?"
        program = f"print(next(x for x in range({n}) if ({a} * x - {b}) % {n} == 0))"
        return Draft(problem, (Fraction(value),), program, (a, b, n))
    three = rng.choice([(3, 5, 7), (5, 7, 9), (7, 8, 9), (4, 9, 11), (7, 11, 13), (8, 9, 13), (9, 10, 11)])
    rests = [rng.randrange(n) for n in three]
    product = math.prod(three)
    value = sum(
        rest * (product // n) * pow(product // n, -1, n) for rest, n in zip(rests, three, strict=True)
    )
    told = ", ".join(f"{rest} divided by {n}" for rest, n in zip(rests, three, strict=True))
    problem = f"What is the least whole number of at least 0 that leaves these remainders: {told}?"
    test = " and ".join(f"x % {n} == {rest}" for rest, n in zip(rests, three, strict=True))
    program = f"print(next(x for x in range({product}) if {test}))"
    return Draft(problem, (Fraction(value % product),), program, (*three, *rests))


def sequence(rng: random.Random, level: int) -> Draft:
    """Terms and sums of sequences: the next one at level 0, a recurrence of second order at level 4."""
    if level == 0:
        first, step = rng.randint(0, 30), rng.randint(1, 12)
        shown = [first + step * number for number in range(4)]
        problem = f"What comes next: {', '.join(map(str, shown))}?"
        return Draft(problem, (Fraction(first + 4 * step),), f"print({shown[3]} + {step})", (first, step))
    if level == 1:
        first, step, n = rng.randint(-20, 20), rng.choice([-1, 1]) * rng.randint(2, 15), rng.randint(8, 30)
        shown = [first + step * number for number in range(3)]
        problem = (
            f"The sequence {', '.join(map(str, shown))}, ... is arithmetic. What is its term number {n}?"
        )
        program = f"print({first} + ({n} - 1) * ({step}))"
        return Draft(problem, (Fraction(shown[2] + step * (n - 3)),), program, (first, step, n))
    if level == 2:
        first, step, n = rng.randint(-20, 50), rng.randint(2, 25), rng.randint(12, 90)
        shown = [first + step * number for number in range(3)]
        told = ", ".join(map(str, shown))
        problem = f"The sequence {told}, ... is arithmetic. What is the sum of its first {n} terms?"
        program = f"print(sum({first} + {step} * k for k in range({n})))"
        return Draft(problem, (Fraction(n * (2 * first + (n - 1) * step), 2),), program, (first, step, n))
    if level == 3:
        start, factor, plus, n = rng.randint(1, 9), rng.randint(2, 4), rng.randint(1, 20), rng.randint(6, 12)
        problem = (
            f"A sequence begins with {start}, and each further term is {factor} times the one before plus {plus}. "
            f"What is its term number {n}?"
        )
        program = f"x = {start}\nfor _ in range({n} - 1):\n    x = {factor} * x + {plus}\nprint(x)"
        grown = factor ** (n - 1)
        value = start * grown + plus * Fraction(grown - 1, factor - 1)
        return Draft(problem, (value,), program, (start, factor, plus, n))
    one, two = rng.randint(0, 9), rng.randint(1, 9)
    p, q = rng.randint(1, 4), rng.randint(1, 4)
    n, modulus = rng.randint(40, 400), rng.randint(50, 999)
    problem = (
        f"a_1 = {one}, a_2 = {two}, and a_n = {p} a_(n-1) + {q} a_(n-2) from n = 3 on. "
        f"What is the remainder of a_{n} divided by {modulus}?"
    )
    again = f"    a, b = b, ({p} * b + {q} * a) % {modulus}"
    program = f"a, b = {one}, {two}\nfor _ in range({n} - 1):\n{again}\nprint(a % {modulus})"
    # Powers of the recurrence's matrix, by squaring.
    power, base, left = (1, 0, 0, 1), (p, q, 1, 0), n - 2
    while left:
        power = _product(power, base) if left % 2 else power
        base, left = _product(base, base), left // 2
    return Draft(
        problem,
        (Fraction((power[0] * two + power[1] * one) % modulus),),
        program,
        (one, two, p, q, n, modulus),
    )


def _product(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Of two matrices, by rows."""
    return (
        a[0] * b[0] + a[1] * b[2],
        a[0] * b[1] + a[1] * b[3],
        a[2] * b[0] + a[3] * b[2],
        a[2] * b[1] + a[3] * b[3],
    )


def _tree(
    rng: random.Random, leaves: int, signs: str, leaf: Callable[[], _Expression], *, inner: bool = False
) -> _Expression:
    """A random expression with this many leaves; what is inside of another stands in brackets."""
    if leaves == 1:
        return leaf()
    left = rng.randint(1, leaves - 1)
    one = _tree(rng, left, signs, leaf, inner=True)
    two = _tree(rng, leaves - left, signs, leaf, inner=True)
    sign = rng.choice(signs)
    if sign == "/" and two.value == 0:
        sign = "+"
    a, b = one.text, two.text
    if sign in "*/":  # a fraction beside a sign of this kind is read in more than one way
        a, b = (f"({text})" if "/" in text and not text.startswith("(") else text for text in (a, b))
    text, python = f"{a} {sign} {b}", f"{one.python} {sign} {two.python}"
    if inner:
        text, python = f"({text})", f"({python})"
    first, second = sorted((one.key, two.key)) if sign in "+*" else (one.key, two.key)
    key = f"({first} {sign} {second})"
    return _Expression(text, _OPERATORS[sign](one.value, two.value), python, key)
