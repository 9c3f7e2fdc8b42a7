"""The environment interface: a gymnasium environment whose observations and actions are text.

Invariants:
- `reset` and `step` have gymnasium's five-tuple form; `terminated` (the task is over: its reward is final)
  and `truncated` (cut off from outside: a budget, a turn limit) are kept apart.
- `reset(seed=s)` chooses the task: the same seed gives the same task, in every process.
- `close` may be called more than once, and after a failed `reset` too.
- An action is the text that the policy wrote in one turn, whatever it is: an environment answers a malformed
  action with an observation that says so and never raises for it.
- Exceptions mean that the environment is broken. Authors raise plain Python; the rollout classifies.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, cast

import gymnasium

__all__ = ["AsyncEnv", "BaseEnv", "TextSpace"]

# Letters, digits, space and line break: enough for a random policy to stumble over an environment's parser.
_SAMPLE_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?()[]{}<>/\\'\"`$#-_=+*&|\n"


class TextSpace(gymnasium.Space[str]):
    """All Unicode strings, of any length.

    `gymnasium.spaces.Text` bounds the length and fixes a character set; what a language model reads and
    writes is neither.

    Args:
        sample_chars: greatest length of what `sample` draws.
        seed: seed of `sample`.
    """

    def __init__(self, *, sample_chars: int = 32, seed: int | None = None) -> None:
        if sample_chars < 0:
            raise ValueError(f"sample_chars must be 0 or more, got {sample_chars}")
        self.sample_chars = sample_chars
        super().__init__(shape=None, dtype=None, seed=seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """Draw a string of 0 to `sample_chars` printable characters.

        Raises:
            ValueError: `mask` or `probability` is given; text has neither.
        """
        if mask is not None or probability is not None:
            raise ValueError("TextSpace.sample takes neither mask nor probability")
        length = int(self.np_random.integers(0, self.sample_chars + 1))
        picks = self.np_random.integers(0, len(_SAMPLE_ALPHABET), size=length)
        return "".join(_SAMPLE_ALPHABET[int(i)] for i in picks)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a string."""
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        """False: text has no fixed size."""
        return False

    def to_jsonable(self, sample_n: Iterable[str]) -> list[Any]:
        """A list of strings is JSON already."""
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        """Inverse of `to_jsonable`."""
        return cast("list[str]", list(sample_n))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace)

    def __hash__(self) -> int:
        return hash(TextSpace)

    def __repr__(self) -> str:
        return "TextSpace()"


class BaseEnv(gymnasium.Env[str, str]):
    """Base of text environments. Subclasses write `reset` and `step`, and `close` if they hold resources.

        class Guess(agentenv.BaseEnv):
            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                self.number = int(self.np_random.integers(10))
                return "Guess a digit.", {}

            def step(self, action):
                right = action.strip() == str(self.number)
                return ("yes" if right else "no"), float(right), right, False, {"success": right}

    `info` is free, but these keys have a meaning for rollouts and reports:

    - "success" (bool): whether the task was solved; read at the last step.
    - "task_id" (str): stable name of the task; read at `reset`.
    - "family" (str): kind of task, for numbers broken down by kind; read at `reset`.
    - "metrics" (dict[str, float]): numbers to average over episodes; read at the last step.
    - "failure" is reserved: rollouts set it on episodes that infrastructure ended.
    """

    max_turns: int | None = None
    """Advice to rollouts: actions after which an episode is cut as truncated. None: no advice."""

    worker: ClassVar[Literal["inline", "thread", "process"]] = "thread"
    """Where rollouts run the environment. "thread" suits what waits (for a sandbox, a server); "inline", in the event
    loop itself, what only computes for microseconds; "process", which can be killed, what computes for long, may hang
    or crash, or can't share a process with a second one of its kind."""

    policies: ClassVar[Mapping[str, str]] = {}
    """Baselines by name, each as "module:Class", imported when it is played: see `agentenv.baselines`."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]
    observation_space: gymnasium.Space[str] = TextSpace()
    action_space: gymnasium.Space[str] = TextSpace()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin the task that `seed` chooses; without a seed, the next one of `np_random`.

        A subclass calls `super().reset(seed=seed)` first if it draws from `np_random`.

        Returns:
            observation, info
        """
        super().reset(seed=seed)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one turn of the policy.

        Args:
            action: the text that the policy wrote.

        Returns:
            observation, reward, terminated, truncated, info
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement step")

    def close(self) -> None:
        """Give back what the environment holds; may be called more than once."""


class AsyncEnv(BaseEnv):
    """Base of environments whose `reset` and `step` are coroutines: thousands of them share one event loop.

        class Remote(agentenv.AsyncEnv):
            async def reset(self, *, seed=None, options=None):
                self.session = await client.open(seed)
                return self.session.text, {}

            async def step(self, action):
                return await client.act(self.session, action)

    For rollouts only: gymnasium's wrappers and a plain loop over `step` need `BaseEnv`. `close` may be a
    coroutine, too.
    """

    worker = "inline"

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin the task that `seed` chooses, see `BaseEnv.reset`."""
        return super().reset(seed=seed, options=options)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        """Take one turn of the policy, see `BaseEnv.step`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement step")
