"""The synthetic shop: words, goods, wishes and splits."""

from __future__ import annotations

import itertools

import pytest

from agentenv.errors import UsageError
from agentenv_envs.shop.catalogue import CatalogueSpec, load_catalogue
from agentenv_envs.shop.records import Product, Task, price_of
from agentenv_envs.shop.reward import matches, score
from agentenv_envs.shop.synth import VARIANTS, kinds_of, make_products
from agentenv_envs.shop.words import LANGUAGES, colours, domains


def best_marks(task: Task, product: Product) -> list[float]:
    """Success of every way to buy a product."""
    choices = [[None, *option.values] for option in product.options]
    found = []
    for values in itertools.product(*choices):
        chosen = {
            option.axis: value
            for option, value in zip(product.options, values, strict=True)
            if value is not None
        }
        found.append(score(task, product, chosen.values(), price_of(product, chosen)).success)
    return found


@pytest.mark.parametrize("language", LANGUAGES)
def test_there_are_12_departments_of_14_kinds_and_no_value_passes_for_another(language: str) -> None:
    assert len(domains(language)) == 12
    goods = [good for domain in domains(language) for good in domain.goods]
    assert len(goods) == 168
    for domain in domains(language):
        attributes = [value for axis in domain.axes for value in axis.values]
        assert len(attributes) == len(set(attributes)) == 20
        options = [*domain.sized.values, *colours(language).values]
        for values in (attributes, options):
            for one, other in itertools.permutations(values, 2):
                assert not matches(one, other), f"{domain.name}: {one} passes for {other}"
        for one, other in itertools.permutations(attributes, 2):
            assert one not in other, f"{domain.name}: {one} is in {other}"


def test_a_kind_has_120_variants_that_differ_in_id_and_title() -> None:
    for kind in kinds_of("mixed", 480):
        products = make_products(kind)
        assert len(products) == VARIANTS == len({product.id for product in products})
        assert len({product.title for product in products}) == VARIANTS
        assert {product.category for product in products} == {kind.category}
        assert all(product.price == min(product.options[1].prices) for product in products)  # type: ignore[type-var]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("split", ["train", "heldout", "heldout_leaves"])
def test_exactly_one_product_can_be_bought_with_success(language: str, split: str) -> None:
    catalogue = load_catalogue(CatalogueSpec(language=language, products=1440))
    for seed in range(6):
        task = catalogue.tasks.draw(seed, split, persona=False)
        winners = [
            product.id
            for product in catalogue.products
            if product.category[0] == task.category[0] and max(best_marks(task, product)) == 1.0
        ]
        assert winners == [task.product_id]


def test_no_wish_is_in_two_splits_and_leaves_are_kept_apart() -> None:
    tasks = load_catalogue(CatalogueSpec(products=1440)).tasks
    drawn = {split: [tasks.draw(seed, split, persona=False) for seed in range(400)] for split in tasks.splits}
    ids = {split: {task.id for task in wishes} for split, wishes in drawn.items()}
    leaves = {split: {task.category for task in wishes} for split, wishes in drawn.items()}
    assert not ids["train"] & ids["heldout"]
    assert leaves["train"] & leaves["heldout"]
    assert not leaves["heldout_leaves"] & (leaves["train"] | leaves["heldout"])
    assert all(len(wishes) > 350 for wishes in ids.values())


def test_a_wish_does_not_depend_on_the_catalogue_that_it_is_drawn_with() -> None:
    small = load_catalogue(CatalogueSpec(products=240))
    seen = {product.id: product for product in load_catalogue(CatalogueSpec(products=1440)).products}
    assert all(seen[product.id] == product for product in small.products)


def test_a_wish_says_its_needs_and_a_persona_only_the_attributes() -> None:
    for language in LANGUAGES:
        tasks = load_catalogue(CatalogueSpec(language=language, products=360)).tasks
        for seed in range(30):
            task = tasks.draw(seed, "train", persona=True)
            for need in (*task.attributes, *task.options):
                assert need.value in task.instruction
            assert f"{task.price_cap:g}" in task.instruction and task.category[1] in task.request
            assert all(need.value in task.persona for need in task.attributes)
            assert not any(need.value in task.request for need in (*task.attributes, *task.options))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"language": "fr"}, "language must be one of en, zh, mixed, got 'fr'"),
        ({"products": 0}, "products must be a whole number from 1 to 20160 with language='en', got 0"),
        ({"products": 20_161}, "products must be a whole number from 1 to 20160"),
        ({"products": True}, "products must be a whole number"),
        ({"language": "mixed", "products": 40_321}, "from 1 to 40320 with language='mixed'"),
    ],
)
def test_what_no_catalogue_can_be_made_of_is_refused(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_catalogue(CatalogueSpec(**kwargs))  # type: ignore[arg-type]
