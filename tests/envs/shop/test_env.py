"""The three environments: pages and actions, ends, splits, pickling, and the gymnasium contract."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

import agentenv
from agentenv.baselines import make_baseline
from agentenv.errors import UsageError
from agentenv.testing import check_env
from agentenv_envs.shop.catalogue import CatalogueSpec, _index, load_catalogue
from agentenv_envs.shop.env import ShopEnv, ShopMultiTurnEnv, ShopSingleTurnEnv
from agentenv_envs.shop.policies import Oracle, Random
from agentenv_envs.shop.search import SearchIndex

NAMES = ("ShopSimulator-SingleTurn-v0", "ShopSimulator-MultiTurn-v0", "ShopSimulator-Persona-v0")
Play = Callable[..., dict[str, Any]]


def actions_of(env: ShopEnv, seed: int) -> list[str]:
    """What the oracle does."""
    oracle, actions, ended = Oracle(env, 0), [], False
    env.reset(seed=seed)
    while not ended:
        actions.append(oracle.act(""))
        _, _, terminated, truncated, _ = env.step(actions[-1])
        ended = terminated or truncated
    return actions


@pytest.mark.parametrize("name", NAMES)
def test_each_keeps_the_contract(name: str) -> None:
    env = agentenv.make(name, products=360)
    assert isinstance(env, ShopEnv)
    check_env(env, actions=actions_of(env, 3), seed=3)


@pytest.mark.parametrize("name", NAMES)
def test_gymnasium_makes_each_and_its_own_checker_passes(name: str) -> None:
    env = gymnasium.make(f"agentenv/{name}", products=360)
    gymnasium_check_env(env.unwrapped, skip_render_check=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_succeeds_on_500_wishes_and_chance_does_not(name: str, play: Play) -> None:
    env = agentenv.make(name, split="heldout", language="mixed")
    oracle, chance = make_baseline(env, "oracle", 0), make_baseline(env, "random", 0)
    won = [play(env, seed=seed, policy=oracle) for seed in range(500)]
    assert sum(info["reward"] == 1.0 and info["success"] for info in won) >= 490
    assert sum(play(env, seed=seed, policy=chance)["success"] for seed in range(200)) < 20


def test_the_random_policy_only_does_what_the_page_offers(env: ShopEnv) -> None:
    chance = Random(env, 7)
    for seed in range(30):
        chance.begin(*env.reset(seed=seed))
        ended = False
        while not ended:
            _, _, terminated, truncated, info = env.step(chance.act(""))
            ended = terminated or truncated
            assert info["action_valid"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_look_at_the_attributes_pays_over_the_first_good_match(
    name: str, language: str, play: Play
) -> None:
    env = agentenv.make(name, split="heldout", language=language)
    scripted = make_baseline(env, "scripted", 0)
    ends = [play(env, seed=seed, policy=scripted) for seed in range(150)]
    assert 30 <= sum(info["success"] for info in ends) <= 75
    assert not any(info["metrics"]["invalid_actions"] or info["truncated"] for info in ends)
    careful = make_baseline(env, "careful", 0)
    looked = [play(env, seed=seed, policy=careful) for seed in range(60)]
    assert sum(info["success"] for info in looked) > 6 + sum(info["success"] for info in ends[:60])
    assert not any(info["metrics"]["invalid_actions"] or info["truncated"] for info in looked)
    if name == "ShopSimulator-MultiTurn-v0":
        assert all(4 <= info["metrics"]["questions"] <= 12 for info in ends)


@pytest.mark.parametrize(
    "spelling",
    [
        "search[{0}]",
        "SEARCH [ {0} ]",
        "Thought: look for it.\nAction:  Search[\n{0}\t]",
        "search['{0}']",
        "ｓearch［{0}］",
    ],
)
def test_case_spacing_and_text_around_do_not_matter(env: ShopEnv, spelling: str) -> None:
    env.reset(seed=1)
    title = env.catalogue.products[0].title
    wanted = env.step(f"search[{title}]")[0]
    env.reset(seed=1)
    observation, _, _, _, info = env.step(spelling.format(title))
    assert info["action_valid"] and observation == wanted
    for click in ("CLICK[ {0} ]", "click[{0}]", "click [{0}]"):
        env.reset(seed=1)
        env.step(f"search[{title}]")
        opened = env.step(click.format(env.catalogue.products[0].id.lower()))
        assert opened[4]["action_valid"] and opened[0].startswith(env.catalogue.products[0].id)


@pytest.mark.parametrize(
    ("action", "complaint"),
    [
        ("", "Not understood: write exactly one action, search[keywords] or click[button]."),
        ("just prose", "Not understood"),
        ("search[a] click[b]", "Not understood"),
        ("search[a", "Not understood"),
        ("search[]", "Not understood"),
        ("ask[what colour?]", "Not understood"),
        ("click[buy now]", "This page has no button 'buy now'."),
        ("click[next page]", "This page has no button"),
        ("click[EN0000000]", "This page has no button 'EN0000000'."),
        ("research[kettle]", "Not understood"),
        ("click[" + "x" * 1_000_000 + "]", "Not understood"),
        ("y" * 1_000_000, "Not understood"),
        ("[" * 1_000_000, "Not understood"),
        ("search[" * 150_000, "Not understood"),
    ],
)
def test_what_is_no_action_of_the_page_costs_a_turn_and_is_said(
    env: ShopEnv, action: str, complaint: str
) -> None:
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(action)
    assert observation.startswith(complaint) and "Write search[keywords]" in observation
    assert len(observation) < 300
    assert (reward, terminated, truncated, info["action_valid"]) == (0.0, False, False, False)
    assert info["invalid_actions"] == 1  # an episode that the rollout cuts off has no metrics


def test_results_come_in_pages_of_20_up_to_150() -> None:
    env = ShopSingleTurnEnv(products=360)
    env.reset(seed=0)
    leaf = env.catalogue.products[0].leaf
    text = env.step(f"search[{leaf} store]")[0]
    seen, pages = [], 1
    while "next page" in text:
        seen += [product.id for product in env.session.shown]
        text = env.step("click[next page]")[0]
        pages += 1
    seen += [product.id for product in env.session.shown]
    assert (len(seen), len(set(seen)), pages) == (150, 150, 8)
    assert text.startswith("Results 141-150 of 150")
    assert env.step("click[prev page]")[0].startswith("Results 121-140 of 150")


def test_a_search_without_results_says_so_and_can_be_repeated(env: ShopEnv) -> None:
    env.reset(seed=0)
    text = env.step("search[zzzz]")[0]
    assert text.startswith("No product has a word of 'zzzz'. Write search[other keywords].")
    assert env.step(f"search[{env.catalogue.products[0].title}]")[0].startswith("Results 1-20")


def test_sub_pages_lead_back_and_options_set_the_price(env: ShopEnv) -> None:
    env.reset(seed=0)
    product = env.catalogue.products[5]
    env.step(f"search[{product.title}]")
    env.step(f"click[{product.title}]")
    assert env.session.product == product
    assert ", ".join(product.attributes) in env.step("click[attributes]")[0]
    assert not env.step("click[buy now]")[4]["action_valid"]
    assert (
        " > ".join(product.category) in env.step("click[back to product]")[0] + env.step("click[details]")[0]
    )
    env.step("click[back to product]")
    sized = product.options[1]
    text = env.step(f"click[{sized.values[-1]}]")[0]
    assert f"Chosen: {sized.axis} {sized.values[-1]}" in text
    assert env.session.price() == sized.prices[-1]
    text = env.step(f"click[{sized.axis}: {sized.values[0]}]")[0]
    assert f"Chosen: {sized.axis} {sized.values[0]}" in text
    assert env.step("click[back to results]")[0].startswith("Results")
    assert not env.step(f"click[{sized.values[0]}]")[4]["action_valid"]
    assert not env.step("click[buy now]")[2]


def test_search_needs_a_page_with_a_search_bar(env: ShopEnv) -> None:
    env.reset(seed=0)
    product = env.catalogue.products[5]
    env.step(f"search[{product.title}]")
    env.step(f"click[{product.id}]")
    assert env.step("search[kettle]")[0].startswith(
        "This page has no search bar: click[back to search] first."
    )


@pytest.mark.parametrize(("name", "limit"), zip(NAMES, (30, 40, 30), strict=True))
def test_an_episode_without_purchase_is_truncated(name: str, limit: int) -> None:
    env = agentenv.make(name, products=360)
    assert env.unwrapped.max_turns == limit  # type: ignore[attr-defined]
    env.reset(seed=0)
    for _ in range(limit - 1):
        assert env.step("search[kettle]")[2:4] == (False, False)
    _, reward, terminated, truncated, info = env.step("no action")
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, True, False)
    assert info["metrics"]["turns"] == limit and info["metrics"]["invalid_actions"] == 1
    assert info["metrics"]["bought"] == 0.0 == info["metrics"]["strict"]
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step("search[kettle]")


@pytest.mark.parametrize("reward", ["strict", "loose", "success"])
def test_the_reward_is_the_one_that_was_chosen_and_metrics_have_all(reward: str) -> None:
    env = ShopSingleTurnEnv(products=360, reward=reward)
    env.reset(seed=0)
    target = env.catalogue.products[env.catalogue.places[env.task.product_id]]
    env.step(f"search[{target.title}]")
    env.step(f"click[{target.id}]")
    _, got, terminated, _, info = env.step("click[Buy Now]")
    metrics = info["metrics"]
    assert terminated and info["bought"] == target.id
    # Right product, no option chosen.
    assert metrics["strict"] == 0.0 < metrics["loose"] < 1.0 and metrics["attribute_share"] == 1.0
    assert got == metrics[reward]


def test_environments_of_a_process_share_one_catalogue_and_pickle_without_it() -> None:
    envs = [ShopSingleTurnEnv(products=240) for _ in range(50)]
    assert len({id(env.catalogue) for env in envs}) == 1
    env = envs[0]
    env.reset(seed=4)
    env.step(f"search[{env.catalogue.products[3].title}]")
    frozen = pickle.dumps(env)
    assert len(frozen) < 20_000
    thawed = pickle.loads(frozen)
    assert thawed.catalogue is env.catalogue and thawed.session._catalogue is env.catalogue
    actions = [
        f"click[{env.catalogue.products[3].id}]",
        "click[attributes]",
        "click[back to product]",
        "click[buy now]",
    ]
    assert [env.step(action)[:4] for action in actions] == [thawed.step(action)[:4] for action in actions]


def test_the_two_catalogues_used_last_stay_and_others_are_let_go() -> None:
    def load(kinds: int) -> weakref.ref[Any]:
        return weakref.ref(load_catalogue(CatalogueSpec(language="mixed", products=kinds * 120)))

    first, second = load(1), load(2)
    load(1)  # used again: the second is now the older one
    load(3)
    gc.collect()
    assert first() is not None and second() is None


def test_threads_that_ask_at_once_get_the_same_catalogue() -> None:
    found: list[int] = []
    held: list[Any] = []

    def load() -> None:
        held.append(load_catalogue(CatalogueSpec(language="zh", products=600)))
        found.append(id(held[-1]))

    threads = [threading.Thread(target=load) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(set(found)) == 1


def test_a_saved_index_serves_the_same_pages(tmp_path: Any) -> None:
    one = ShopSingleTurnEnv(products=240, cache_dir=str(tmp_path / "cache"))
    folders = list((tmp_path / "cache").iterdir())
    assert [folder.name for folder in folders] == [one.catalogue.key]
    other = CatalogueSpec(products=600, cache_dir=str(tmp_path / "cache"))
    made = load_catalogue(other)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    (tmp_path / "cache" / made.key / "agentenv.json").write_text("{")
    found = _index(other, made.key, made.products)  # damaged: it is made anew
    assert found.top("kettle", 9) == made.index.top("kettle", 9)
    assert SearchIndex.load(tmp_path / "cache" / made.key, made.key) is not None
    assert len(list((tmp_path / "cache").iterdir())) == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cache_dir="):
        ShopSingleTurnEnv(products=720, cache_dir=str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "test"}, "split must be one of train, heldout, heldout_leaves, got 'test'"),
        ({"split": "heldout_leaves", "products": 120}, "raise products"),
        ({"reward": "soft"}, "reward must be one of strict, loose, success, got 'soft'"),
        ({"compat": "old"}, "compat must be one of fixed, upstream, got 'old'"),
        ({"page_size": 51}, "page_size must be a whole number from 1 to 50, got 51"),
        *(
            ({name: value}, f"{name} must be the name of a file or folder, or None, got")
            for name in ("data", "cache_dir")
            for value in (5, "", "a\0", ["a"])
        ),
        ({"max_turns": 0}, "max_turns must be a whole number from 1 to 10000, got 0"),
        ({"persona": "yes"}, "persona must be true or false, got 'yes'"),
        (
            {"shopper": "someone"},
            "shopper must be 'scripted', a function of messages or a URL, got 'someone'",
        ),
        ({"shopper": "ftp://host"}, "shopper must be a URL such as"),
    ],
)
def test_arguments_out_of_range_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ShopMultiTurnEnv(**{"products": 360, **kwargs})


def test_without_its_libraries_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(UsageError, match=r"bm25s is not installed; pip install 'agentenv-rl\[shop\]'"):
        ShopSingleTurnEnv(products=721)


def test_upstream_scores_by_chance_of_the_slot_and_gives_the_goal_away(play: Play) -> None:
    def rewards(compat: str, seed: int = 11) -> set[tuple[float, ...]]:
        found = set()
        for slot in range(12):
            env = ShopSingleTurnEnv(products=360, compat=compat, slot=slot, reward="loose")
            info = play(env, seed=seed)
            found.add((info["reward"], info["metrics"]["price_ok"]))
        return found

    # The oracle, twelve members of a group, same wish and same actions.
    assert rewards("fixed") == {(1.0, 1.0)}
    assert any(len(rewards("upstream", seed)) > 1 for seed in range(11, 21))
    env = ShopSingleTurnEnv(products=360, compat="upstream")
    first, info = env.reset(seed=1)
    assert info["goal"]["asin"] == env.task.product_id
    assert "goal" not in ShopSingleTurnEnv(products=360).reset(seed=1)[1]
    # The same seed, another cap: what the same slot draws next.
    firsts = {env.reset(seed=1)[0] for _ in range(8)} | {first}
    assert len(firsts) > 1


def test_upstream_gives_full_marks_for_the_kind_to_any_goods() -> None:
    marks = {}
    for compat in ("fixed", "upstream"):
        env = ShopSingleTurnEnv(products=360, compat=compat)
        env.reset(seed=2)
        other = next(p for p in env.catalogue.products if p.category != env.task.category)
        env.step(f"search[{other.title}]")
        env.step(f"click[{other.id}]")
        marks[compat] = env.step("click[buy now]")[4]["metrics"]["r_type"]
    assert marks == {"fixed": 0.5, "upstream": 1.0}
