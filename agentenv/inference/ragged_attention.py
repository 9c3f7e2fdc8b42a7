"""Attention over rows of different length without padding the rest of the model.

A step packs the new tokens of all rows into one sequence ``[1, N]``: rows that decode bring one token each and come
first, rows that prefill bring several. Everything in the model but attention works on single tokens and so never sees
padding. Attention is this module's, registered with transformers' attention interface: it writes the new keys and
values into each row's slot of a persistent cache and attends to that slot alone.

Invariants:

* A token attends to the tokens of its own slot at positions up to its own, nothing else.
* Only positions below the longest row of the step are read, whatever the capacity.
* The cache grows by doubling up to ``max_length``; growing keeps what is in it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentenv.errors import UsageError

IMPLEMENTATION = "agentenv_ragged"
"""Name of :func:`ragged_attention` in transformers' attention interface."""

IntArray = npt.NDArray[np.int64]
_UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "block_indices")
_DENSE_SHARE = 0.5
"""Decoding reads all slots up to the highest one when at least this share of them decodes: skipping the gather of keys
and values (which copies them) is then cheaper than the rows computed in vain. Measured on a CPU."""


class RaggedCache:
    """Keys and values of all layers, ``[num_slots, capacity, kv_heads, head_dim]`` each."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self.capacity = min(256, max_length)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def reserve(self, length: int) -> None:
        """Make room for rows of this many tokens."""
        if length <= self.capacity:
            return
        while self.capacity < length:
            self.capacity = min(2 * self.capacity, self.max_length)
            if self.capacity == self.max_length < length:
                raise ValueError(f"a row of {length} tokens exceeds max_length {self.max_length}")
        for store in (self._keys, self._values):
            for layer, old in store.items():
                store[layer] = old.new_zeros((self.num_slots, self.capacity, *old.shape[2:]))
                store[layer][:, : old.shape[1]] = old

    def write(self, layer: int, keys: Tensor, values: Tensor, flat_index: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values ``[N, kv_heads, head_dim]`` at ``slot * capacity + position``; returns the cache."""
        if layer not in self._keys:
            for store, new in ((self._keys, keys), (self._values, values)):
                store[layer] = new.new_zeros((self.num_slots, self.capacity, *new.shape[1:]))
        for store, new in ((self._keys, keys), (self._values, values)):
            store[layer].view(-1, *new.shape[1:]).index_copy_(0, flat_index, new)
        return self._keys[layer], self._values[layer]


@dataclass
class _Prefill:
    """Rows that bring several tokens, padded to the longest of them for attention only."""

    slots: Tensor
    gather: Tensor  # [P, T] index into the packed tokens; padding points at the row's first token
    scatter: Tensor  # [n] index into [P * T] of each packed token of these rows, in packed order
    positions: Tensor  # [P, T]
    window: int


@dataclass
class RaggedStep:
    """Where each packed token goes and what it sees; built by :meth:`build`."""

    cache: RaggedCache
    flat_index: Tensor
    positions: Tensor
    num_decode: int
    decode_slots: Tensor
    decode_positions: Tensor
    decode_high: int  # 0: gather the decoding slots; else read slots [0, decode_high)
    decode_window: int
    prefills: list[_Prefill]
    masks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls, cache: RaggedCache, slots: IntArray, starts: IntArray, counts: IntArray, device: torch.device
    ) -> RaggedStep:
        """Plan a step.

        Args:
            cache: with room for every position.
            slots: [R] the rows' slots; rows with one new token first, the others by falling count.
            starts: [R] position of each row's first new token.
            counts: [R] number of new tokens, at least 1.
            device: where the model is.
        """
        num_decode = int((counts == 1).sum())
        total = int(counts.sum())
        offsets = np.cumsum(counts) - counts
        row_of = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(total) - offsets[row_of] + starts[row_of]
        prefills: list[_Prefill] = []
        first = num_decode
        while first < len(slots):
            # A group's padding is bounded: its shortest row is at least half as long as its longest.
            last = first + int((counts[first:] * 2 >= counts[first]).sum())
            prefills.append(
                _prefill(
                    slots[first:last], starts[first:last], counts[first:last], int(offsets[first]), device
                )
            )
            first = last
        decode_slots, decode_starts = slots[:num_decode], starts[:num_decode]
        high = int(decode_slots.max()) + 1 if num_decode else 0
        dense = num_decode >= _DENSE_SHARE * high
        decode_positions = decode_starts
        if dense and num_decode:
            decode_positions = np.zeros(high, np.int64)
            decode_positions[decode_slots] = decode_starts
        return cls(
            cache=cache,
            flat_index=_tensor(slots[row_of] * cache.capacity + positions, device),
            positions=_tensor(positions, device),
            num_decode=num_decode,
            decode_slots=_tensor(decode_slots, device),
            decode_positions=_tensor(decode_positions, device),
            decode_high=high if dense else 0,
            decode_window=int(decode_starts.max()) + 1 if num_decode else 0,
            prefills=prefills,
        )

    def mask(
        self, key: str | int, positions: Tensor, window: int, sliding: int | None, dtype: torch.dtype
    ) -> Tensor:
        """Additive mask ``[rows, T, window]``, made once per step and kind of layer."""
        cached = self.masks.get((key, sliding, dtype))
        if cached is None:
            columns = torch.arange(window, device=positions.device)
            hidden = columns > positions[..., None]
            if sliding is not None:
                hidden |= columns <= positions[..., None] - sliding
            cached = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(
                hidden, -torch.inf
            )
            self.masks[key, sliding, dtype] = cached
        return cached


_current = threading.local()


@contextmanager
def running(step: RaggedStep) -> Iterator[None]:
    """Make this thread's forward passes inside the block serve this step."""
    _current.step = step
    try:
        yield
    finally:
        del _current.step


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function in the form of transformers' interface.

    Args:
        module: the attention layer; its ``layer_idx`` names the cache's layer.
        query: [1, heads, N, head_dim], rotated already.
        key: [1, kv_heads, N, head_dim]; value alike.
        attention_mask: unused: transformers makes none for an attention function it does not know.
        scaling: factor on the scores; None: 1/sqrt(head_dim).
        sliding_window: tokens that a layer of this kind looks back, its own included.

    Returns:
        [1, N, heads, head_dim] and no weights.

    Raises:
        UsageError: the model's attention has a part that is not implemented here.
    """
    step: RaggedStep = _current.step
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise UsageError(
                f"TransformersEngine does not support attention with {name!r} ({type(module).__name__})"
            )
    packed = query[0].transpose(0, 1)
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = step.cache.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), step.flat_index)
    parts = [_decode(step, packed, keys, values, scaling, sliding_window)] if step.num_decode else []
    for number, prefill in enumerate(step.prefills):
        mask = step.mask(number, prefill.positions, prefill.window, sliding_window, packed.dtype)
        attended = F.scaled_dot_product_attention(
            packed[prefill.gather].transpose(1, 2),
            keys[:, : prefill.window].index_select(0, prefill.slots).transpose(1, 2),
            values[:, : prefill.window].index_select(0, prefill.slots).transpose(1, 2),
            attn_mask=mask[:, None],
            scale=scaling,
            enable_gqa=True,
        )
        parts.append(attended.transpose(1, 2).flatten(0, 1).index_select(0, prefill.scatter))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


def _decode(
    step: RaggedStep, packed: Tensor, keys: Tensor, values: Tensor, scaling: float | None, sliding: int | None
) -> Tensor:
    """Attention of the rows with one new token: ``[num_decode, heads, head_dim]``."""
    queries = packed[: step.num_decode]
    heads, head_dim = queries.shape[1:]
    window = step.decode_window
    keys, values = keys[:, :window], values[:, :window]
    if step.decode_high:
        keys, values = keys[: step.decode_high], values[: step.decode_high]
        dense = queries.new_zeros((step.decode_high, heads, head_dim))
        queries = dense.index_copy_(0, step.decode_slots, queries)
    else:
        keys, values = keys.index_select(0, step.decode_slots), values.index_select(0, step.decode_slots)
    kv_heads = keys.shape[2]
    groups = heads // kv_heads
    mask = step.mask("decode", step.decode_positions[:, None], window, sliding, packed.dtype)
    # The query heads of one key head stand where a sequence would: no copy of keys for grouped heads.
    attended = F.scaled_dot_product_attention(
        queries.view(-1, kv_heads, groups, head_dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask[:, None].expand(-1, 1, groups, -1),
        scale=scaling,
    )
    attended = attended.reshape(-1, heads, values.shape[-1])
    return attended.index_select(0, step.decode_slots) if step.decode_high else attended


def _prefill(
    slots: IntArray, starts: IntArray, counts: IntArray, offset: int, device: torch.device
) -> _Prefill:
    longest = int(counts[0])
    columns = np.arange(longest)
    inside = columns < counts[:, None]
    offsets = offset + np.cumsum(counts) - counts
    gather = np.where(inside, offsets[:, None] + columns, offsets[:, None])
    return _Prefill(
        slots=_tensor(slots, device),
        gather=_tensor(gather, device),
        scatter=_tensor(np.flatnonzero(inside), device),
        positions=_tensor(np.where(inside, starts[:, None] + columns, 0), device),
        window=int((starts + counts).max()),
    )


def _tensor(array: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
