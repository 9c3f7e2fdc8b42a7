"""KeyDoor-v0: what is told, what changes the state, and what is rewarded."""

import random

import pytest

from agentenv_envs.text import KeyDoorEnv
from agentenv_envs.text.key_door import ACTIONS, Layout


@pytest.fixture
def env() -> KeyDoorEnv:
    """Agent b4, key a2, door d5."""
    env = KeyDoorEnv(split="heldout")
    first, _ = env.reset(seed=0)
    assert first.endswith("You are at b4. The key is at a2. The door is at d5.")
    return env


def _texts(env: KeyDoorEnv, *actions: str) -> list[str]:
    steps = [env.step(action) for action in actions]
    assert all(reward == 0.0 and not terminated for _, reward, terminated, _, _ in steps)
    return [step[0] for step in steps]


def test_key_and_door_are_told_once_and_then_only_where_the_agent_stands_on_them(env: KeyDoorEnv) -> None:
    assert _texts(env, "west", "south", "south", "take", "north") == [
        "You are at a4.",
        "You are at a3.",
        "You are at a2. The key is here.",
        "You have the key. You are at a2.",
        "You are at a3.",
    ]


def test_a_wall_stops_and_what_is_not_there_is_neither_taken_nor_opened(env: KeyDoorEnv) -> None:
    assert _texts(env, "take", "open", "north", "north", "east", "east", "open") == [
        "There is nothing to take. You are at b4.",
        "There is nothing to open. You are at b4.",
        "You are at b5.",
        "A wall stops you. You are at b5.",
        "You are at c5.",
        "You are at d5. The door is here.",
        "The door is locked. You are at d5. The door is here.",
    ]


def test_the_key_can_be_taken_once_only(env: KeyDoorEnv) -> None:
    assert _texts(env, "west", "south", "south", "take", "take")[-1] == (
        "There is nothing to take. You are at a2."
    )


def test_opening_the_door_with_the_key_is_what_is_rewarded(env: KeyDoorEnv) -> None:
    way = ["west", "south", "south", "take", "north", "north", "north", "east", "east", "east"]
    assert _texts(env, *way)[-1] == "You are at d5. The door is here."
    text, reward, terminated, truncated, info = env.step("open")
    assert (text, reward, terminated, truncated) == ("The door opens.", 1.0, True, False)
    assert info["success"] is True and info["metrics"]["turns"] == 11


def test_the_twelfth_turn_is_the_last_and_may_still_win(env: KeyDoorEnv) -> None:
    way = ["west", "west", "south", "south", "take", "north", "north", "north", "east", "east", "east"]
    _texts(env, *way)
    assert env.step("open")[1:4] == (1.0, True, False)
    env.reset(seed=0)
    _texts(env, "east", *way[:-1])
    assert env.step("east")[1:4] == (0.0, False, True)


@pytest.mark.parametrize("said", ["north", " North.", "NORTH\n", "north ."])
def test_case_outer_white_space_and_a_full_stop_do_not_matter(env: KeyDoorEnv, said: str) -> None:
    text, _, _, _, info = env.step(said)
    assert text == "You are at b5." and info["malformed"] is False


@pytest.mark.parametrize("said", ["go north", "north north", "n", "north!", ""])
def test_anything_but_one_word_is_not_understood(env: KeyDoorEnv, said: str) -> None:
    text, _, _, _, info = env.step(said)
    assert text == "Not understood: write one of north, south, east, west, take, open."
    assert info["malformed"] is True


@pytest.mark.parametrize(("size", "max_turns"), [(2, 4), (2, 12), (5, 12), (9, 12), (9, 40)])
def test_every_task_can_be_solved_in_the_turns_there_are_and_needs_what_it_says(
    size: int, max_turns: int
) -> None:
    env = KeyDoorEnv(size=size, max_turns=max_turns)
    rng = random.Random(0)
    for seed in range(100):
        env.reset(seed=seed)
        needed = env.task.num_turns
        assert needed <= max_turns
        for _ in range(needed - 1):
            assert env.step(env.demonstrate(1.0, rng))[1:4] == (0.0, False, False)
        assert env.step(env.demonstrate(1.0, rng))[1:4] == (1.0, True, False)


def test_a_layout_counts_its_steps() -> None:
    # b4 to a2 is 1 + 2, take 1, a2 to d5 is 3 + 3, open 1.
    assert Layout((1, 3), (0, 1), (3, 4)).num_turns == 11


def test_where_two_ways_are_as_short_both_are_solutions(env: KeyDoorEnv) -> None:
    assert set(env.solutions()) == {"south", "west"}
    assert set(env.mistakes()) == set(ACTIONS) - {"south", "west"}
