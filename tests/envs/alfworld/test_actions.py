"""Commands in the words and spellings that policies use."""

import time

import pytest

from agentenv_envs.alfworld.actions import command_of


@pytest.mark.parametrize(
    ("action", "command"),
    [
        ("go to fridge 1", "go to fridge 1"),
        ("  Go  to\tFRIDGE 1.\n", "go to fridge 1"),
        ("> look", "look"),
        ("`take mug 1 from desk 2`", "take mug 1 from desk 2"),
        ("put mug 1 in/on shelf 3", "move mug 1 to shelf 3"),
        ("Put mug 1 in shelf 3", "move mug 1 to shelf 3"),
        ("put the mug 1 on the shelf 3", "move mug 1 to shelf 3"),
        ("place mug 1 into cabinet 2", "move mug 1 to cabinet 2"),
        ("move mug 1 to shelf 3", "move mug 1 to shelf 3"),
        ("goto shelf 3", "go to shelf 3"),
        ("<think>go to desk 1</think>\n<action>open drawer 2</action>", "open drawer 2"),
        ("<think>a thought</think> open drawer 2", "open drawer 2"),
        ("<action>look", "look"),
        ("<Think>go to desk 1</THINK><ACTION>Look</Action>", "look"),
        ("", None),
        (" \n ", None),
        ("<action></action>", None),
        ("x" * 201, None),
    ],
)
def test_the_spelling_of_a_command_does_not_matter(action: str, command: str | None) -> None:
    assert command_of(action) == command


@pytest.mark.parametrize("piece", ["put a ", "<action>", "</think>", " in ", "go to ", "\n"])
def test_a_megabyte_takes_no_time(piece: str) -> None:
    began = time.thread_time()
    command_of(piece * (1_000_000 // len(piece)))
    assert time.thread_time() - began < 2.0
