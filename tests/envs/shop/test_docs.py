"""What the documents show of the shop is what it does."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import agentenv
from agentenv_envs.shop.env import ShopEnv
from agentenv_envs.shop.policies import Oracle

BEGIN, END = "<!-- transcript: compared by tests/envs/shop/test_docs.py -->", "<!-- transcript end -->"


def shown(said: list[tuple[str, str]]) -> str:
    """Turns as the pages show them."""
    lines = []
    for who, text in said:
        for number, line in enumerate(text.split("\n")):
            head = f"{who if number == 0 else '':<9}"
            lines.append(
                textwrap.fill(
                    line, 118, initial_indent=head, subsequent_indent=" " * 11, break_on_hyphens=False
                )
            )
    return "```text\n" + "\n".join(lines) + "\n```"


def single_turn() -> str:
    """Held-out wish 0 as the oracle plays it, but with a look at the attributes."""
    env = agentenv.make("ShopSimulator-SingleTurn-v0", split="heldout", page_size=4)
    assert isinstance(env, ShopEnv)
    text, _ = env.reset(seed=0)
    oracle, said = Oracle(env, 0), [("shop", text)]
    action, looked, ended, reward = "", False, False, 0.0
    while not ended:
        action = oracle.act(text)
        if env.session.product is not None and not looked:
            action = "click[attributes]" if "buy now" in env.session.buttons() else "click[back to product]"
            looked = action == "click[back to product]"
        text, reward, terminated, truncated, _ = env.step(action)
        ended = terminated or truncated
        said += [("agent", action), ("shop", text)]
    return shown([*said, ("end", f"reward {reward:g}")])


def multi_turn() -> str:
    """The beginning of a dialogue."""
    env = agentenv.make("ShopSimulator-MultiTurn-v0", split="heldout")
    said = [("shop", env.reset(seed=0)[0])]
    for question in ("Which colour?", "What else matters to you?", "And the budget?"):
        action = f"ask[{question}]"
        said += [("agent", action), ("shop", env.step(action)[0])]
    return shown(said)


def persona() -> str:
    """A first observation, without the rules."""
    env = agentenv.make("ShopSimulator-Persona-v0", split="heldout", language="zh")
    return shown([("shop", env.reset(seed=0)[0].partition("\n")[2])])


def test_the_episode_in_the_readme_is_a_real_one(repository: Path) -> None:
    page = (repository / "envs/agentenv_envs/shop/README.md").read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == single_turn()


def test_the_pages_of_the_other_two_are_real_ones(repository: Path) -> None:
    page = (repository / "docs/environments-shop.md").read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == f"{multi_turn()}\n\n{persona()}"


def test_the_documents_name_all_arguments_and_metrics(repository: Path) -> None:
    page = (repository / "docs/environments-shop.md").read_text(encoding="utf-8")
    env = agentenv.make("ShopSimulator-SingleTurn-v0", products=120, max_turns=1)
    env.reset(seed=0)
    metrics = env.step("")[4]["metrics"]
    named = set(re.findall(r"`(\w+)`", page))
    assert not set(metrics) - named
    import inspect

    assert not set(inspect.signature(ShopEnv).parameters) - named
