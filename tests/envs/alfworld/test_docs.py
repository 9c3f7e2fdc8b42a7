"""What the README shows of an episode is what happens."""

import textwrap
from pathlib import Path

import pytest

from agentenv.baselines import make_baseline
from agentenv_envs.alfworld import ALFWorldEnv

BEGIN, END = "<!-- transcript: compared by tests/envs/alfworld/test_docs.py -->", "<!-- transcript end -->"


def transcript() -> str:
    """Held-out game 2 as the oracle plays it, as the README shows it."""
    env = ALFWorldEnv(split="heldout")
    oracle = make_baseline(env, "oracle")
    text, info = env.reset(seed=2)
    oracle.begin(text, info)
    said = [("environment", text)]
    ended, reward = False, 0.0
    while not ended:
        action = oracle.act(text)
        text, reward, ended, _, _ = env.step(action)
        said += [("agent", action), ("environment", text)]
    env.close()
    said.append(("end", f"reward {reward:g}"))
    lines = []
    for who, what in said:
        for number, paragraph in enumerate(what.split("\n\n")):
            lines.append(
                textwrap.fill(
                    paragraph,
                    116,
                    initial_indent=f"{'' if number else who:<13}",
                    subsequent_indent=" " * 13,
                    break_on_hyphens=False,
                )
            )
    return "```text\n" + "\n".join(lines) + "\n```"


@pytest.mark.usefixtures("engine_installed")
def test_the_episode_in_the_readme_is_a_real_one(repository: Path) -> None:
    readme = repository / "envs" / "agentenv_envs" / "alfworld" / "README.md"
    shown = readme.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == transcript()
