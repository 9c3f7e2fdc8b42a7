"""Rows of unequal length in several passes."""

from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentenv_trainers.length_buckets import join_buckets, length_buckets


def cost(buckets, lengths, pass_cost):
    return sum(len(rows) * int(lengths[rows].max()) + pass_cost for rows in buckets)


def test_a_long_row_goes_alone_where_a_pass_costs_less_than_the_padding():
    lengths = torch.tensor([100, 900, 110])  # together 2,700 tokens, apart 1,120
    assert [rows.tolist() for rows in length_buckets(lengths, pass_cost=1_500)] == [[1], [2, 0]]
    assert [rows.tolist() for rows in length_buckets(lengths, pass_cost=1_600)] == [[1, 2, 0]]


def test_on_the_cpu_half_the_length_of_eight_rows_is_worth_a_pass():
    lengths = torch.tensor([128] * 4 + [64] * 4)  # 256 tokens of padding: more than a pass costs here
    assert [rows.numel() for rows in length_buckets(lengths)] == [4, 4]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=7), st.integers(0, 300))
def test_no_other_cut_of_the_sorted_rows_costs_less(rows, pass_cost):
    lengths = torch.tensor(rows)
    buckets = length_buckets(lengths, pass_cost)
    assert sorted(torch.cat(buckets).tolist()) == list(range(len(rows)))
    order = torch.argsort(lengths, descending=True, stable=True)
    least = min(
        cost(torch.tensor_split(order, cuts), lengths, pass_cost)
        for number in range(len(rows))
        for cuts in combinations(range(1, len(rows)), number)
    )
    assert cost(buckets, lengths, pass_cost) == least


def test_parts_come_back_in_the_order_of_the_rows():
    lengths = torch.tensor([1, 3, 2])
    wide = torch.tensor([[1, 0, 0], [2, 3, 4], [5, 6, 0]])
    buckets = length_buckets(lengths, pass_cost=0)
    parts = [wide[rows, : int(lengths[rows].max())] for rows in buckets]
    assert torch.equal(join_buckets(buckets, parts, 3), wide)
