"""Which episode sits in which row of the key/value cache, and what each row still has to compute.

All per-token state is in arrays over the slots, so that a step costs a handful of numpy calls whatever the number of
rows.

Invariants:

* ``written[s] <= length[s]``: keys and values are there for the first ``written`` of the ``length`` known tokens. The
  last token of an active row is never written before it is needed, so every active row has something to compute.
* A slot between turns keeps its keys and values for the episode's next turn. It is reused for the longest common
  prefix of ids, and only for weights of ``prefix_version`` unless stale prefixes are allowed.
* When slots are short, the one that has waited longest between turns is taken; active ones never are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agentenv.inference.protocol import FinishReason, Generation, GenerationRequest
from agentenv.inference.sampling import IntArray, SamplingRows, mix_seed, uniforms

_FREE = -1


@dataclass
class Work:
    """The packed tokens of one step."""

    slots: IntArray
    """[R] rows with one new token first, then the others by falling count."""
    starts: IntArray
    counts: IntArray
    ids: IntArray
    """[N] packed token ids."""
    complete: IntArray
    """Indices into the rows whose last known token is in this step: these sample."""
    last: IntArray
    """For each complete row the index of its last token in the packed ids."""


class Slots:
    """State of all rows. Not thread-safe: the engine's thread alone uses it."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        self.max_length = max_length
        self.ids = np.zeros((num_slots, 256), np.int64)
        self.logprobs = np.zeros((num_slots, 256), np.float32)
        self.versions = np.zeros((num_slots, 256), np.int64)
        self.length = np.zeros(num_slots, np.int64)
        self.written = np.zeros(num_slots, np.int64)
        self.turn_start = np.zeros(num_slots, np.int64)
        self.limit = np.zeros(num_slots, np.int64)
        self.active = np.zeros(num_slots, np.bool_)
        self.prefix_version = np.full(num_slots, _FREE, np.int64)
        self.last_used = np.zeros(num_slots, np.int64)
        self.admitted = np.zeros(num_slots, np.int64)
        self.seeds = np.zeros(num_slots, np.uint64)
        self.stop_ids = np.full((num_slots, 4), _FREE, np.int64)
        self.rows = SamplingRows(
            temperature=np.ones(num_slots, np.float32),
            top_p=np.ones(num_slots, np.float32),
            top_k=np.zeros(num_slots, np.int64),
            repetition_penalty=np.ones(num_slots, np.float32),
        )
        self.tickets: list[Any] = [None] * num_slots
        """Whatever the engine wants to find again at a row's end."""
        self._episodes: list[str] = [""] * num_slots
        self._slot_of: dict[str, int] = {}
        self._clock = 0

    @property
    def num_active(self) -> int:
        """Rows in the middle of a turn."""
        return int(self.active.sum())

    def admit(
        self, request: GenerationRequest, ticket: Any, *, version: int, seed: int, allow_stale: bool
    ) -> int | None:
        """Give the request a slot.

        Args:
            request: its prompt is shorter than ``max_length``.
            ticket: kept in ``tickets`` until the end of the turn.
            version: of the weights now; a reused prefix must be of this version unless ``allow_stale``.
            seed: of the row's random numbers.
            allow_stale: reuse a prefix that older weights computed.

        Returns:
            how many prompt tokens are reused; None if all slots are active.
        """
        prompt = np.asarray(request.prompt_ids, np.int64)
        slot = self._slot_of.get(request.episode_id, _FREE) if request.episode_id else _FREE
        if slot != _FREE and self.active[slot]:
            slot = _FREE  # two turns of one episode at once: the second gets a slot of its own
        reused = 0
        if slot == _FREE:
            slot = self._take()
            if slot == _FREE:
                return None
        elif allow_stale or self.prefix_version[slot] == version:
            # The last prompt token is always computed: its logits give the first sampled one.
            comparable = min(int(self.written[slot]), len(prompt) - 1)
            differs = np.flatnonzero(self.ids[slot, :comparable] != prompt[:comparable])
            reused = int(differs[0]) if differs.size else comparable
        sampling = request.sampling
        self._assign(slot, request.episode_id)
        self._widen(min(len(prompt) + sampling.max_tokens, self.max_length))
        self.ids[slot, : len(prompt)] = prompt
        self.length[slot] = self.turn_start[slot] = len(prompt)
        self.written[slot] = reused
        self.limit[slot] = min(len(prompt) + sampling.max_tokens, self.max_length)
        self.prefix_version[slot] = version if reused == 0 else min(version, self.prefix_version[slot])
        self.seeds[slot] = mix_seed(seed)
        self.rows.temperature[slot] = sampling.temperature
        self.rows.top_p[slot] = sampling.top_p
        self.rows.top_k[slot] = sampling.top_k
        self.rows.repetition_penalty[slot] = sampling.repetition_penalty
        stops = sampling.stop_token_ids
        if len(stops) > self.stop_ids.shape[1]:
            wider = np.full((len(self.stop_ids), len(stops)), _FREE, np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = _FREE
        self.stop_ids[slot, : len(stops)] = stops
        self.tickets[slot] = ticket
        self.active[slot] = True
        self._clock += 1
        self.admitted[slot] = self._clock
        return reused

    def plan(self, max_prefill: int) -> Work:
        """Tokens to compute next; rows that prefill share ``max_prefill`` tokens a step."""
        slots = np.flatnonzero(self.active)
        pending = self.length[slots] - self.written[slots]
        if int(pending.max()) > 1:
            # First come, first served: a stream of short observations must not starve a long prompt.
            order = np.lexsort((self.admitted[slots], pending > 1))
            slots, pending = slots[order], pending[order]
            first = int((pending == 1).sum())
            budget = max_prefill - np.concatenate(([0], np.cumsum(pending[first:])[:-1]))
            taken = np.concatenate((pending[:first], np.minimum(pending[first:], np.maximum(budget, 0))))
            keep = taken > 0
            slots, pending, taken = slots[keep], pending[keep], taken[keep]
            # By count as RaggedStep wants it: ones first, the others falling.
            order = np.lexsort((np.where(taken == 1, 0, -taken), taken > 1))
            slots, pending, counts = slots[order], pending[order], taken[order]
        else:
            counts = pending
        starts = self.written[slots]
        ends = np.cumsum(counts)
        row_of = np.repeat(np.arange(len(slots)), counts)
        ids = self.ids[slots[row_of], np.arange(int(ends[-1])) - (ends - counts)[row_of] + starts[row_of]]
        complete = np.flatnonzero(counts == pending)
        return Work(slots, starts, counts, ids, complete, ends[complete] - 1)

    def uniforms(self, slots: IntArray) -> npt.NDArray[np.float64]:
        """[R] random numbers for each row's next token."""
        return uniforms(self.seeds[slots], self.length[slots] - self.turn_start[slots])

    def sampling_rows(self, slots: IntArray) -> SamplingRows:
        """Sampling parameters of these rows."""
        rows = self.rows
        return SamplingRows(
            rows.temperature[slots], rows.top_p[slots], rows.top_k[slots], rows.repetition_penalty[slots]
        )

    def advance(
        self, work: Work, tokens: IntArray, logprobs: npt.NDArray[np.float32], version: int
    ) -> list[tuple[int, FinishReason]]:
        """Record a step.

        Args:
            work: what was computed.
            tokens: [len(work.complete)] sampled tokens.
            logprobs: alike.
            version: of the weights that sampled.

        Returns:
            slots whose turn ended, and why.
        """
        self.written[work.slots] += work.counts
        slots = work.slots[work.complete]
        place = self.length[slots]
        self.ids[slots, place] = tokens
        self.logprobs[slots, place] = logprobs
        self.versions[slots, place] = version
        self.length[slots] = place + 1
        stopped = (self.stop_ids[slots] == tokens[:, None]).any(1)
        full = place + 1 >= self.limit[slots]
        return [
            (int(slots[row]), "stop" if stopped[row] else "length")
            for row in np.flatnonzero(stopped | full).tolist()
        ]

    def finish(self, slot: int, reason: FinishReason) -> tuple[Any, Generation]:
        """End a row's turn; its keys and values stay for the episode's next turn."""
        start, end = int(self.turn_start[slot]), int(self.length[slot])
        generation = Generation(
            token_ids=self.ids[slot, start:end].tolist(),
            logprobs=self.logprobs[slot, start:end].tolist(),
            policy_versions=self.versions[slot, start:end].tolist(),
            finish_reason=reason,
        )
        ticket, self.tickets[slot] = self.tickets[slot], None
        self.active[slot] = False
        self._clock += 1
        self.last_used[slot] = self._clock
        if not self._episodes[slot]:
            self._assign(slot, "")
            self.prefix_version[slot] = _FREE
        return ticket, generation

    def release(self, episode_id: str) -> None:
        """Forget an episode between turns; its slot is the first to be taken."""
        slot = self._slot_of.get(episode_id)
        if slot is not None and not self.active[slot]:
            self._assign(slot, "")
            self.prefix_version[slot] = _FREE

    def _take(self) -> int:
        idle = np.flatnonzero(~self.active)
        if not idle.size:
            return _FREE
        free = idle[self.prefix_version[idle] == _FREE]
        # The lowest free slot keeps the decoding rows together, which dense attention likes.
        return int(free[0]) if free.size else int(idle[np.argmin(self.last_used[idle])])

    def _assign(self, slot: int, episode_id: str) -> None:
        old = self._episodes[slot]
        if old and self._slot_of.get(old) == slot:
            del self._slot_of[old]
        self._episodes[slot] = episode_id
        if episode_id:
            self._slot_of[episode_id] = slot

    def _widen(self, length: int) -> None:
        width = self.ids.shape[1]
        if length < width:
            return
        while width <= length:
            width *= 2
        for name in ("ids", "logprobs", "versions"):
            old = getattr(self, name)
            new = np.zeros((len(old), width), old.dtype)
            new[:, : old.shape[1]] = old
            setattr(self, name, new)
