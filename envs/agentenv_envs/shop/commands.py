"""Commands of the console script: `agentenv shop check FILE` looks through an official file before it is trained on."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from .catalogue import CatalogueSpec, load_catalogue
from .official import read_catalogue
from .records import price_of
from .reward import score, wished_values

__all__ = ["add_commands", "check_file"]

_SHOWN = 5


def add_commands(subparsers: Any) -> None:
    """Add `shop` and its commands.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    shop = subparsers.add_parser("shop")
    commands = shop.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = commands.add_parser(
        "check",
        help="count a file's products and wishes, and the wishes that their own product does not meet",
        description="Reads ShopSimulator's file of products (.json, .json.gz, .jsonl, .jsonl.gz). A wish that the "
        "product it was made from does not meet can hardly be solved by anybody.",
    )
    check.add_argument("file", type=Path)
    check.add_argument(
        "--cache-dir", metavar="DIR", help="save the search index, for cache_dir=DIR of the environments"
    )
    check.add_argument("--json", action="store_true", help="a JSON object")
    check.set_defaults(run=_check)


def check_file(path: Path) -> dict[str, Any]:
    """Counts of an official file: products, wishes by tag and persona, and unmet wishes by what is not met.

    Raises:
        UsageError: the file is refused, see `read_catalogue`.
        MissingExtraError: rapidfuzz is not installed.
    """
    products, tasks = read_catalogue(path)
    by_id = {product.id: product for product in products}
    every = [task for wishes in tasks.values() for task in wishes]
    unmet: Counter[str] = Counter()
    first: list[str] = []
    for task in every:
        product = by_id[task.product_id]
        chosen = wished_values(task.options, product)
        marks = score(task, product, chosen.values(), price_of(product, chosen))
        if not marks.success:
            shares = {
                "attributes": marks.attribute_share,
                "options": marks.option_share,
                "price": marks.price_ok,
            }
            unmet.update(name for name, share in shares.items() if share < 1.0)
            first.append(product.id)
    return {
        "products": len(products),
        "wishes": {tag: len(wishes) for tag, wishes in tasks.items()},
        "with_persona": {tag: sum(bool(task.persona) for task in wishes) for tag, wishes in tasks.items()},
        "unmet": len(first),
        "unmet_by": dict(unmet),
        "unmet_first": first[:_SHOWN],
    }


def _check(args: argparse.Namespace) -> int:
    found = check_file(args.file)
    if args.cache_dir is not None:
        load_catalogue(CatalogueSpec(data=str(args.file), cache_dir=args.cache_dir))
    if args.json:
        print(json.dumps(found))
        return 0
    print(f"products       {found['products']:,}")
    for tag, count in found["wishes"].items():
        print(f"wishes, {tag:<6} {count:,}, of which {found['with_persona'][tag]:,} have a persona")
    reasons = ", ".join(f"{name} {count:,}" for name, count in found["unmet_by"].items())
    print(
        f"unmet          {found['unmet']:,} wishes by their own product"
        + (f" ({reasons})" if reasons else "")
    )
    if found["unmet_first"]:
        print(f"               such as {', '.join(found['unmet_first'])}")
    return 0
