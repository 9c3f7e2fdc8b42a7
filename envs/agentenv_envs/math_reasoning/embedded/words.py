"""The family of word problems.

Invariant: names and things are no part of a draft's key: another name does not make another problem.
"""

import random
from fractions import Fraction
from typing import Final

from .draft import Draft

__all__ = ["word"]

_NAMES: Final = ("Ada", "Ben", "Chen", "Dina", "Emil", "Fatou", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lea")
_THINGS: Final = ("apples", "books", "coins", "cards", "nuts", "pens", "shells", "stamps")


def word(rng: random.Random, level: int) -> Draft:
    """One step at level 0, one product or quotient, two steps, rates, and two unknowns at level 4."""
    name, other = rng.sample(_NAMES, 2)
    thing = rng.choice(_THINGS)
    kind = rng.randrange(2)
    if level == 0:
        a, b = rng.randint(1, 20), rng.randint(1, 20)
        if kind == 0:
            problem = f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?"
            return Draft(problem, (Fraction(a + b),), f"print({a} + {b})", ("more", a, b))
        problem = f"{name} has {a + b} {thing} and gives {other} {b}. How many {thing} does {name} have left?"
        return Draft(problem, (Fraction(a),), f"print({a + b} - {b})", ("less", a, b))
    if level == 1:
        a, b = rng.randint(2, 15), rng.randint(2, 15)
        if kind == 0:
            problem = f"{name} has {a} boxes with {b} {thing} in each. How many {thing} is that?"
            return Draft(problem, (Fraction(a * b),), f"print({a} * {b})", ("boxes", a, b))
        problem = f"{name} shares {a * b} {thing} evenly among {a} friends. How many does each of them get?"
        return Draft(problem, (Fraction(b),), f"print({a * b} // {a})", ("share", a, b))
    if level == 2:
        a, b, c = rng.randint(2, 12), rng.randint(2, 25), rng.randint(1, 60)
        if kind == 0:
            problem = (
                f"{name} buys {a} {thing} for {b} cents each and pays with {a * b + c} cents. "
                f"How many cents does {name} get back?"
            )
            return Draft(problem, (Fraction(c),), f"print({a * b + c} - {a} * {b})", ("change", a, b, c))
        problem = (
            f"{name} reads {b} pages a day for {a} days and then {c} more. The book has {a * b + c + 10 * a} pages. "
            "How many are left?"
        )
        program = f"print({a * b + c + 10 * a} - {a} * {b} - {c})"
        return Draft(problem, (Fraction(10 * a),), program, ("pages", a, b, c))
    if level == 3:
        a, b = rng.sample(range(2, 31), 2)
        if kind == 0:
            problem = (
                f"One pipe fills a tank in {a} hours, another one in {b} hours. "
                "How many hours do both together take?"
            )
            program = f"from fractions import Fraction\nprint(1 / (Fraction(1, {a}) + Fraction(1, {b})))"
            return Draft(problem, (Fraction(a * b, a + b),), program, ("pipes", *sorted((a, b))))
        far = rng.randint(20, 400)
        problem = (
            f"{name} and {other} are {far} km apart and set out towards each other, {name} at {a} km/h and {other} "
            f"at {b} km/h. After how many hours do they meet?"
        )
        program = f"from fractions import Fraction\nprint(Fraction({far}, {a} + {b}))"
        return Draft(problem, (Fraction(far, a + b),), program, ("meet", far, *sorted((a, b))))
    small, large = rng.choice([(1, 5), (2, 5), (5, 20), (10, 50), (20, 50), (3, 7), (4, 9)])
    few, many = rng.randint(3, 60), rng.randint(3, 60)
    count, total = few + many, few * large + many * small
    if kind == 0:
        problem = (
            f"{name} has {count} coins, some of {small} and the others of {large} cents, {total} cents in all. "
            f"How many coins are of {large} cents?"
        )
        program = (
            f"print(next(n for n in range({count + 1}) if n * {large} + ({count} - n) * {small} == {total}))"
        )
        return Draft(problem, (Fraction(few),), program, ("coins", small, large, count, total))
    years, times = rng.randint(2, 15), rng.randint(2, 5)
    child = rng.randint(2, 20)
    # In `years` years the parent is `times` times as old as the child is then.
    parent = times * (child + years) - years
    problem = (
        f"{name} is {parent - child} years older than {other}. In {years} years {name} will be {times} times as old as "
        f"{other} is then. How old is {other} now?"
    )
    program = (
        f"print(next(n for n in range(200) if n + {parent - child} + {years} == {times} * (n + {years})))"
    )
    return Draft(problem, (Fraction(child),), program, ("ages", parent - child, years, times))
