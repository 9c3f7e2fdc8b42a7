"""The text environment interface."""

import gymnasium
import pytest

import agentenv
from agentenv.env import TextSpace


def test_the_text_space_holds_every_string_and_nothing_else() -> None:
    space = TextSpace()
    assert "" in space
    assert "世界\x00" * 10_000 in space
    assert b"bytes" not in space
    assert 3 not in space


def test_equal_seeds_draw_equal_samples() -> None:
    one, two = TextSpace(seed=7), TextSpace(seed=7)
    drawn = [one.sample() for _ in range(20)]
    assert drawn == [two.sample() for _ in range(20)]
    assert len(set(drawn)) > 10
    assert max(map(len, drawn)) <= 32


def test_samples_survive_json() -> None:
    space = TextSpace()
    assert space.from_jsonable(space.to_jsonable(["a", "ß"])) == ["a", "ß"]


def test_a_negative_sample_length_is_refused() -> None:
    with pytest.raises(ValueError, match="sample_chars must be 0 or more, got -1"):
        TextSpace(sample_chars=-1)


def test_an_environment_needs_only_reset_and_step() -> None:
    class Guess(agentenv.BaseEnv):
        def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
            super().reset(seed=seed)
            self.number = int(self.np_random.integers(10))
            return "Guess a digit.", {}

        def step(self, action):  # type: ignore[no-untyped-def]
            right = action.strip() == str(self.number)
            return ("yes" if right else "no"), float(right), right, False, {"success": right}

    env = Guess()
    assert isinstance(env, gymnasium.Env)
    assert env.reset(seed=3) == ("Guess a digit.", {})
    assert env.step(str(env.number)) == ("yes", 1.0, True, False, {"success": True})
    assert env.max_turns is None
    env.close()
    env.close()


def test_a_step_that_was_not_written_names_the_class() -> None:
    class Half(agentenv.BaseEnv):
        pass

    with pytest.raises(NotImplementedError, match="Half does not implement step"):
        Half().step("")
