"""The environments that ship: what `agentenv list` tells of each without importing it."""

import importlib.util
from typing import NamedTuple

__all__ = ["BUILT_IN", "BuiltIn"]


class BuiltIn(NamedTuple):
    """An environment that ships with agentenv."""

    entry_point: str
    """"module:Class"."""

    summary: str
    """One line."""

    docs: str
    """Page about it, in the repository."""

    extra: str | None = None
    """Extra of `agentenv-rl` that it needs, or can use."""

    modules: tuple[str, ...] = ()
    """What of that extra it imports."""

    without: str = ""
    """What there is where the extra is missing; empty: nothing."""

    @property
    def is_installed(self) -> bool:
        """Whether its extra is there."""
        return all(importlib.util.find_spec(module) is not None for module in self.modules)


_ALFWORLD = ("alfworld", "textworld", "yaml")
_SHOP = ("bm25s", "rapidfuzz")
_SHOP_PAGE, _TEXT_PAGE = "docs/environments-shop.md", "docs/environments-text.md"

BUILT_IN = {
    "ALFWorld-v0": BuiltIn(
        "agentenv_envs.alfworld:ALFWorldEnv",
        "household tasks in the engine of ALFWorld",
        "docs/environments-alfworld.md",
        "alfworld",
        _ALFWORLD,
    ),
    "Echo-v0": BuiltIn(
        "agentenv.testing:EchoEnv", "say the word that the task names; for tests", "docs/own-environment.md"
    ),
    "GuessNumber-v0": BuiltIn(
        "agentenv_envs.text:GuessNumberEnv", "find a number by guesses: higher or lower", _TEXT_PAGE
    ),
    "KeyDoor-v0": BuiltIn(
        "agentenv_envs.text:KeyDoorEnv", "fetch a key on a grid, then open the door", _TEXT_PAGE
    ),
    "Math-v0": BuiltIn(
        "agentenv_envs.math_reasoning:MathEnv",
        "mathematics, generated or of data sets, in one turn",
        "docs/environments-math.md",
        "math",
        ("math_verify",),
        "generated problems",
    ),
    "MathPython-v0": BuiltIn(
        "agentenv_envs.math_reasoning:MathPythonEnv",
        "mathematics with Python in a sandbox, over several turns",
        "docs/environments-math.md",
        "math",
        ("math_verify",),
        "generated problems",
    ),
    "OpenEnvClient-v0": BuiltIn(
        "agentenv.interop.openenv:OpenEnvClientEnv",
        "an environment that an OpenEnv server offers (url=...)",
        "docs/interop.md",
        "openenv",
        ("openenv",),
    ),
    "SWE-v0": BuiltIn(
        "agentenv_envs.swe:SWEEnv",
        "repair a bug in a repository, in a sandbox",
        "docs/environments-swe.md",
        "docker",
        ("docker",),
        "embedded tasks without isolation",
    ),
    "ShopSimulator-MultiTurn-v0": BuiltIn(
        "agentenv_envs.shop:ShopMultiTurnEnv",
        "buy what a shopper wants, who has to be asked",
        _SHOP_PAGE,
        "shop",
        _SHOP,
    ),
    "ShopSimulator-Persona-v0": BuiltIn(
        "agentenv_envs.shop:ShopPersonaEnv",
        "buy what suits the person who is described",
        _SHOP_PAGE,
        "shop",
        _SHOP,
    ),
    "ShopSimulator-SingleTurn-v0": BuiltIn(
        "agentenv_envs.shop:ShopSingleTurnEnv",
        "buy what a wish describes, among near-identical goods",
        _SHOP_PAGE,
        "shop",
        _SHOP,
    ),
    "StyledReply-v0": BuiltIn(
        "agentenv_envs.text:StyledReplyEnv", "answer with a price in the style that a judge likes", _TEXT_PAGE
    ),
    "ToolArithmetic-v0": BuiltIn(
        "agentenv_envs.text:ToolArithmeticEnv", "compute with tools that take two numbers each", _TEXT_PAGE
    ),
    "Verifiers-v0": BuiltIn(
        "agentenv.interop.verifiers:VerifiersEnv",
        "an environment written for verifiers (env_id=...)",
        "docs/interop.md",
        "verifiers",
        ("verifiers",),
    ),
}
"""By id."""
