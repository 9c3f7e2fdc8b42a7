"""One slot: ends of an episode, token exactness, failures and the slot afterwards."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentenv import BaseEnv
from agentenv.errors import SandboxError, UsageError
from agentenv.inference import LLMProxy
from agentenv.rollout import EnvManager, EpisodeTicket, RolloutConfig, SlotContext
from agentenv.rollout.failures import EpisodeFailedError
from agentenv.testing import ByteTokenizer, ScriptedModel
from agentenv.trajectory import Trajectory


class Env(BaseEnv):
    """Ends after ``length`` steps, with a reward of a quarter each; ``script`` may raise or hang instead."""

    made = 0
    closed = 0
    max_turns = 9

    def __init__(self, length: int = 3, script: Callable[[int, int], None] | None = None) -> None:
        type(self).made += 1
        self.number = type(self).made
        self.length, self.script = length, script

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        if self.script is not None:
            self.script(self.number, 0)
        return f"task {seed}", {"task_id": f"t{seed}", "family": "f", "object": object()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        if self.script is not None:
            self.script(self.number, self.turn)
        done = self.turn == self.length
        return f"saw  {action.upper()}", 0.25, done, False, {"success": done, "metrics": {"turns": self.turn}}

    def close(self) -> None:
        type(self).closed += 1


class LossyTokenizer(ByteTokenizer):
    """encode(decode(ids)) is rarely ids."""

    def decode(self, token_ids: Any, **options: Any) -> str:
        return " ".join(super().decode(token_ids, **options).lower().split())


@pytest.fixture(autouse=True)
def _count_from_zero() -> None:
    Env.made = Env.closed = 0


_CONFIG: dict[str, Any] = {
    "reset_timeout_s": 60.0,
    "step_timeout_s": 60.0,
    "max_tokens_per_turn": 64,
    "max_tokens_per_episode": 4096,
}


def _play(
    env_fn: Callable[[], BaseEnv],
    *,
    replies: Any = ("A  b", "c", "d"),
    episodes: int = 1,
    tokenizer: Any = None,
    model: ScriptedModel | None = None,
    **options: Any,
) -> list[Trajectory | BaseException]:
    """Play episodes one after another in one slot; failures are returned."""

    async def whole() -> list[Trajectory | BaseException]:
        engine = model or ScriptedModel(replies, repeat=True)
        config = RolloutConfig(**{**_CONFIG, **options})
        context = SlotContext(LLMProxy([engine]), tokenizer or ByteTokenizer(), config)
        manager = EnvManager("slot", env_fn, context)
        results: list[Trajectory | BaseException] = []
        for number in range(episodes):
            try:
                ticket = EpisodeTicket(f"e{number}", "g", 40 + number, start_version=2, number=number)
                results.append(await manager.run_episode(ticket, sampling_seed=number))
            except (EpisodeFailedError, UsageError) as error:
                results.append(error)
        manager.end()
        assert await manager.join(asyncio.get_running_loop().time() + 60) == []
        return results

    return asyncio.run(whole())


def _only(results: Sequence[Trajectory | BaseException]) -> Trajectory:
    (trajectory,) = results
    assert isinstance(trajectory, Trajectory)
    trajectory.validate()
    return trajectory


def test_an_episode_carries_all_that_the_trainer_needs() -> None:
    trajectory = _only(_play(Env))
    assert (trajectory.terminated, trajectory.truncated, trajectory.end_reason) == (True, False, "terminated")
    assert (trajectory.reward, trajectory.turns, trajectory.success) == (0.75, 3, True)
    assert (trajectory.seed, trajectory.task_id, trajectory.start_version) == (40, "t40", 2)
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant"] * 3
    assert trajectory.info["family"] == "f" and trajectory.info["metrics"] == {"turns": 3}
    assert trajectory.info["rewards"] == [0.25] * 3
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    # The last token is the last action's.
    assert trajectory.action_mask[-1] and trajectory.completion_ids[-1] == 257


def test_ids_are_exact_with_a_tokenizer_that_does_not_round_trip() -> None:
    tokenizer = LossyTokenizer()
    model = ScriptedModel([[65, 32, 32, 0xC3, 257], [66, 257], [67, 257]], tokenizer=tokenizer)
    trajectory = _only(_play(Env, tokenizer=tokenizer, model=model))
    sequence = trajectory.prompt_ids + trajectory.completion_ids
    for request, reply in zip(model.requests, ([65, 32, 32, 0xC3, 257], [66, 257], [67, 257]), strict=True):
        assert sequence[: len(request.prompt_ids)] == request.prompt_ids
        assert sequence[len(request.prompt_ids) : len(request.prompt_ids) + len(reply)] == reply
    actions = [
        token for token, acted in zip(trajectory.completion_ids, trajectory.action_mask, strict=True) if acted
    ]
    assert actions == [65, 32, 32, 0xC3, 257, 66, 257, 67, 257]


@pytest.mark.parametrize(("limit", "turns"), [(2, 2), (None, 9)])
def test_the_turn_limit_truncates(limit: int | None, turns: int) -> None:
    trajectory = _only(_play(lambda: Env(length=99), max_turns=limit))
    assert (trajectory.turns, trajectory.truncated, trajectory.end_reason) == (turns, True, "max_turns")
    assert trajectory.reward == 0.25 * turns


def test_the_token_limit_truncates_before_the_observation_that_does_not_fit() -> None:
    trajectory = _only(_play(lambda: Env(length=99), max_tokens_per_episode=150))
    assert (trajectory.truncated, trajectory.end_reason) == (True, "max_tokens")
    assert len(trajectory.prompt_ids) + len(trajectory.completion_ids) < 150
    assert trajectory.action_mask[-1]


def test_a_fork_that_outgrows_the_token_limit_truncates() -> None:
    class Forgetful(ByteTokenizer):
        """Its template drops the reasoning of earlier turns."""

        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            messages = [{**m, "content": m["content"].rpartition("</think>")[2]} for m in conversation]
            return super().apply_chat_template(messages, **options)

    # Each byte that is no UTF-8 is sampled as one token and read as U+FFFD, which takes three.
    reply = [*ByteTokenizer().encode("</think>"), *[0xFF] * 40, 257]
    options: dict[str, Any] = {"replies": [reply], "tokenizer": Forgetful(), "history": "fork"}
    trajectory = _only(_play(Env, max_tokens_per_episode=260, **options))
    assert (trajectory.end_reason, trajectory.truncated, trajectory.turns) == ("max_tokens", True, 1)
    assert trajectory.num_action_tokens == len(reply)
    assert len(trajectory.prompt_ids) >= 260 and trajectory.completion_ids == []
    assert len(trajectory.earlier_segments) == 1


def test_a_turn_is_cut_to_what_the_episode_has_left() -> None:
    trajectory = _only(
        _play(
            lambda: Env(length=99), replies=["x" * 200], max_tokens_per_episode=100, max_tokens_per_turn=512
        )
    )
    assert len(trajectory.prompt_ids) + len(trajectory.completion_ids) == 100
    assert trajectory.end_reason == "max_tokens" and trajectory.turns == 1


def test_truncation_by_the_environment_is_a_sample() -> None:
    class Cut(Env):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "o", 0.0, False, True, {}

    trajectory = _only(_play(Cut))
    assert (trajectory.terminated, trajectory.truncated, trajectory.end_reason) == (False, True, "truncated")


def test_the_system_prompt_comes_first() -> None:
    trajectory = _only(_play(Env, system_prompt="be brief"))
    assert trajectory.messages[0] == {"role": "system", "content": "be brief"}
    assert ByteTokenizer().decode(trajectory.prompt_ids).startswith("<|im_start|>system\nbe brief<|im_end|>")


def _raise_at(turn: int, error: Exception) -> Callable[[int, int], None]:
    def script(number: int, now: int) -> None:
        if number == 1 and now == turn:
            raise error

    return script


@pytest.mark.parametrize(
    ("turn", "error", "reason"),
    [
        (0, OSError("disk"), "reset_OSError"),
        (2, ZeroDivisionError("x"), "step_ZeroDivisionError"),
        (1, SandboxError("gone"), "step_SandboxError"),
    ],
)
def test_a_failure_is_named_and_the_slot_gets_a_new_environment(
    turn: int, error: Exception, reason: str
) -> None:
    failed, after = _play(lambda: Env(script=_raise_at(turn, error)), episodes=2, reset_retries=0)
    assert isinstance(failed, EpisodeFailedError) and failed.reason == reason
    assert isinstance(after, Trajectory) and after.seed == 41
    assert (Env.made, Env.closed) == (2, 2)


def test_a_failed_reset_is_tried_again_in_a_new_environment_after_growing_pauses() -> None:
    def script(number: int, now: int) -> None:
        if number <= 2 and now == 0:
            raise OSError("disk")

    trajectory = _only(_play(lambda: Env(script=script), reset_retries=2, reset_backoff_s=0.05))
    assert (Env.made, Env.closed) == (3, 3)
    assert 0.15 <= trajectory.info["timing_s"]["reset"] < 30.0  # pauses of 0.05 and 0.1, then it came


def test_a_reset_that_never_comes_right_fails_with_its_last_error() -> None:
    def script(number: int, now: int) -> None:
        if now == 0:
            raise OSError(f"disk {number}")

    (failed,) = _play(lambda: Env(script=script), reset_retries=1, reset_backoff_s=0.01)
    assert isinstance(failed, EpisodeFailedError) and failed.reason == "reset_OSError"
    assert "disk 2" in str(failed)


def test_a_reset_is_not_tried_again_where_the_episodes_deadline_would_pass_meanwhile() -> None:
    (failed,) = _play(
        lambda: Env(script=_raise_at(0, OSError("disk"))), reset_backoff_s=30.0, episode_timeout_s=5.0
    )
    assert isinstance(failed, EpisodeFailedError) and Env.made == 1


def test_a_failed_step_is_never_tried_again() -> None:
    (failed,) = _play(lambda: Env(script=_raise_at(1, OSError("disk"))), reset_retries=5)
    assert isinstance(failed, EpisodeFailedError) and failed.reason == "step_OSError"
    assert Env.made == 1


def test_an_environment_is_used_again_after_a_good_episode() -> None:
    assert len(_play(Env, episodes=3)) == 3
    assert (Env.made, Env.closed) == (1, 1)


def test_a_hanging_step_is_left_behind() -> None:
    gate = threading.Event()

    def script(number: int, turn: int) -> None:
        if number == 1 and turn == 2:
            gate.wait(120)
        elif number == 2:
            gate.set()

    failed, after = _play(lambda: Env(script=script), episodes=2, step_timeout_s=1.0)
    assert isinstance(failed, EpisodeFailedError) and failed.reason == "step_timeout"
    assert isinstance(after, Trajectory)
    assert (Env.made, Env.closed) == (2, 2)


def test_a_turn_that_misses_its_deadline_fails_the_episode_but_keeps_the_environment() -> None:
    slow = ScriptedModel(lambda request: "x" if request.episode_id == "e1" else "x" * 500, token_s=0.01)
    failed, after = _play(Env, model=slow, episodes=2, generate_timeout_s=1.0, max_tokens_per_turn=512)
    assert isinstance(failed, EpisodeFailedError) and failed.reason == "generate_timeout"
    assert isinstance(after, Trajectory)
    assert Env.made == 1


def test_the_episodes_own_deadline_is_the_nearer_one() -> None:
    (failed,) = _play(
        lambda: Env(length=99, script=lambda *_: threading.Event().wait(0.03)),
        episode_timeout_s=1.0,
        max_turns=99,
    )
    assert isinstance(failed, EpisodeFailedError)
    assert failed.reason in {"step_timeout", "generate_timeout", "episode_timeout"}


def test_a_first_prompt_that_does_not_fit_fails_and_says_so() -> None:
    (failed,) = _play(Env, max_tokens_per_episode=10)
    assert isinstance(failed, EpisodeFailedError)
    assert "task seed 40" in str(failed) and "max_tokens_per_episode is 10" in str(failed)


def test_bad_input_when_the_environment_is_made_is_not_a_failed_episode() -> None:
    def broken() -> BaseEnv:
        raise UsageError("sandbox 'docker' needs a Docker engine")

    (error,) = _play(broken)
    assert isinstance(error, UsageError) and "Docker" in str(error)


def test_an_abort_from_outside_fails_the_episode() -> None:
    async def whole() -> None:
        engine = ScriptedModel(["x" * 60], token_s=0.3)
        proxy = LLMProxy([engine])
        manager = EnvManager("slot", Env, SlotContext(proxy, ByteTokenizer(), RolloutConfig(**_CONFIG)))
        ticket = EpisodeTicket("e", "g", 1, start_version=0, number=0)
        episode = asyncio.create_task(manager.run_episode(ticket, sampling_seed=1))
        while not engine.requests:  # noqa: ASYNC110 - what changes it tells nobody
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        await proxy.abort("e/0")
        with pytest.raises(EpisodeFailedError, match="aborted from outside") as caught:
            await episode
        assert caught.value.stage == "generate"
        assert 0 < manager.action_tokens < 60
        manager.end()

    asyncio.run(whole())
