"""Redundancy against worked numbers, against counting, and against the simulation of figure 10."""

import random

import pytest

from agentenv.errors import UsageError
from agentenv.planning import least_redundancy, ready_share


def test_without_redundancy_every_episode_must_be_fast() -> None:
    assert ready_share(groups=4, size=2, slow_share=0.1) == pytest.approx(0.9**8)


def test_one_spare_member_stands_in_for_one_slow_one() -> None:
    # Two of three fast: 0.9^3 + 3 * 0.1 * 0.9^2 = 0.972; two such groups.
    share = ready_share(groups=2, size=2, slow_share=0.1, redundant_members=1)
    assert share == pytest.approx(0.972**2)


def test_one_spare_group_stands_in_for_one_that_is_not_whole() -> None:
    # Groups of one, slow with 0.2: at most one slow of three, 0.8^3 + 3 * 0.2 * 0.8^2 = 0.896.
    assert ready_share(groups=2, size=1, slow_share=0.2, redundant_groups=1) == pytest.approx(0.896)


def test_the_share_is_that_of_drawn_batches() -> None:
    rng = random.Random(0)
    groups, size, spare_groups, spare_members, slow = 4, 3, 1, 1, 0.15

    def ready() -> bool:
        drawn = [
            sum(rng.random() < slow for _ in range(size + spare_members))
            for _ in range(groups + spare_groups)
        ]
        return sum(count > spare_members for count in drawn) <= spare_groups

    share = ready_share(
        groups=groups,
        size=size,
        slow_share=slow,
        redundant_groups=spare_groups,
        redundant_members=spare_members,
    )
    assert sum(ready() for _ in range(20_000)) / 20_000 == pytest.approx(
        share, abs=0.012
    )  # four standard errors


def test_of_the_layouts_that_do_the_one_with_the_fewest_episodes_is_taken() -> None:
    best = least_redundancy(batch=256, size=8, slow_share=0.18)
    started = (32 + best.groups) * (8 + best.members)
    assert best.ready_share >= 0.95 and best.cost == started / 256
    for members in range(17):
        for groups in range(97):
            if (32 + groups) * (8 + members) < started:
                share = ready_share(
                    groups=32, size=8, slow_share=0.18, redundant_groups=groups, redundant_members=members
                )
                assert share < 0.95


def test_the_paper_s_layout_of_figure_10_is_ready_in_most_steps_and_its_smaller_ones_are_not() -> None:
    shares = {
        (groups, members): ready_share(
            groups=32, size=8, slow_share=0.18, redundant_groups=groups, redundant_members=members
        )
        for groups, members in ((0, 0), (4, 1), (4, 3), (4, 4))
    }
    # As the simulated seconds of whole groups have it: 243, 223, 132 and 55.
    assert shares[0, 0] < shares[4, 1] < 0.01 < shares[4, 3] < 0.8 < shares[4, 4]


def test_a_group_of_one_gets_spare_groups_alone() -> None:
    assert least_redundancy(batch=32, size=1, slow_share=0.05).members == 0


def test_nothing_slow_needs_nothing() -> None:
    best = least_redundancy(batch=32, size=4, slow_share=0.0)
    assert (best.groups, best.members, best.ready_share, best.cost) == (0, 0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": 5}, "--group-size is 5, must divide --batch, which is 32"),
        ({"slow_share": 1.0}, "--slow-share is 1.0"),
        ({"slow_share": 0.95}, "not even 4 times the batch"),
    ],
)
def test_what_is_out_of_range_is_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        least_redundancy(**{"batch": 32, "size": 4, "slow_share": 0.1, **changes})  # type: ignore[arg-type]
