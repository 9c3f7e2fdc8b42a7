"""What the documents show of the mathematics environments is what they do."""

import inspect
import re
import textwrap
from pathlib import Path

import pytest

import agentenv
from agentenv.baselines import make_baseline
from agentenv_envs.math_reasoning import MathPythonEnv
from agentenv_envs.math_reasoning.data import SCHEMAS
from agentenv_envs.math_reasoning.embedded import FAMILIES, LEVELS, generate_task

BEGIN = "<!-- transcript: compared by tests/envs/math_reasoning/test_docs.py -->"
END = "<!-- transcript end -->"


def transcript() -> str:
    """Held-out problem 14 at level 3, as the scripted policy plays it."""
    env = MathPythonEnv(split="heldout", levels=[3], sandbox="local-unisolated")
    policy = make_baseline(env, "scripted", 0)
    observation, info = env.reset(seed=14)
    policy.begin(observation, info)
    lines = [("environment", observation)]
    over, reward = False, 0.0
    while not over:
        action = policy.act(observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
        lines += [("agent", action), ("environment", observation)]
    env.close()
    lines = [(who, said) for who, said in lines if said] + [("end", f"reward {reward:g}")]
    shown = [f"{who:<13}" + textwrap.indent(said, " " * 13).lstrip() for who, said in lines]
    return "````text\n" + "\n".join(shown) + "\n````"


def test_the_episode_in_the_readme_is_a_real_one(repository: Path) -> None:
    readme = (repository / "envs/agentenv_envs/math_reasoning/README.md").read_text(encoding="utf-8")
    assert readme.partition(BEGIN)[2].partition(END)[0].strip() == transcript()


def test_the_page_shows_problems_that_are_generated(repository: Path) -> None:
    page = (repository / "docs/environments-math.md").read_text(encoding="utf-8")
    problems = {
        generate_task(3, levels=[level], families=[family]).problem for family in FAMILIES for level in LEVELS
    }
    shown = re.findall(r"(?:What is|What comes|Solve|Which positive)[^|]*[^| ]", page)
    assert len(shown) >= 12
    assert [text for text in shown if text not in problems] == []
    assert all(f"| `{family}` |" in page for family in FAMILIES)


def test_the_page_has_every_form_of_rows_with_its_fields(repository: Path) -> None:
    page = (repository / "docs/environments-math.md").read_text(encoding="utf-8")
    for schema in SCHEMAS:
        (line,) = (line for line in page.split("\n") if line.startswith(f"| {schema.name} |"))
        assert f"`{schema.problem}`" in line and f"`{schema.answer}`" in line


@pytest.mark.parametrize("name", ["Math-v0", "MathPython-v0"])
def test_the_page_lists_every_argument_with_its_default(repository: Path, name: str) -> None:
    page = (repository / "docs/environments-math.md").read_text(encoding="utf-8")
    page = page.partition("## Arguments")[2].partition("\n## ")[0]
    creator = agentenv.registration.load_entry_point(agentenv.spec(name))
    for argument, parameter in inspect.signature(creator).parameters.items():
        (line,) = (line for line in page.split("\n") if line.startswith(f"| `{argument}` |"))
        cell = line.split("|")[2].strip().strip("`")
        default = parameter.default
        shown = f"{default:g}" if isinstance(default, float) and default else str(default)
        assert cell.strip('"') == shown or argument == "image", (argument, cell, shown)
