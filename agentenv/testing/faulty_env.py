"""An environment that misbehaves as often as it is told to: for tests of rollouts, and of what they do about it.

Invariants:
- An episode has at most one fault. Which one, and where, is a function of the fault seed, the task's seed, and how
  many episodes came before; so a repeated task meets another fate.
- The sum of the rates is the share of episodes with a fault, up to chance.
- With all rates 0 it does what the wrapped environment does.
"""

import hashlib
import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import gymnasium

from agentenv.errors import UsageError
from agentenv.wrappers.base import TextWrapper

__all__ = ["Fault", "FaultyEnv"]

FaultKind = Literal["slow", "hang", "error", "exit", "malformed"]

_instances = itertools.count()
_MALFORMED_RESETS: tuple[Any, ...] = (
    None,
    "no tuple",
    (b"bytes", {}),
    ("no dict", None),
    ("one too many", {}, {}),
)
_MALFORMED_STEPS: tuple[Any, ...] = (
    None,
    ("a step of the old API", 0.0, False, {}),
    (b"bytes", 0.0, False, False, {}),
    ("", float("nan"), False, False, {}),
    ("", "1.0", False, False, {}),
    ("", 0.0, None, False, {}),
    ("", 0.0, False, False, "no dict"),
)


@dataclass(frozen=True)
class Fault:
    """What is wrong with an episode."""

    kind: FaultKind
    turn: int
    """The call that it befalls: 0 is `reset`, 1 the first `step`."""


class FaultyEnv(TextWrapper):
    """Faults in some of the episodes of any text environment.

        env_fn = functools.partial(FaultyEnv, EchoEnv, error=0.05, hang=0.02, exit=0.02, seed=1)
        controller = AsyncController(env_fn, proxy, tokenizer, RolloutConfig(step_timeout_s=2.0))

    Rollouts run it in a process, as they must for what exits. Each rate is the share of episodes that have the
    fault:

    - `slow`: the call takes `slow_s` seconds longer, and is right.
    - `hang`: the call does not return.
    - `error`: the call raises `RuntimeError`.
    - `exit`: the process ends with exit code 3, at once.
    - `malformed`: the call returns what its contract forbids: no tuple, bytes, a reward that is no number, ...

    Args:
        env: the environment to wrap, or a function that makes it.
        slow: rate.
        hang: rate.
        error: rate.
        exit: rate; only in a process of its own (`RolloutConfig.worker` "auto" or "process").
        malformed: rate.
        slow_s: seconds that `slow` adds.
        at_reset: share of the faults that befall `reset`; the others befall a step.
        max_turn: the steps that a fault can befall are the first to this one; an episode that ends sooner escapes.
        seed: of the faults; the tasks keep theirs.

    Raises:
        UsageError: a rate or share is not within 0 and 1, the rates sum up to more than 1, `slow_s` is below 0,
            `max_turn` below 1, or `exit` would end the main process.
    """

    worker: ClassVar[Literal["inline", "thread", "process"]] = "process"

    def __init__(
        self,
        env: gymnasium.Env[str, str] | Callable[[], gymnasium.Env[str, str]],
        *,
        slow: float = 0.0,
        hang: float = 0.0,
        error: float = 0.0,
        exit: float = 0.0,
        malformed: float = 0.0,
        slow_s: float = 1.0,
        at_reset: float = 0.2,
        max_turn: int = 1,
        seed: int = 0,
    ) -> None:
        rates: dict[FaultKind, float] = {
            "slow": slow,
            "hang": hang,
            "error": error,
            "exit": exit,
            "malformed": malformed,
        }
        for name, share in (*rates.items(), ("at_reset", at_reset)):
            if not 0.0 <= share <= 1.0:
                raise UsageError(f"FaultyEnv: {name} must be between 0 and 1, got {share}")
        if sum(rates.values()) > 1.0 + 1e-9:
            raise UsageError(f"FaultyEnv: the rates must sum up to at most 1, got {sum(rates.values()):g}")
        if not slow_s >= 0.0:
            raise UsageError(f"FaultyEnv: slow_s must be 0 or more, got {slow_s}")
        if max_turn < 1:
            raise UsageError(f"FaultyEnv: max_turn must be 1 or more, got {max_turn}")
        if exit > 0.0 and "AGENTENV_WORKER" not in os.environ:
            raise UsageError(
                f"FaultyEnv: exit is {exit}, which would end the whole rollout here; it must be 0 unless the "
                "environment runs in a process of its own (RolloutConfig.worker 'auto' or 'process')"
            )
        super().__init__(env if isinstance(env, gymnasium.Env) else env())
        self.fault: Fault | None = None
        """Of the running episode; None: there is none."""
        self._rates = rates
        self._slow_s = slow_s
        self._at_reset = at_reset
        self._max_turn = max_turn
        self._seed = seed
        # Workers have their names from their slots, so that the first instance in each of them is another one.
        self._instance = f"{os.environ.get('AGENTENV_WORKER', '')}/{next(_instances)}"
        self._episodes = 0
        self._turn = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode, and decide its fault."""
        self.fault = self._draw(seed)
        self._episodes += 1
        self._turn = 0
        if self._strikes():
            return cast("tuple[str, dict[str, Any]]", self._malformed(_MALFORMED_RESETS))
        return self.env.reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a turn, or fail."""
        self._turn += 1
        if self._strikes():
            return cast("tuple[str, float, bool, bool, dict[str, Any]]", self._malformed(_MALFORMED_STEPS))
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, float(reward), terminated, truncated, info

    def _draw(self, task_seed: int | None) -> Fault | None:
        text = f"{self._seed}/{task_seed}/{self._instance}/{self._episodes}"
        draws = random.Random(hashlib.blake2b(text.encode(), digest_size=16).digest())
        left = draws.random()
        at_reset, turn = draws.random() < self._at_reset, draws.randint(1, self._max_turn)
        for kind, rate in self._rates.items():
            if left < rate:
                return Fault(kind, 0 if at_reset else turn)
            left -= rate
        return None

    def _strikes(self) -> bool:
        """Have the fault if its turn has come; returns whether the call shall return something malformed."""
        fault = self.fault
        if fault is None or fault.turn != self._turn:
            return False
        if fault.kind == "slow":
            time.sleep(self._slow_s)
        while fault.kind == "hang":
            time.sleep(3600.0)
        if fault.kind == "error":
            raise RuntimeError(f"FaultyEnv raises at turn {self._turn}")
        if fault.kind == "exit":
            os._exit(3)
        return fault.kind == "malformed"

    def _malformed(self, choices: tuple[Any, ...]) -> Any:
        return random.Random(f"{self._seed}/{self._instance}/{self._episodes}").choice(choices)
