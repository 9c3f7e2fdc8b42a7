"""Leases of slots where actions are on their way while slots change hands."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.errors import InfrastructureError
from agentenv_envs.shop.leases import Lease, reserve


def two_on_one_slot(url: str) -> tuple[Lease, Lease]:
    """A second episode gets the slot while an action of the first is on its way."""
    first = reserve([url], 4, 0.0).open(0)
    first.begin()
    return first, reserve([url], 4, 0.0).open(0)


def send_nothing(body: dict[str, Any]) -> None:
    raise AssertionError(f"{body} was sent")


def test_an_action_that_ended_its_episode_leaves_the_slot_to_the_next() -> None:
    first, second = two_on_one_slot("http://a")
    first.ended()
    second.begin()
    second.went_on()
    first.release(send_nothing)
    sent: list[Any] = []
    second.release(sent.append)
    second.release(sent.append)
    assert sent == [{"action": "release_one", "env_idx": 0}] and second.service.count == 0


def test_an_action_after_which_its_episode_goes_on_shows_that_the_slot_was_handed_out_twice() -> None:
    first, second = two_on_one_slot("http://b")
    with pytest.raises(InfrastructureError, match="gave slot 0 to a second episode"):
        first.went_on()
    with pytest.raises(InfrastructureError, match="gave slot 0 to a second episode"):
        second.begin()
    first.release(send_nothing)
    second.release(send_nothing)
    assert (second.service.count, second.service.abandoned, second.service.held) == (0, 2, {})


def test_an_action_that_failed_does_not_release_a_slot_that_another_episode_got() -> None:
    first, second = two_on_one_slot("http://c")
    first.release(send_nothing)
    with pytest.raises(InfrastructureError):
        second.begin()
    assert second.service.count == 0


def test_a_failed_release_still_makes_room() -> None:
    def fail(body: dict[str, Any]) -> None:
        raise InfrastructureError("gone")

    lease = reserve(["http://d"], 1, 0.0).open(0)
    lease.release(fail)
    assert reserve(["http://d"], 1, 0.0).count == 1
