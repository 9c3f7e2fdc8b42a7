"""What the documents show of the text environments is what they do."""

import json
import random
import textwrap
from pathlib import Path
from typing import Any

import pytest

import agentenv
from agentenv_envs.text.task_env import TextTaskEnv

NAMES = ("KeyDoor-v0", "GuessNumber-v0", "ToolArithmetic-v0", "StyledReply-v0")
BEGIN, END = "<!-- transcripts: compared by tests/envs/text/test_docs.py -->", "<!-- transcripts end -->"


def transcript(name: str) -> str:
    """Held-out task 0 as the oracle plays it, as the page shows it."""
    env: TextTaskEnv[Any] = agentenv.make(name, split="heldout")  # type: ignore[assignment]
    rng = random.Random(0)
    text, _ = env.reset(seed=0)
    lines = [("environment", text)]
    ended = False
    while not ended:
        action = env.demonstrate(1.0, rng)
        text, reward, terminated, truncated, info = env.step(action)
        lines += [("agent", action), ("environment", text)]
        ended = terminated or truncated
    outcome = f"reward {reward:g}" + (
        f", quality {info['quality']}, style {info['style']}" if "style" in info else ""
    )
    lines = [line for line in lines if line[1]] + [("end", outcome)]
    shown = [
        textwrap.fill(said, 116, initial_indent=f"{who:<13}", subsequent_indent=" " * 13)
        for who, said in lines
    ]
    return f"### {name}\n\n```text\n" + "\n".join(shown) + "\n```\n"


def test_the_episodes_in_the_page_are_real_ones(repository: Path) -> None:
    page = (repository / "docs" / "environments-text.md").read_text(encoding="utf-8")
    shown = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == "\n".join(transcript(name) for name in NAMES).strip()


@pytest.mark.parametrize("folder", ["policy", "policy_all"])
def test_the_readme_gives_the_success_that_was_measured(repository: Path, folder: str) -> None:
    text = repository / "envs" / "agentenv_envs" / "text"
    made = json.loads((text / folder / "made.json").read_text(encoding="utf-8"))
    readme = (text / "README.md").read_text(encoding="utf-8")
    for name, result in made["heldout"]["mediocre"].items():
        if name == "StyledReply-v0":
            styles = ", ".join(
                f"{style} {result[f'style_{style}']:.2f}" for style in ("plain", "polite", "loud")
            )
            cell = f"quality {result['quality']:.2f}; {styles}"
        else:
            low, high = result["interval"]
            cell = f"{result['success']:.2f} [{low:.2f}, {high:.2f}]"
        assert f"| `{folder}/` | `{name}` | {cell} | {result['tokens']:.0f} |" in readme
    assert f"{made['parameters']:,} parameters" in readme
