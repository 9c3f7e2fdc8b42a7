"""Wrappers around text environments."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import agentenv
from agentenv.errors import UsageError
from agentenv.testing import ByteTokenizer, EchoEnv, check_env
from agentenv.wrappers import ObservationCut, Record, TokenBudget, TurnLimit, cut_text


class Endless(agentenv.BaseEnv):
    """Never ends by itself; answers with `n` letters to the action "n", and ends on "done"."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.shared_info: dict[str, Any] = {"turn": 0}
        return "start", self.shared_info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.shared_info["turn"] += 1
        done = action == "done"
        length = int(action) if action.isdigit() and action.isascii() else 0
        return "x" * length, 0.5, done, False, self.shared_info


def test_the_turn_limit_truncates_at_its_last_turn_and_starts_again_at_reset() -> None:
    env = TurnLimit(Endless(), 2)
    for _ in range(2):
        env.reset(seed=0)
        assert env.step("1")[2:4] == (False, False)
        assert env.step("1")[2:4] == (False, True)


def test_a_task_that_ends_at_the_limit_is_terminated_and_not_truncated() -> None:
    env = TurnLimit(Endless(), 1)
    env.reset(seed=0)
    assert env.step("done")[2:4] == (True, False)


def test_the_advice_of_max_turns_is_the_smallest_limit_through_all_wrappers() -> None:
    assert TurnLimit(EchoEnv(max_turns=3), 5).max_turns == 3
    assert TurnLimit(EchoEnv(max_turns=9), 5).max_turns == 5
    assert ObservationCut(TurnLimit(Endless(), 4)).max_turns == 4
    assert ObservationCut(Endless()).max_turns is None


def test_the_token_budget_counts_observations_and_actions() -> None:
    # One token a byte: "start" 5, then "4" and "xxxx" 5 each, so that 15 is reached by the second action.
    env = TokenBudget(Endless(), ByteTokenizer(), 15)
    assert env.reset(seed=0)[1]["tokens_used"] == 5
    *_, truncated, info = env.step("4")
    assert (truncated, info["tokens_used"]) == (False, 10)
    *_, terminated, truncated, info = env.step("4")
    assert (terminated, truncated, info["tokens_used"]) == (False, True, 15)
    assert env.reset(seed=0)[1]["tokens_used"] == 5


def test_a_task_that_ends_over_budget_is_terminated_and_not_truncated() -> None:
    env = TokenBudget(Endless(), ByteTokenizer(), 6)
    env.reset(seed=0)
    assert env.step("done")[2:4] == (True, False)


@pytest.mark.parametrize("length", [0, 99, 100, 101, 150, 1234, 100_000])
def test_a_cut_text_fits_and_keeps_head_tail_and_count(length: int) -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(length))
    cut = cut_text(text, 100)
    assert len(cut) <= 100
    if length <= 100:
        assert cut == text
        return
    head, marker, tail = cut.split("\n")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert abs(len(head) - len(tail)) <= 1
    assert marker == f"[{length - len(head) - len(tail)} characters left out]"


def test_observations_are_cut_and_rewards_are_not_touched() -> None:
    env = ObservationCut(Endless(), max_chars=64)
    env.reset(seed=0)
    observation, reward, terminated, truncated, _ = env.step("1000")
    assert len(observation) <= 64
    assert "characters left out" in observation
    assert (reward, terminated, truncated) == (0.5, False, False)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TurnLimit(Endless(), 0), "max_turns must be 1 or more, got 0"),
        (lambda: TokenBudget(Endless(), ByteTokenizer(), 0), "max_tokens must be 1 or more, got 0"),
        (lambda: ObservationCut(Endless(), 10), "max_chars must be 64 or more, got 10"),
    ],
)
def test_limits_out_of_range_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_the_record_holds_every_episode_as_it_happened(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "episodes.jsonl"
    env = Record(Endless(), path)
    env.reset(seed=4)
    env.step("2")
    env.step("done")
    env.reset(seed=5)
    env.step("1")
    assert len(path.read_text().splitlines()) == 1
    env.close()
    env.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["seed"] == 4
    assert first["observation"] == "start"
    assert [step["action"] for step in first["steps"]] == ["2", "done"]
    assert [step["observation"] for step in first["steps"]] == ["xx", ""]
    # The environment goes on changing the dict that it returned; the record holds each step's own state.
    assert first["info"] == {"turn": 0}
    assert [step["info"]["turn"] for step in first["steps"]] == [1, 2]
    assert (first["total_reward"], first["complete"]) == (1.0, True)
    assert (second["episode"], second["seed"], second["complete"]) == (1, 5, False)


def test_the_record_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    for seed in (1, 2):
        env = Record(Endless(), path)
        env.reset(seed=seed)
        env.step("done")
        env.close()
    assert [json.loads(line)["seed"] for line in path.read_text().splitlines()] == [1, 2]


def test_recording_into_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="path must be a file"):
        Record(Endless(), tmp_path)


def test_all_wrappers_together_keep_the_contract(tmp_path: Path) -> None:
    env: gymnasium.Env[str, str] = EchoEnv(max_turns=9)
    env = Record(
        ObservationCut(TokenBudget(TurnLimit(env, 4), ByteTokenizer(), 90_000)), tmp_path / "e.jsonl"
    )
    check_env(env, actions=["no", "maybe"])


def test_gymnasium_can_rebuild_wrapped_environments_from_their_spec() -> None:
    env = ObservationCut(TurnLimit(gymnasium.make("agentenv/Echo-v0"), 2), max_chars=64)
    assert env.spec is not None
    again = gymnasium.make(env.spec)
    assert isinstance(again, ObservationCut)
    assert again.max_turns == 2
