"""An environment whose episode is shown while it is played, whoever acts, and kept.

Invariants:
- The environment is handed exactly what the policy wrote.
- What was said and done so far is kept at any time, also when the episode is broken off.
"""

import inspect
import math
import time
from collections.abc import Awaitable, Mapping
from typing import Any

from agentenv.console.screen import Screen
from agentenv.environment_source import TextEnv
from agentenv.evaluation.records import EpisodeRecord
from agentenv.trajectory import Trajectory
from agentenv.wrappers import TextWrapper

__all__ = ["Stage"]


class Stage(TextWrapper):
    """Shows each turn.

    Args:
        env: to play.
        screen: where.
        pace_s: seconds to wait before each turn is shown, at least.
        shows_actions: whether to show actions; a person's own are on the terminal already.
    """

    def __init__(
        self, env: TextEnv, screen: Screen, *, pace_s: float = 0.0, shows_actions: bool = True
    ) -> None:
        super().__init__(env)
        self._screen = screen
        self._pace_s = pace_s
        self._shows_actions = shows_actions
        self._shown_at = 0.0
        self.observation = ""
        """The latest."""
        self.messages: list[dict[str, str]] = []
        self.rewards: list[float] = []
        self.info: dict[str, Any] = {}
        self.end_reason = ""
        """"terminated" or "truncated", once the environment has said so."""

    @property
    def turns(self) -> int:
        """Actions taken so far."""
        return len(self.rewards)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode and show its first observation."""
        result: Any = self.env.reset(seed=seed, options=options)
        return self._began_later(result) if inspect.isawaitable(result) else self._began(*result)

    def step(self, action: str) -> Any:
        """Show an action, take it, and show what came of it."""
        if self._shows_actions:
            time.sleep(max(0.0, self._shown_at + self._pace_s - time.monotonic()))
            separator = "\n" if "\n" in action else " "
            self._screen.text(f"[{self.turns + 1}] >{separator}{action}")
        self.messages.append({"role": "assistant", "content": action})
        result: Any = self.env.step(action)
        return self._stepped_later(result) if inspect.isawaitable(result) else self._stepped(*result)

    def record(self, seed: int, end_reason: str, error: str = "") -> EpisodeRecord:
        """The episode, as `agentenv eval` keeps it.

        Args:
            seed: of the task.
            end_reason: why it ended.
            error: what broke it, if something did.
        """
        info = dict(self.info) | ({"failure": end_reason, "error": error} if error else {})
        trajectory = Trajectory(
            prompt_ids=[],
            completion_ids=[],
            rollout_logprobs=[],
            action_mask=[],
            policy_versions=[],
            reward=math.fsum(self.rewards),
            end_reason=end_reason,
            task_id=str(info.get("task_id", seed)),
            seed=seed,
            turns=self.turns,
            messages=self.messages,
            info=info,
        )
        return EpisodeRecord.of(0, trajectory)

    def _began(self, observation: str, info: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.messages, self.rewards, self.end_reason = [], [], ""
        self.info = dict(info)
        self._show(observation)
        return observation, info

    async def _began_later(self, result: Awaitable[Any]) -> tuple[str, dict[str, Any]]:
        return self._began(*await result)

    def _stepped(
        self, observation: str, reward: float, terminated: bool, truncated: bool, info: Mapping[str, Any]
    ) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        self.rewards.append(float(reward))
        self.info |= info
        self.end_reason = "terminated" if terminated else "truncated" if truncated else ""
        self._show(observation)
        limit = f" of at most {self.max_turns}" if self.max_turns else ""
        self._screen.note(f"    turn {self.turns}{limit}, reward {float(reward):g}")
        return observation, reward, terminated, truncated, info

    async def _stepped_later(self, result: Awaitable[Any]) -> Any:
        return self._stepped(*await result)

    def _show(self, observation: str) -> None:
        self.observation = observation
        if observation:
            self.messages.append({"role": "user", "content": observation})
            self._screen.text(observation)
        self._shown_at = time.monotonic()
