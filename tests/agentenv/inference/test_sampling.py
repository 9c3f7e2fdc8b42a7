"""Sampling: the distribution, its log-probs, filters, and independence of the batch."""

import numpy as np
import pytest
import torch

from agentenv.inference.sampling import SamplingRows, draw, mix_seed, uniforms


def _rows(
    number: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, penalty: float = 1.0
) -> SamplingRows:
    return SamplingRows(
        np.full(number, temperature, np.float32),
        np.full(number, top_p, np.float32),
        np.full(number, top_k, np.int64),
        np.full(number, penalty, np.float32),
    )


def _numbers(number: int, seed: int = 0) -> np.ndarray:
    return uniforms(np.full(number, mix_seed(seed), np.uint64), np.arange(number))


def test_tokens_are_drawn_in_proportion_to_their_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    number = 20_000
    tokens, logprobs = draw(probabilities.log().expand(number, 4), _rows(number), _numbers(number))
    shares = torch.bincount(tokens, minlength=4) / number
    # Three standard deviations of a share of one half: 3 * sqrt(0.25 / 20000) = 0.0106.
    assert torch.allclose(shares, probabilities, atol=0.0107)
    assert torch.allclose(logprobs, probabilities.log()[tokens], atol=1e-6)


def test_a_token_without_probability_is_never_drawn() -> None:
    number = 5_000
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]).expand(number, 5)
    tokens, _ = draw(logits, _rows(number), _numbers(number))
    assert set(tokens.tolist()) == {1, 3}


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-40])
def test_the_ends_of_the_unit_interval_give_the_first_and_last_token_with_probability(number: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.3, 0.1, -torch.inf]])
    tokens, _ = draw(logits, _rows(1), np.array([number]))
    assert tokens.tolist() == [1 if number == 0.0 else 2]


def test_numbers_are_uniform_and_a_function_of_seed_and_index() -> None:
    numbers = _numbers(50_000, seed=3)
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 0.004 and abs(numbers.var() - 1 / 12) < 0.002
    assert np.array_equal(numbers, _numbers(50_000, seed=3))
    assert abs(np.corrcoef(numbers, _numbers(50_000, seed=4))[0, 1]) < 0.02


def test_a_row_is_drawn_alike_in_any_batch() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    numbers = _numbers(8)
    tokens, logprobs = draw(logits, _rows(8), numbers)
    for row in range(8):
        token, logprob = draw(logits[row : row + 1], _rows(1), numbers[row : row + 1])
        assert (int(token), float(logprob)) == (
            int(tokens[row]),
            pytest.approx(float(logprobs[row]), abs=1e-6),
        )


def test_temperature_zero_takes_the_likeliest_token_of_a_point_mass() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = draw(logits, _rows(4, temperature=0.0), _numbers(4))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert logprobs.tolist() == [0.0] * 4


def test_greedy_and_sampling_rows_share_a_batch() -> None:
    logits = torch.zeros(2, 4)
    logits[:, 2] = 5.0
    rows = _rows(2)
    rows.temperature[0] = 0.0
    tokens, logprobs = draw(logits, rows, np.array([0.0, 0.0]))
    assert tokens.tolist() == [2, 0]
    assert logprobs.tolist() == [0.0, pytest.approx(float(logits[1].log_softmax(-1)[0]))]


def test_the_log_prob_is_that_of_the_tempered_distribution() -> None:
    logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(2))
    tokens, logprobs = draw(logits, _rows(6, temperature=0.5), _numbers(6))
    expected = (logits / 0.5).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs, expected, atol=1e-6)


def test_top_k_keeps_k_tokens_and_renormalises() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().expand(3_000, 4)
    tokens, logprobs = draw(logits, _rows(3_000, top_k=2), _numbers(3_000))
    assert set(tokens.tolist()) == {0, 1}
    assert logprobs[tokens == 0][0] == pytest.approx(np.log(0.5 / 0.75), abs=1e-6)


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().expand(3_000, 4)
    tokens, logprobs = draw(logits, _rows(3_000, top_p=0.7), _numbers(3_000))
    assert set(tokens.tolist()) == {1, 3}
    assert logprobs[tokens == 3][0] == pytest.approx(np.log(0.25 / 0.75), abs=1e-6)


def test_a_repetition_penalty_lowers_what_was_seen() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    tokens, logprobs = draw(logits, _rows(1, penalty=2.0), np.array([0.0]), [np.array([0, 1, 1])])
    # 2 / 2 = 1 and -1 * 2 = -2; the unseen token stays at 0.5.
    expected = torch.tensor([1.0, -2.0, 0.5]).log_softmax(-1)
    assert tokens.tolist() == [0]
    assert float(logprobs[0]) == pytest.approx(float(expected[0]), abs=1e-6)
