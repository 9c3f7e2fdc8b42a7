"""The official ShopSimulator service as an environment: POST /api/shop_agent.

    {"action": "reset", "idx": n}                              -> result: env_idx, instruction, ...
    {"action": "interact", "env_idx": i, "response": "..."}    -> result: instruction, done, over, reward, ...
    {"action": "release_one", "env_idx": i}                    -> result: message

Invariants:
- An episode stays with the service that it began on.
- `interact` is sent once: the service has no way to tell a repeated action from a second one.
- Its slot is released once if the episode is left before its end, and never after the end; see `leases`. A process that
  exits in the usual way releases what is left, within seconds.
- An error, which the service reports as HTTP 200 with `result.error`, and an answer that is missing or can't be read
  raise `InfrastructureError`: such an episode is left out of losses and baselines.
- Nothing of the goal, which the service sends along with `reset`, reaches observation or info.
- What is no action is answered here: a policy can't break the service with it, and so get an episode left out.
"""

from __future__ import annotations

import atexit
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentenv.env import BaseEnv
from agentenv.errors import InfrastructureError, UsageError

from .actions import parse_action
from .http_json import NoAnswerError, NotSentError, check_url, post_json
from .leases import Lease, Service, reserve

__all__ = ["API_PATH", "RemoteShopEnv"]

API_PATH: Final = "/api/shop_agent"
_EXIT_S: Final = 5.0
_RULES: Final = (
    "Each turn, write one action: search[keywords] or click[button]; click[buy now] ends the task."
)
_NOT_UNDERSTOOD: Final = "Not understood: write exactly one action, search[keywords] or click[button]."


class _ServiceSaysNoError(InfrastructureError):
    """HTTP 200 with `result.error`."""


_made: weakref.WeakSet[RemoteShopEnv] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """Release what was not closed; a service that does not answer is not waited for."""
    deadline = time.monotonic() + _EXIT_S
    for env in list(_made):
        if time.monotonic() < deadline:
            env._timeout_s = min(env._timeout_s, 1.0)
            env.close()


class RemoteShopEnv(BaseEnv):
    """An episode on one of the official services. Reward and success are the service's.

    Args:
        service_url: such as "http://shop:5000", or a list of them, among which episodes are spread.
        first_task: the least `idx`; which wish it is depends on the file that the service was started with.
        num_tasks: `reset(seed=n)` plays the wish first_task + n % num_tasks; the published evaluation set has 1,459.
        persona: whether the first observation has `instruction_simple` and the persona in place of the whole wish.
        max_turns: actions after which the episode is truncated.
        slots: that this process may hold of each service; the published one has 20.
        timeout_s: of an answer, seconds.
        wait_s: longest wait for one of `slots`, seconds.

    Raises:
        UsageError: an argument is not what it may be.
    """

    worker = "thread"

    def __init__(
        self,
        *,
        service_url: str | Sequence[str] | None = None,
        first_task: int = 0,
        num_tasks: int = 1459,
        persona: bool = False,
        max_turns: int = 30,
        slots: int = 20,
        timeout_s: float = 60.0,
        wait_s: float = 300.0,
    ) -> None:
        if not service_url:
            raise UsageError(
                "service_url is needed: that of ShopSimulator's service, such as http://HOST:5000"
            )
        urls = [service_url] if isinstance(service_url, str) else list(service_url)
        self._urls = tuple(check_url("service_url", url) for url in urls)
        for name, value, least in (
            ("first_task", first_task, 0),
            ("num_tasks", num_tasks, 1),
            ("max_turns", max_turns, 1),
            ("slots", slots, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")
        for name, seconds in (("timeout_s", timeout_s), ("wait_s", wait_s)):
            if (
                isinstance(seconds, bool)
                or not isinstance(seconds, int | float)
                or not 0 < seconds < math.inf
            ):
                raise UsageError(f"{name} must be seconds above 0, got {seconds!r}")
        self._first_task, self._num_tasks, self._persona = first_task, num_tasks, bool(persona)
        self.max_turns: int = max_turns
        self._slots, self._timeout_s, self._wait_s = slots, float(timeout_s), float(wait_s)
        self._lease: Lease | None = None
        self._turns = self._invalid = 0
        _made.add(self)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin the wish of `seed`; a service that is down or full is passed over for another one.

        Raises:
            InfrastructureError: no service began it.
        """
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**40))
        self._leave()
        index = self._first_task + seed % self._num_tasks
        left = list(self._urls)
        while True:
            service = reserve(left, self._slots, self._wait_s)
            left.remove(service.url)
            try:
                result = self._post(service.url, {"action": "reset", "idx": index})
                break
            except (NotSentError, _ServiceSaysNoError):
                service.unreserve(failed=True)
                if not left:
                    raise
            except BaseException:
                # It may have begun: a slot that nobody knows the number of.
                service.unreserve(failed=True)
                raise
        self._lease = self._open(service, result)
        self._turns = self._invalid = 0
        wish = result.get("instruction_simple" if self._persona else "instruction")
        if not isinstance(wish, str):
            self._leave()
            raise InfrastructureError(f"{service.url}: reset gave no instruction")
        persona = result.get("user_persona") if self._persona else None
        who = f"\nShopper: {persona}" if persona else ""
        return f"{_RULES}{who}\n{wish}", {"task_id": f"shop-{index}", "family": "shop"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action.

        Raises:
            RuntimeError: called before `reset` or after the end.
            InfrastructureError: the service failed; the episode is over.
        """
        lease = self._lease
        if lease is None:
            raise RuntimeError("RemoteShopEnv has no running episode: call reset first")
        parsed = parse_action(action)
        if parsed is None or not parsed.value or parsed.verb == "ask":
            self._turns += 1
            self._invalid += 1
            return self._answer(_NOT_UNDERSTOOD, 0.0, False, False, {"action_valid": False})
        request = {"action": "interact", "env_idx": lease.slot, "response": f"{parsed.verb}[{parsed.value}]"}
        lease.begin()
        try:
            result = self._post(lease.service.url, request)
            text, reward, done, over = _read(lease.service.url, result)
        except (_ServiceSaysNoError, NotSentError):
            # The action failed or never came: the episode has not ended, and the slot is still ours.
            self._leave()
            raise
        except BaseException as error:
            # The action may have ended the episode, and the slot may be another's by now.
            self._lease = None
            lease.abandon(repr(error))
            raise
        self._turns += 1
        if done or over:
            lease.ended()
        else:
            lease.went_on()
        info: dict[str, Any] = {"action_valid": True}
        return self._answer(text, reward if done else 0.0, done, over and not done, info, result)

    def close(self) -> None:
        """Release the slot of an episode that has not ended."""
        self._leave()

    def __getstate__(self) -> dict[str, Any]:
        """An episode stays where it is; its copy has none."""
        return {**self.__dict__, "_lease": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is closed at exit, too."""
        self.__dict__.update(state)
        _made.add(self)

    def _leave(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release(lambda body: self._post(lease.service.url, body))

    def _post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a request, which is sent once."""
        answer = post_json(url + API_PATH, body, timeout_s=self._timeout_s)
        result = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(result, dict):
            raise NoAnswerError(f"{url}: the answer to {body['action']} holds no result")
        if result.get("error"):
            raise _ServiceSaysNoError(f"{url}: {body['action']}: {str(result['error'])[:300]}")
        return result

    def _open(self, service: Service, result: Mapping[str, Any]) -> Lease:
        slot = result.get("env_idx")
        if isinstance(slot, bool) or not isinstance(slot, int) or slot < 0:
            service.unreserve(failed=True)
            raise InfrastructureError(f"{service.url}: reset gave no env_idx, but {slot!r}")
        return service.open(slot)

    def _answer(
        self,
        text: str,
        reward: float,
        terminated: bool,
        truncated: bool,
        info: dict[str, Any],
        result: Mapping[str, Any] | None = None,
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        truncated = truncated or (not terminated and self._turns >= self.max_turns)
        info["invalid_actions"] = self._invalid
        if terminated or truncated:
            self._leave()
            info["success"] = reward == 1.0
            info["metrics"] = {
                "turns": self._turns,
                "invalid_actions": self._invalid,
                "bought": float(terminated),
            }
            info["metrics"] |= _marks(result)
        return text, reward, terminated, truncated, info


def _read(url: str, result: Mapping[str, Any]) -> tuple[str, float, bool, bool]:
    """Text, reward, done and over of an answer to `interact`."""
    text = result.get("instruction", result.get("observation"))
    done, over, reward = result.get("done"), result.get("over", result.get("done")), result.get("reward", 0.0)
    good = isinstance(text, str) and isinstance(done, bool) and isinstance(over, bool)
    if (
        not good
        or isinstance(reward, bool)
        or not isinstance(reward, int | float)
        or not math.isfinite(reward)
    ):
        raise NoAnswerError(f"{url}: the answer to interact lacks instruction, done or reward")
    return str(text), float(reward), bool(done), bool(over)


def _marks(result: Mapping[str, Any] | None) -> dict[str, float]:
    """The numbers of `reward_detail`."""
    detail = (result or {}).get("reward_detail")
    if not isinstance(detail, dict):
        return {}
    return {
        str(name): float(value)
        for name, value in detail.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
