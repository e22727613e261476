"""A step's requests as arrays for a runner, built with NumPy for all sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loraserve.engine.scheduled import ScheduledRequest
from loraserve.errors import InvariantViolation
from loraserve.memory.devices.base import AdapterHandle
from loraserve.model.states import StateUse
from loraserve.types import Digest

_NO_ROWS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


class DeferredTokens(NamedTuple):
    """Rows that wait for a token of the step in flight, which the host doesn't have yet.

    Attributes:
        rows: [num_deferred] int64, ascending: indices into ``token_ids``, which holds 0 there.
        previous_entries: [num_deferred] int64: entries of the previous step's batch whose sampled
            tokens belong there.
    """

    rows: npt.NDArray[np.int64]
    previous_entries: npt.NDArray[np.int64]


_NOTHING_DEFERRED = DeferredTokens(_NO_ROWS, _NO_ROWS)


@dataclass(frozen=True, slots=True)
class Batch:
    """Arrays of a step, as the runner takes them. Rows of a sequence are contiguous, in order.

    Sequences of an adapter are neighbours.

    Attributes:
        entries: the step's requests; those of the base first, then adapter by adapter.
        token_ids, positions: [num_tokens] int64.
        slots: [num_tokens] int64, ``block * block_size + offset``: destination of the row's K and
            V.
        query_starts: num_entries + 1 numbers: entry i has rows ``query_starts[i]:query_starts[i +
            1]``.
        context_lens: num_entries numbers: tokens of the sequence whose KV exist after this step.
        block_tables: [num_entries, max_blocks] int32, padded with 0.
        states: num_entries: where recurrent states are; None: the base has none.
        logits_rows: [num_logits] int64, ascending: rows whose logits are needed; of an entry with
            proposed tokens, the last known token's row and theirs.
        logits_ranges: each entry's range ``[start, end)`` of the logits; empty if the step doesn't
            reach its last token.
        pooled_rows: [num_pooled] int64, ascending: rows whose hidden states after the last norm are
            needed; none of them is in `logits_rows`.
        pooled_ranges: each entry's range ``[start, end)`` of these rows.
        adapters: (adapter, row_start, row_end), in row order; other rows are the base's. One for
            each adapter, and one more for each of its sequences that begins with rows of the base.
        deferred_tokens: rows that the runner fills in; empty unless another step is in flight.
    """

    entries: list[ScheduledRequest]
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    query_starts: list[int]
    context_lens: list[int]
    block_tables: npt.NDArray[np.int32]
    states: list[StateUse] | None
    logits_rows: npt.NDArray[np.int64]
    logits_ranges: list[tuple[int, int]]
    pooled_rows: npt.NDArray[np.int64]
    pooled_ranges: list[tuple[int, int]]
    adapters: list[tuple[AdapterHandle, int, int]]
    deferred_tokens: DeferredTokens


def build_batch(
    scheduled: Sequence[ScheduledRequest],
    block_size: int,
    handle_of: Callable[[Digest], AdapterHandle],
    previous: Batch | None = None,
) -> Batch:
    """Build the step's arrays.

    Args:
        handle_of: returns an adapter that some scheduled request has pinned.
        previous: batch of the step in flight; None if every result is known.

    Raises:
        InvariantViolation: a token isn't known and ``previous`` doesn't sample it.
    """
    entries = sorted(scheduled, key=_acting_adapter)
    query_starts = [0, *accumulate(entry.num_tokens for entry in entries)]
    tables = _block_tables(entries)
    if query_starts[-1] == len(entries):
        positions, slots = _single_rows(entries, block_size)
    else:
        positions, slots = _rows(entries, tables, block_size)
    # all rows of entries that score their prompt; else those that are sampled from, if any are
    num_logits = [
        entry.num_tokens if entry.is_scored else entry.is_sampled and 1 + len(entry.proposed) for entry in entries
    ]
    logits_ends = [0, *accumulate(num_logits)]
    logits_rows = [range(end - count, end) for end, count in zip(query_starts[1:], num_logits, strict=True)]
    pooled_rows, pooled_ranges = _pooled(entries, query_starts)
    return Batch(
        entries=entries,
        token_ids=_token_ids(entries),
        positions=positions,
        slots=slots,
        query_starts=query_starts,
        context_lens=[entry.end for entry in entries],
        block_tables=tables,
        states=_state_uses(entries),
        logits_rows=np.fromiter(chain.from_iterable(logits_rows), np.int64, logits_ends[-1]),
        logits_ranges=list(pairwise(logits_ends)),
        pooled_rows=pooled_rows,
        pooled_ranges=pooled_ranges,
        adapters=_adapters(entries, query_starts, handle_of),
        deferred_tokens=_deferred_tokens(entries, query_starts, previous),
    )


def _rows(
    entries: Sequence[ScheduledRequest], tables: npt.NDArray[np.int32], block_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Compute the position of each row, and its slot."""
    num_entries = len(entries)
    starts = np.fromiter((entry.start for entry in entries), np.int64, num_entries)
    counts = np.fromiter((entry.num_tokens for entry in entries), np.int64, num_entries)
    owners = np.repeat(np.arange(num_entries), counts)
    positions = np.arange(len(owners)) + np.repeat(starts + counts - np.cumsum(counts), counts)
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return positions, slots


def _single_rows(
    entries: Sequence[ScheduledRequest], block_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Compute the position of each row, and its slot, where each entry has one row.

    With few entries, NumPy's calls take longer than all else that is done for them.
    """
    positions = [entry.start for entry in entries]
    slots = [
        entry.request.blocks[entry.start // block_size] * block_size + entry.start % block_size for entry in entries
    ]
    return np.array(positions, dtype=np.int64), np.array(slots, dtype=np.int64)


def _pooled(
    entries: Sequence[ScheduledRequest], query_starts: Sequence[int]
) -> tuple[npt.NDArray[np.int64], list[tuple[int, int]]]:
    """Collect the rows that are pooled, and each entry's range of them."""
    if all(entry.request.pooler is None for entry in entries):
        return _NO_ROWS, [(0, 0)] * len(entries)
    pieces, ranges, count = [_NO_ROWS], [], 0
    for entry, first in zip(entries, query_starts, strict=False):
        start, end = entry.pooled_tokens
        ranges.append((count, count + end - start))
        if start < end:
            pieces.append(np.arange(first + start, first + end))
            count += end - start
    return np.concatenate(pieces), ranges


def _token_ids(entries: Sequence[ScheduledRequest]) -> npt.NDArray[np.int64]:
    token_ids: list[int] = []
    for entry in entries:
        known = entry.request.token_ids[entry.start : entry.known_end]
        token_ids += known
        if len(known) < entry.known_end - entry.start:
            token_ids += [0] * (entry.known_end - entry.start - len(known))
        token_ids += entry.proposed
    return np.array(token_ids, dtype=np.int64)


def _block_tables(entries: Sequence[ScheduledRequest]) -> npt.NDArray[np.int32]:
    tables = np.zeros((len(entries), max(len(entry.request.blocks) for entry in entries)), dtype=np.int32)
    for i, entry in enumerate(entries):
        blocks = entry.request.blocks
        tables[i, : len(blocks)] = blocks
    return tables


def _state_uses(entries: Sequence[ScheduledRequest]) -> list[StateUse] | None:
    uses = []
    for entry in entries:
        request = entry.request
        if request.state_slot is None:
            return None
        is_resumed = request.resumed is not None and request.resumed.num_tokens == entry.start
        resumed = request.resumed.snapshot if request.resumed is not None and is_resumed else None
        kept = tuple((at, place) for at, place in request.snapshots.items() if entry.start < at <= entry.end)
        uses.append(StateUse(request.state_slot, resumed, kept))
    return uses


def _deferred_tokens(
    entries: Sequence[ScheduledRequest], query_starts: Sequence[int], previous: Batch | None
) -> DeferredTokens:
    sampled = {}
    if previous is not None:
        sampled = {id(entry.request): i for i, entry in enumerate(previous.entries) if entry.is_sampled}
    rows, previous_entries = [], []
    for i, entry in enumerate(entries):
        num_unknown = entry.known_end - len(entry.request.token_ids)
        if num_unknown <= 0:
            continue
        index = sampled.get(id(entry.request))
        # at most one token is unknown: that of the step in flight
        if num_unknown > 1 or index is None:
            raise InvariantViolation(
                f"Request {entry.request.request_id} is scheduled up to token {entry.known_end};"
                f" {num_unknown} of its tokens are unknown, "
                "and the step in flight doesn't sample them."
            )
        rows.append(query_starts[i + 1] - 1)
        previous_entries.append(index)
    if not rows:
        return _NOTHING_DEFERRED
    return DeferredTokens(np.array(rows, dtype=np.int64), np.array(previous_entries, dtype=np.int64))


def _acting_adapter(entry: ScheduledRequest) -> str:
    """Find the digest of the adapter that acts on some of the entry's rows.

    Empty if none does.
    """
    activation = entry.request.activation
    return activation.adapter if activation is not None and activation.start < entry.end else ""


def _adapters(
    entries: Sequence[ScheduledRequest], query_starts: Sequence[int], handle_of: Callable[[Digest], AdapterHandle]
) -> list[tuple[AdapterHandle, int, int]]:
    segments = []
    for digest, group in groupby(range(len(entries)), key=lambda i: _acting_adapter(entries[i])):
        if not digest:
            continue
        members = list(group)
        adapter, row_start = handle_of(Digest(digest)), query_starts[members[0]]
        for i in members:
            num_base_rows = entries[i].num_base_tokens
            if num_base_rows:
                if row_start < query_starts[i]:
                    segments.append((adapter, row_start, query_starts[i]))
                row_start = query_starts[i] + num_base_rows
        segments.append((adapter, row_start, query_starts[members[-1] + 1]))
    return segments
