"""Families of equations: linear, quadratic, system.

Invariant: the problem is made from its solution, and the draft's program solves the problem's numbers again.
"""

import math
import random
from fractions import Fraction

from .draft import Draft, nonzero, polynomial

__all__ = ["linear", "quadratic", "system"]

_ELIMINATION = """\
from fractions import Fraction
rows = [[Fraction(n) for n in row] for row in {rows}]
size = len(rows)
for i in range(size):
    pivot = next(k for k in range(i, size) if rows[k][i])
    rows[i], rows[pivot] = rows[pivot], rows[i]
    rows[i] = [n / rows[i][i] for n in rows[i]]
    for k in range(size):
        if k != i:
            rows[k] = [a - rows[k][i] * b for a, b in zip(rows[k], rows[i])]
print(*[row[-1] for row in rows], sep=", ")"""


def linear(rng: random.Random, level: int) -> Draft:
    """Solve for x: from x + 3 = 10 at level 0 to brackets and fractions on both sides at level 4."""
    if level == 0:
        x, b = rng.randint(0, 20), rng.randint(1, 20)
        if rng.random() < 0.5:
            return Draft(
                f"Solve for x: x + {b} = {x + b}", (Fraction(x),), f"print({x + b} - {b})", ("+", b, x)
            )
        return Draft(f"Solve for x: x - {b} = {x}", (Fraction(x + b),), f"print({x} + {b})", ("-", b, x))
    if level == 1:
        x, a, b = rng.randint(-12, 12), rng.randint(2, 9), nonzero(rng, 20)
        c = a * x + b
        program = f"print(({c} - ({b})) // {a})"
        return Draft(
            f"Solve for x: {polynomial((a, 'x'), (b, ''))} = {c}", (Fraction(x),), program, (a, b, c)
        )
    if level == 2:
        a, c = rng.sample([n for n in range(-9, 10) if n], 2)
        b, d = nonzero(rng, 30), nonzero(rng, 30)
        value = Fraction(d - b, a - c)
        problem = f"Solve for x: {polynomial((a, 'x'), (b, ''))} = {polynomial((c, 'x'), (d, ''))}"
        program = f"from fractions import Fraction\nprint(Fraction({d} - ({b}), {a} - ({c})))"
        return Draft(problem, (value,), program, (a, b, c, d))
    if level == 3:
        a, d = rng.sample([n for n in range(-9, 10) if abs(n) > 1], 2)
        b, c, e, f = (nonzero(rng, 20) for _ in range(4))
        value = Fraction(d * e + f - a * b - c, a - d)
        sides = [
            f"{outer}({polynomial((1, 'x'), (inner, ''))}) {'-' if rest < 0 else '+'} {abs(rest)}"
            for outer, inner, rest in ((a, b, c), (d, e, f))
        ]
        program = (
            "from fractions import Fraction\n"
            f"left = lambda x: {a} * (x + ({b})) + ({c})\nright = lambda x: {d} * (x + ({e})) + ({f})\n"
            "gap = lambda x: Fraction(left(x) - right(x))\nprint(gap(0) / (gap(0) - gap(1)))"
        )
        return Draft(f"Solve for x: {sides[0]} = {sides[1]}", (value,), program, (a, b, c, d, e, f))
    a, d = rng.sample(range(2, 13), 2)
    b, c, e = nonzero(rng, 20), nonzero(rng, 15), nonzero(rng, 20)
    value = (e - Fraction(b, a) - c) / (Fraction(1, a) - Fraction(1, d))
    inner = polynomial((1, "x"), (b, ""))
    problem = (
        f"Solve for x: ({inner})/{a} {'-' if c < 0 else '+'} {abs(c)} = {polynomial((1, f'x/{d}'), (e, ''))}"
    )
    program = (
        "from fractions import Fraction as F\n"
        f"gap = lambda x: F(x + ({b}), {a}) + ({c}) - F(x, {d}) - ({e})\nprint(gap(0) / (gap(0) - gap(1)))"
    )
    return Draft(problem, (value,), program, (a, b, c, d, e))


def quadratic(rng: random.Random, level: int) -> Draft:
    """Roots: the positive one of x^2 + 3 = 52 at level 0, both, and sums of their powers at levels 3 and 4."""
    if level == 0:
        x, c = rng.randint(1, 12), rng.randint(1, 20)
        problem = f"Which positive x solves x^2 + {c} = {x * x + c}?"
        program = f"print(next(x for x in range(1, 99) if x * x + {c} == {x * x + c}))"
        return Draft(problem, (Fraction(x),), program, (x, c))
    if level <= 2:
        one, two = rng.sample(range(-9, 10) if level == 1 else range(-20, 21), 2)
        under = 1 if level == 1 else rng.randint(2, 6)
        # (under x - one)(x - two)
        a, b, c = under, -one - under * two, one * two
        shared = math.gcd(a, b, c)
        a, b, c = a // shared, b // shared, c // shared
        roots = sorted({Fraction(one, under), Fraction(two)})
        ask = "Which two numbers x solve" if len(roots) == 2 else "Which number x solves"
        program = (
            f"from fractions import Fraction\nfrom math import isqrt\na, b, c = {a}, {b}, {c}\n"
            "d = isqrt(b * b - 4 * a * c)\n"
            'print(*sorted({Fraction(-b - d, 2 * a), Fraction(-b + d, 2 * a)}), sep=", ")'
        )
        problem = f"{ask} {polynomial((a, 'x^2'), (b, 'x'), (c, ''))} = 0?"
        return Draft(problem, tuple(roots), program, (a, b, c), any_order=True)
    a, b, c = rng.randint(1, 6), nonzero(rng, 15), nonzero(rng, 15)
    total, product = Fraction(-b, a), Fraction(c, a)
    power, value = (2, total**2 - 2 * product) if level == 3 else (3, total**3 - 3 * total * product)
    name = "squares" if power == 2 else "cubes"
    problem = (
        f"What is the sum of the {name} of the two roots, real or complex, of "
        f"{polynomial((a, 'x^2'), (b, 'x'), (c, ''))} = 0?"
    )
    # Newton: s_k = total s_(k-1) - product s_(k-2).
    program = (
        f"from fractions import Fraction as F\ntotal, product = F({-b}, {a}), F({c}, {a})\nold, new = F(2), total\n"
        f"for _ in range({power - 1}):\n    old, new = new, total * new - product * old\nprint(new)"
    )
    return Draft(problem, (value,), program, (a, b, c, power))


def system(rng: random.Random, level: int) -> Draft:
    """Linear systems: sum and difference at level 0, three unknowns with fractions as solution at level 4."""
    if level == 0:
        y, gap = rng.randint(0, 15), rng.randint(0, 15)
        x = y + gap
        problem = f"Solve x + y = {x + y} and x - y = {gap}. Answer x, y."
        program = f'print(({x + y} + {gap}) // 2, ({x + y} - {gap}) // 2, sep=", ")'
        return Draft(problem, (Fraction(x), Fraction(y)), program, (x, y))
    names = "xy" if level <= 2 else "xyz"
    most = {1: 5, 2: 12, 3: 5, 4: 9}[level]
    size = len(names)
    whole = level in (1, 3)
    while True:
        matrix = [[nonzero(rng, most) for _ in names] for _ in names]
        determinant = _determinant(matrix)
        if determinant == 0:
            continue
        under = 1 if whole else rng.choice([n for n in range(1, 10) if determinant % n == 0])
        solution = [Fraction(rng.randint(-12, 12), under) for _ in names]
        right = [sum(a * x for a, x in zip(row, solution, strict=True)) for row in matrix]
        if all(Fraction(value).denominator == 1 for value in right):
            break
    rows = [[*row, int(value)] for row, value in zip(matrix, right, strict=True)]
    told = [f"{polynomial(*zip(row[:size], names, strict=True))} = {row[size]}" for row in rows]
    problem = f"Solve {', '.join(told[:-1])} and {told[-1]}. Answer {', '.join(names)}."
    program = _ELIMINATION.format(rows=rows)
    return Draft(problem, tuple(solution), program, tuple(sorted(map(tuple, rows))))


def _determinant(matrix: list[list[int]]) -> int:
    if len(matrix) == 1:
        return matrix[0][0]
    return sum(
        (-1) ** column * entry * _determinant([row[:column] + row[column + 1 :] for row in matrix[1:]])
        for column, entry in enumerate(matrix[0])
    )
