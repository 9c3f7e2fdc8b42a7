"""The load that measured costs make: how busy loops are with so many environments, and how many they can serve.

A turn that costs c seconds of CPU time and comes every T seconds of an environment makes n environments a load of
n c / T. A loop with a load near 1 answers late, and one above 1 never catches up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from agentenv.simulation.figure import Cell, Table
from agentenv.simulation.scale_runs import ENVS_PER_ENGINE

TURN_S = (10.0, 30.0, 120.0)
"""Short replies and quick tools; a few hundred tokens and a command in a sandbox; long reasoning or builds."""
SHARDS = (4, 16, 64)
BUSY = 0.8
CONTROLLER = "controller of "
"""Begins the names of loads that are the controller's alone."""
_MOST_ENVS = 100_000_000
_CURVE = [round(1000 * 10 ** (place / 4)) for place in range(13)]
"""Environments of the curves: 1,000 to 1,000,000."""


@dataclass(frozen=True)
class Costs:
    """CPU time of a turn in µs, by environments, without what the simulation's models take."""

    one: Mapping[int, float]
    """In a loop that plays slots."""
    turns: Mapping[int, float]
    """In the controller's, where shards ask it for turns."""
    episodes: Mapping[int, float]
    """In the controller's, where shards deliver episodes; an episode's cost over its turns."""
    client_us: float
    """Of asking a server for a turn."""
    look_us: float
    """Of asking a server whether it lives, once a second."""
    models_us: float
    """What was taken off."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def load(self, kind: str, num_envs: float, turn_s: float) -> float:
        """How busy the controller's loop is.

        Args:
            kind: ``one`` (turns cost what slots cost), ``one_http`` (and the server's client, and looking at servers),
                ``turns`` (and looking at servers), or ``episodes``.
            num_envs: environments.
            turn_s: from one turn of an environment to the next.
        """
        of_turn_us = cost_at(getattr(self, kind.removesuffix("_http")), num_envs)
        per_s = num_envs / turn_s
        looks = num_envs / ENVS_PER_ENGINE * self.look_us if kind in ("one_http", "turns") else 0.0
        client_us = self.client_us if kind == "one_http" else 0.0
        return (per_s * (of_turn_us + client_us) + looks) / 1e6

    def shard_load(self, shards: int, num_envs: float, turn_s: float) -> float:
        """How busy each shard's loop is, which plays slots and sends their prompts to servers."""
        own = num_envs / shards
        return own / turn_s * (cost_at(self.one, own) + self.client_us) / 1e6

    def ways(self) -> dict[str, Callable[[float, float], float]]:
        """(environments, turn_s) -> load of the busiest loop, by how the work is shared."""
        found: dict[str, Callable[[float, float], float]] = {
            "one loop, engines in the process": partial(self.load, "one"),
            "one loop, servers": partial(self.load, "one_http"),
        }
        for shards in SHARDS:
            found[f"{shards} shards that ask for turns"] = partial(self._busiest, "turns", shards)
        found[f"{SHARDS[-1]} shards that deliver episodes"] = partial(self._busiest, "episodes", SHARDS[-1])
        found[f"{CONTROLLER}shards that ask for turns"] = partial(self.load, "turns")
        found[f"{CONTROLLER}shards that deliver episodes"] = partial(self.load, "episodes")
        return found

    def _busiest(self, kind: str, shards: int, num_envs: float, turn_s: float) -> float:
        return max(self.load(kind, num_envs, turn_s), self.shard_load(shards, num_envs, turn_s))

    def loads(self, turn_s: float) -> dict[str, list[tuple[int, float]]]:
        """The curves: (environments, load of the busiest loop), by how the work is shared."""
        return {name: [(n, load(n, turn_s)) for n in _CURVE] for name, load in self.ways().items()}


def cost_at(costs: Mapping[int, float], num_envs: float) -> float:
    """A cost between two measured ones, linear in the logarithm of the environments; beyond them the nearest."""
    sizes = sorted(costs)
    if num_envs <= sizes[0]:
        return costs[sizes[0]]
    for small, large in itertools.pairwise(sizes):
        if num_envs <= large:
            share = math.log(num_envs / small) / math.log(large / small)
            return costs[small] + share * (costs[large] - costs[small])
    return costs[sizes[-1]]


def most_environments(load: Callable[[float], float], busy: float = BUSY) -> int:
    """How many environments make a load of ``busy``, by bisection; the load must grow with them."""
    low, high = 1.0, float(_MOST_ENVS)
    if load(high) <= busy:
        return _MOST_ENVS
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if load(middle) <= busy else (low, middle)
    return int(low)


def load_table(costs: Costs, turn_s: float) -> Table:
    """Load of the busiest loop, for each way and some numbers of environments: 100 % is all of its time."""
    sizes = _CURVE[::4]
    rows: list[tuple[Cell, ...]] = [
        (name, *(f"{load(num_envs, turn_s):.1%}" for num_envs in sizes))
        for name, load in costs.ways().items()
    ]
    return Table(("busiest loop", *(f"{num_envs:,} environments" for num_envs in sizes)), rows)


def saturation_table(costs: Costs) -> Table:
    """Environments at which the busiest loop is 80 % busy, for each way and latency; to two digits."""
    rows: list[tuple[Cell, ...]] = []
    for name, load in costs.ways().items():
        most = [most_environments(partial(_of_latency, load, turn_s)) for turn_s in TURN_S]
        rows.append((name, *map(_two_digits, most)))
    return Table(("busiest loop", *(f"{turn_s:g} s a turn" for turn_s in TURN_S)), rows)


def _of_latency(load: Callable[[float, float], float], turn_s: float, num_envs: float) -> float:
    return load(num_envs, turn_s)


def _two_digits(number: int) -> float:
    return float(round(number, 1 - int(math.log10(number))))
