"""A small base that proposes what the large one probably samples next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch.nn import functional as F

from loraserve.engine.execution.sampler import Place, Sampler
from loraserve.engine.request import Request
from loraserve.memory.memory_plan import DRAFT_SEQUENCES
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.types import BaseSpec

MAX_CATCH_UP = 256
"""Rows of the draft base's first pass in a step, at most: a prompt that it hasn't read yet is
computed in several steps, so that others' next tokens don't wait for all of it.
"""


@dataclass(slots=True, eq=False)
class _Seat:
    """A sequence's place in the draft base's cache.

    Attributes:
        number: of the seat.
        num_known: tokens of the request that were known when its keys and values were computed.
        guessed: tokens behind these whose keys and values are there too: proposed ones.
    """

    number: int
    num_known: int = 0
    guessed: tuple[int, ...] = ()

    def num_computed_tokens(self, token_ids: Sequence[int]) -> int:
        """Count a request's first tokens that have keys and values.

        Guesses that were right have. The last token always has to be computed, since the next one
        is sampled from its row.
        """
        count = self.num_known
        for token_id in self.guessed:
            if count >= len(token_ids) or token_ids[count] != token_id:
                break
            count += 1
        return min(count, len(token_ids) - 1)


@dataclass(slots=True, eq=False)
class Drafted:
    """A request that tokens are drafted for: what is computed of it, and what was proposed.

    Attributes:
        rows: tokens to compute in the next pass, the first of which is at `start`.
        goal: number of tokens to draft.
    """

    request: Request
    seat: _Seat
    start: int
    rows: list[int]
    goal: int
    said: list[int]
    is_caught_up: bool = True


class DraftBase:
    """Propose tokens of a few requests by a base of few weights, which has no adapters.

    It samples as the request does: with its parameters and the random numbers of the tokens' own
    positions. So where it is as sure as the large base, drawn tokens agree as often as the
    likeliest ones. Its cache has a seat for each request of a step, of a fixed number of tokens;
    that of the least recently used goes to another.

    Called on the steps' thread alone.
    """

    def __init__(self, decoder: Decoder, kv: KVTensors, base: BaseSpec) -> None:
        """Begin without sequences.

        Args:
            kv: its cache, which is divided into `DRAFT_SEQUENCES` seats.
            base: the large one.
        """
        self._decoder, self._kv = decoder, kv
        self._sampler = Sampler(base.eos_token_ids, base.vocab_size)
        self._num_shared = min(decoder.spec.vocab_size, base.vocab_size)
        self._num_missing = base.vocab_size - self._num_shared
        blocks = kv.k[0].shape[0] // DRAFT_SEQUENCES
        self.max_tokens = min(blocks * kv.block_size, decoder.spec.max_model_len)
        """Tokens of a sequence, at most."""
        self.kv_num_bytes = sum(t.nbytes for t in (*kv.k, *kv.v))
        """Bytes of its cache."""
        self._tables = np.arange(DRAFT_SEQUENCES * blocks, dtype=np.int32).reshape(DRAFT_SEQUENCES, blocks)
        self._free = list(range(DRAFT_SEQUENCES))
        # the least recently used first
        self._seats: dict[Request, _Seat] = {}

    def max_count(self, request: Request) -> int:
        """Compute how many tokens can be drafted for a request.

        None, if it is too long, or its adapter has tokens that the large base lacks.
        """
        if request.num_extra_rows:
            return 0
        return max(0, self.max_tokens - len(request.token_ids))

    def num_behind(self, request: Request) -> int:
        """Count a request's tokens that must be computed before one can be proposed."""
        seat = self._seats.get(request)
        return len(request.token_ids) - (0 if seat is None else seat.num_computed_tokens(request.token_ids))

    def begin(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Drafted]:
        """Give requests their seats; return what `advance` works on.

        Args:
            requests: `DRAFT_SEQUENCES` at most.
            counts: tokens to draft for each.
        """
        drafted = []
        room = MAX_CATCH_UP
        for request in requests:
            if request in self._seats:
                # none of them gives its seat to another
                self._seats[request] = self._seats.pop(request)
        for request, count in zip(requests, counts, strict=True):
            seat = self._take_seat(request)
            start = seat.num_computed_tokens(request.token_ids)
            rows = request.token_ids[start : start + room]
            if not rows or max(rows) >= self._decoder.spec.vocab_size:
                # the large base may have tokens that this one lacks
                continue
            room -= len(rows)
            is_caught_up = start + len(rows) == len(request.token_ids)
            drafted.append(Drafted(request, seat, start, rows, count, [], is_caught_up))
        return drafted

    def _take_seat(self, request: Request) -> _Seat:
        seat = self._seats.get(request)
        if seat is None:
            if not self._free:
                self.forget(next(iter(self._seats)))
            seat = self._seats[request] = _Seat(self._free.pop())
        return seat

    def forget(self, request: Request) -> None:
        """Give a request's seat to others; no-op if it has none."""
        seat = self._seats.pop(request, None)
        if seat is not None:
            self._free.append(seat.number)

    def rehearse(self, num_sequences: int, num_rows: int) -> None:
        """Compute a pass of no request, which others may measure. All seats are free afterwards.

        Args:
            num_sequences: `DRAFT_SEQUENCES` at most.
            num_rows: of each.
        """
        for request in list(self._seats):
            self.forget(request)
        rows = [0] * min(num_rows, self.max_tokens)
        logits = self._decoder.forward(self._inputs([(seat, 0, rows) for seat in range(num_sequences)]), self._kv)
        logits.argmax(dim=1)

    @torch.inference_mode()
    def advance(self, drafted: Sequence[Drafted]) -> list[Drafted]:
        """Compute the next pass: draft one more token for each request.

        Return those that continue: they need more tokens, and have their last one.
        """
        parts = [(one.seat.number, one.start, one.rows) for one in drafted]
        logits = self._decoder.forward(self._inputs(parts), self._kv)
        finite = torch.isfinite(logits.sum(dim=1)).tolist()
        # as wide as the large base's, whose tokens a request's parameters may name
        logits = logits[:, : self._num_shared]
        if self._num_missing:
            logits = F.pad(logits, (0, self._num_missing), value=-inf)
        going = []
        for one, row, is_finite in zip(drafted, logits, finite, strict=True):
            request, seat = one.request, one.seat
            end = one.start + len(one.rows)
            num_tokens = len(request.token_ids)
            seat.num_known, seat.guessed = min(end, num_tokens), tuple(one.said)
            if not one.is_caught_up or not is_finite:
                continue
            token_id = self._sampler.next_token(Place(request, num_tokens + len(one.said), tuple(one.said)), row)
            one.said.append(token_id)
            if len(one.said) < one.goal and token_id < self._decoder.spec.vocab_size:
                one.start, one.rows = end, [token_id]
                going.append(one)
        return going

    def _inputs(self, parts: Sequence[tuple[int, int, list[int]]]) -> ModelInputs:
        """Build a pass's rows.

        Args:
            parts: seats, and the tokens that each computes from a position on.
        """
        counts = np.array([len(rows) for _, _, rows in parts])
        starts = np.array([start for _, start, _ in parts])
        ends = np.cumsum(counts)
        owners = np.repeat(np.arange(len(parts)), counts)
        positions = np.arange(ends[-1]) + np.repeat(starts + counts - ends, counts)
        tables, size = self._tables[[seat for seat, _, _ in parts]], self._kv.block_size
        slots = tables[owners, positions // size].astype(np.int64) * size + positions % size
        num_blocks = -(-int((starts + counts).max()) // size)
        return ModelInputs(
            token_ids=torch.tensor([token_id for _, _, rows in parts for token_id in rows], dtype=torch.int64),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            query_starts=[0, *ends.tolist()],
            context_lens=(starts + counts).tolist(),
            block_tables=torch.from_numpy(np.ascontiguousarray(tables[:, :num_blocks])),
            logits_rows=torch.from_numpy(ends - 1),
            lora=None,
        )
