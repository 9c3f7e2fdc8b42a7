"""How many episodes does a core play in the shop, and what do 1,000 environments weigh? Beside the usual build.

    python benchmarks/environments_shop.py --json shop.json --check

`ShopSimulator-SingleTurn-v0` on the synthetic shop of 20,040 products, with its oracle (search, product, options,
purchase; 4.6 actions in the mean) and with its random policy (about 17). Figures are episodes per second of processor
time, so that other work on the machine changes little; the time by the clock is printed too. A first pass, in which
tables of the kinds of goods are made, is told by itself.

- the usual build: every environment has a catalogue and an index of its own, and a search is BM25 as rank_bm25 computes
  it: one dictionary of counts per product, and a pass over all of them for every word of the query. It plays the same
  wishes.
- memory: a process of its own makes 1,000 environments, begins an episode in each and has a page of results open in
  each. The figure is the most that the process ever had in memory, index and Python included. Of the usual build
  `--upstream_envs` environments are made, and the growth by each of them is scaled up.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentenv.report.bars import Bar, conclude
from agentenv_envs.shop.catalogue import Catalogue, CatalogueSpec, load_catalogue
from agentenv_envs.shop.env import ShopSingleTurnEnv
from agentenv_envs.shop.policies import Oracle, Random
from agentenv_envs.shop.search import tokens
from agentenv_envs.shop.synth import kinds_of, make_products

EPISODES_PER_S = 300.0
MEMORY_MB = 300.0
TIMES_FASTER = 5.0
TIMES_LIGHTER = 5.0
PRODUCTS = 20_000
ENVS = 1_000


class PlainOkapi:
    """BM25 as rank_bm25 computes it, a pass over the products' counts per word; `top` is that of `SearchIndex`."""

    def __init__(self, texts: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        self.counts = [dict(Counter(tokens(text))) for text in texts]
        lengths = np.array([sum(count.values()) for count in self.counts], dtype=float)
        self.k1, self.norm = k1, k1 * (1 - b + b * lengths / lengths.mean())
        found = Counter(token for count in self.counts for token in count)
        self.idf = {
            token: math.log(1 + (len(texts) - number + 0.5) / (number + 0.5))
            for token, number in found.items()
        }

    def top(self, query: str, limit: int) -> list[int]:
        """Places of the best texts."""
        scores = np.zeros(len(self.counts))
        for token in set(tokens(query)):
            number = np.array([count.get(token, 0) for count in self.counts], dtype=float)
            scores += self.idf.get(token, 0.0) * number * (self.k1 + 1) / (number + self.norm)
        order = np.argsort(-scores, kind="stable")[:limit]
        return [int(place) for place in order if scores[place] > 0.0]


class UsualShop(ShopSingleTurnEnv):
    """The same environment with a catalogue and an index of its own."""

    def __init__(self, products: int) -> None:
        super().__init__(products=120)
        kinds = kinds_of("en", products)
        own = [product for kind in kinds for product in make_products(kind)]
        texts = [
            " ".join(
                (
                    product.title,
                    *product.category,
                    product.shop,
                    *(value for option in product.options for value in option.values),
                )
            )
            for product in own
        ]
        index: Any = PlainOkapi(texts)
        tasks = load_catalogue(CatalogueSpec(products=products)).tasks
        self._catalogue = Catalogue("own", own, index, tasks)


def play(env: ShopSingleTurnEnv, policy: Any, seeds: range) -> dict[str, float]:
    """Episodes one after another: per second of processor and of the clock, their actions, and the share solved."""
    steps = solved = 0
    clock, processor = time.perf_counter(), time.process_time()
    for seed in seeds:
        observation, info = env.reset(seed=seed)
        policy.begin(observation, info)
        ended = False
        while not ended:
            observation, _, terminated, truncated, info = env.step(policy.act(observation))
            steps += 1
            ended = terminated or truncated
        solved += info["success"]
    return {
        "episodes": len(seeds),
        "per_cpu_s": len(seeds) / (time.process_time() - processor),
        "per_clock_s": len(seeds) / (time.perf_counter() - clock),
        "actions": steps / len(seeds),
        "success": solved / len(seeds),
    }


def memory(products: int, envs: int, *, usual: bool) -> dict[str, float]:
    """Of this process, which should have done nothing else before; MB."""
    tasks = load_catalogue(CatalogueSpec(products=products)).tasks if usual else None
    before = _status_mb("VmRSS")
    made = [UsualShop(products) if usual else ShopSingleTurnEnv(products=products) for _ in range(envs)]
    for seed, env in enumerate(made):
        env.reset(seed=seed)
        env.step(f"search[{env.catalogue.products[seed].title}]")
    grown = _status_mb("VmRSS") - before
    del tasks
    return {
        "envs": envs,
        "peak_mb": _status_mb("VmHWM"),
        "now_mb": _status_mb("VmRSS"),
        "each_mb": grown / envs,
    }


def _status_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _memory_elsewhere(products: int, envs: int, *, usual: bool) -> dict[str, float]:
    """`memory` in a process of its own."""
    child = [sys.executable, __file__, "--child", json.dumps([products, envs, usual])]
    answer = subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(answer.stdout)
    return figures


def shop_figures(
    *,
    products: int = PRODUCTS,
    episodes: int = 2_000,
    envs: int = ENVS,
    upstream_episodes: int = 8,
    upstream_envs: int = 3,
) -> dict[str, Any]:
    """Measure everything.

    Args:
        products: wanted of the catalogue.
        episodes: of each policy; the oracle plays them twice, first with cold tables.
        envs: environments in the process whose memory is measured.
        upstream_episodes: of the usual build.
        upstream_envs: of the usual build, in the process whose memory is measured.
    """
    began = time.perf_counter()
    env = ShopSingleTurnEnv(products=products)
    figures: dict[str, Any] = {
        "products": len(env.catalogue.products),
        "load_s": time.perf_counter() - began,
        "oracle, first pass": play(env, Oracle(env, 0), range(episodes)),
        "oracle": play(env, Oracle(env, 0), range(episodes)),
        "random": play(env, Random(env, 0), range(episodes)),
    }
    usual = UsualShop(products)
    figures["oracle, usual build"] = play(usual, Oracle(usual, 0), range(upstream_episodes))
    figures["oracle, the same wishes"] = play(env, Oracle(env, 0), range(upstream_episodes))
    del usual
    figures["memory"] = _memory_elsewhere(products, envs, usual=False)
    figures["memory, usual build"] = _memory_elsewhere(products, upstream_envs, usual=True)
    return figures


def shop_bars(figures: dict[str, Any], *, smoke: bool = False) -> list[Bar]:
    """What must hold; at the size of `--smoke` nothing is compared with the usual build, which is not slow there."""
    envs = figures["memory"]["envs"]
    scaled = figures["memory, usual build"]["each_mb"] * envs
    products = figures["products"]
    alone = [
        Bar(
            f"shop, {products:,} products: episodes of the oracle per second and core",
            figures["oracle"]["per_cpu_s"],
            ">=",
            EPISODES_PER_S,
        ),
        Bar("shop: the same, of the random policy", figures["random"]["per_cpu_s"], ">=", EPISODES_PER_S),
        Bar(
            f"shop: memory of {envs:,} environments, in all",
            figures["memory"]["peak_mb"],
            "<=",
            MEMORY_MB,
            "MB",
        ),
        Bar("shop: strict success of the oracle", figures["oracle"]["success"], ">=", 0.98),
        Bar("shop: strict success of the random policy", figures["random"]["success"], "<=", 0.1),
    ]
    beside = [
        Bar(
            "shop: episodes per second over those of the usual build",
            figures["oracle"]["per_cpu_s"] / figures["oracle, usual build"]["per_cpu_s"],
            ">=",
            TIMES_FASTER,
            "x",
        ),
        Bar(
            "shop: memory of the usual build, scaled up, over ours",
            scaled / figures["memory"]["peak_mb"],
            ">=",
            TIMES_LIGHTER,
            "x",
        ),
    ]
    return alone if smoke else [*alone, *beside]


def print_figures(figures: dict[str, Any]) -> None:
    """A line for each."""
    print(f"catalogue: {figures['products']:,} products, loaded in {figures['load_s']:.1f} s")
    for name, row in figures.items():
        if isinstance(row, dict) and "per_cpu_s" in row:
            print(
                f"{name:<24} {row['per_cpu_s']:9,.1f} a CPU second  {row['per_clock_s']:9,.1f} a second  "
                f"{row['actions']:5.1f} actions  success {row['success']:.3f}  of {row['episodes']:,}"
            )
        elif isinstance(row, dict):
            print(
                f"{name:<24} {row['envs']:5,} environments  peak {row['peak_mb']:7,.1f} MB  "
                f"each {row['each_mb']:7.3f} MB"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--products", type=int, default=PRODUCTS, help="of the catalogue, 120 to 20160")
    parser.add_argument("--episodes", type=int, default=2_000, help="of each policy, at least 1")
    parser.add_argument("--envs", type=int, default=ENVS, help="whose memory is measured, at least 1")
    parser.add_argument("--upstream_episodes", type=int, default=8, help="of the usual build, at least 1")
    parser.add_argument("--upstream_envs", type=int, default=3, help="of the usual build, at least 1")
    parser.add_argument("--smoke", action="store_true", help="a small size: whether it runs at all")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child is not None:
        products, envs, usual = args.child
        print(json.dumps(memory(products, envs, usual=usual)))
        return 0
    if args.smoke:
        args.products, args.episodes, args.envs, args.upstream_episodes, args.upstream_envs = (
            600,
            40,
            20,
            2,
            1,
        )
    sizes = {
        name: getattr(args, name)
        for name in ("products", "episodes", "envs", "upstream_episodes", "upstream_envs")
    }
    for name, value in sizes.items():
        if value < 1:
            parser.error(f"--{name} is {value}, must be at least 1")
    if not 120 <= args.products <= 20_160:
        parser.error(f"--products is {args.products}, must be from 120 to 20160")
    load = os.getloadavg()[0]
    figures = shop_figures(**sizes)
    assumed = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load before": round(load, 2),
        **sizes,
    }
    print_figures(figures)
    bars = shop_bars(figures, smoke=args.smoke)
    return conclude(bars, assumed=assumed, figures=figures, json_file=args.json, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
