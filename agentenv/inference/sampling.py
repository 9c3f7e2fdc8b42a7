"""Drawing one token per row, with the exact log-prob of the distribution it was drawn from.

Invariants:

* A token is the inverse of its row's cumulative distribution at one uniform number, so it depends on that row's logits
  and number alone: the composition of the batch does not matter.
* The number is a function of (seed, index of the token), so a request with a seed repeats.
* The log-prob is the float32 log-softmax of the logits after penalty, temperature, top-k and top-p; a greedy row
  (temperature 0) samples from a point mass, whose log-prob is 0.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNIFORM_BITS = 40


@dataclass
class SamplingRows:
    """Sampling parameters of the rows of one step, each ``[R]``."""

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: IntArray
    repetition_penalty: npt.NDArray[np.float32]


def uniforms(seeds: npt.NDArray[np.uint64], indices: IntArray) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) from a counter-based generator (SplitMix64).

    Args:
        seeds: [R] one per request.
        indices: [R] index of the token within its sequence.

    Returns:
        [R] multiples of 2**-40; the largest is below 1 by more than float64 rounding, which :func:`draw` relies on.
    """
    with np.errstate(over="ignore"):
        state = seeds + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return np.asarray((state >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) * 2.0**-_UNIFORM_BITS)


def mix_seed(seed: int) -> int:
    """A 64-bit state from any integer seed; neighbouring seeds give unrelated streams."""
    state = (seed * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) & 0xFFFFFFFFFFFFFFFF
    state ^= state >> 32
    return (state * 0xDABA0B6EB09322E3) & 0xFFFFFFFFFFFFFFFF


def draw(
    logits: Tensor,
    rows: SamplingRows,
    numbers: npt.NDArray[np.float64],
    history: list[IntArray] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: [R, V] of any float type.
        rows: sampling parameters.
        numbers: [R] from :func:`uniforms`.
        history: ids of each row's sequence so far; needed where a repetition penalty is not 1.

    Returns:
        tokens [R] int64 and log-probs [R] float32, on the logits' device.
    """
    scores = logits.float()
    penalised = np.flatnonzero(rows.repetition_penalty != 1.0)
    if penalised.size:
        scores = _penalise(scores, rows.repetition_penalty, penalised, history or [])
    greedy = rows.temperature == 0.0
    if greedy.all():
        return scores.argmax(-1), torch.zeros(len(scores), device=scores.device)
    if not (rows.temperature == 1.0).all():
        temperature = torch.from_numpy(np.where(greedy, np.float32(1.0), rows.temperature)).to(scores.device)
        scores = scores / temperature[:, None]
    top = scores.argmax(-1) if greedy.any() else None
    if (rows.top_k > 0).any():
        scores = _keep_top_k(scores, rows.top_k)
    if (rows.top_p < 1.0).any():
        scores = _keep_top_p(scores, rows.top_p)
    logprobs = torch.log_softmax(scores, -1)
    cumulative = logprobs.double().exp_().cumsum_(-1)
    # Scaling by the total makes rounding of the sum harmless; a number below 1 then stays below the total.
    threshold = torch.from_numpy(numbers).to(scores.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=scores.shape[-1] - 1)
    chosen = logprobs.gather(-1, tokens)[:, 0]
    tokens = tokens[:, 0]
    if top is not None:
        is_greedy = torch.from_numpy(greedy).to(scores.device)
        tokens = torch.where(is_greedy, top, tokens)
        chosen = chosen.masked_fill(is_greedy, 0.0)
    return tokens, chosen


def _penalise(
    scores: Tensor, penalty: npt.NDArray[np.float32], rows: IntArray, history: list[IntArray]
) -> Tensor:
    scores = scores.clone()
    for row in rows.tolist():
        seen = torch.from_numpy(np.unique(history[row])).to(scores.device)
        values = scores[row, seen]
        factor = float(penalty[row])
        scores[row, seen] = torch.where(values > 0, values / factor, values * factor)
    return scores


def _keep_top_k(scores: Tensor, top_k: IntArray) -> Tensor:
    vocabulary = scores.shape[-1]
    limits = np.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k)
    descending = scores.topk(int(limits.max()), dim=-1).values
    lowest = descending.gather(-1, torch.from_numpy(limits - 1).to(scores.device)[:, None])
    return scores.masked_fill(scores < lowest, -torch.inf)


def _keep_top_p(scores: Tensor, top_p: npt.NDArray[np.float32]) -> Tensor:
    ordered, order = scores.sort(-1, descending=True)
    probabilities = torch.softmax(ordered, -1)
    before = probabilities.cumsum(-1) - probabilities
    drop = before >= torch.from_numpy(top_p).to(scores.device)[:, None]
    drop[:, 0] = False
    return scores.masked_fill(drop.gather(-1, order.argsort(-1)), -torch.inf)
