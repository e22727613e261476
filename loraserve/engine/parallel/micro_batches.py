"""Parts of a step that stages of a pipeline compute at the same time, each another one.

A micro-batch has whole sequences: rows of one see each other's keys, rows of several don't. A row's
bits are those of the undivided step.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import torch

from loraserve.model.inputs import ModelInputs, PooledRows
from loraserve_kernels.common.plan import LoraPlan, make_plan

MIN_ROWS = 4
"""Rows of a micro-batch at least: each reads all weights of a stage once more."""


def cut_step(inputs: ModelInputs, max_count: int) -> list[ModelInputs]:
    """Cut a step's rows into at most that many micro-batches, in order, of about equal rows."""
    starts = inputs.query_starts
    num_rows, num_sequences = starts[-1], len(starts) - 1
    count = min(max_count, num_sequences, num_rows // MIN_ROWS)
    if count < 2:
        return [inputs]
    bounds = [0]
    for number in range(1, count):
        # the sequence whose start is nearest to an equal part
        wanted = num_rows * number / count
        after = bisect_left(starts, wanted)
        nearest = after if starts[after] - wanted < wanted - starts[after - 1] else after - 1
        if bounds[-1] < nearest < num_sequences:
            bounds.append(nearest)
    bounds.append(num_sequences)
    return [_part(inputs, first, last) for first, last in pairwise(bounds)]


def _part(inputs: ModelInputs, first: int, last: int) -> ModelInputs:
    """Slice these sequences out of a step."""
    start, end = inputs.query_starts[first], inputs.query_starts[last]
    return ModelInputs(
        token_ids=inputs.token_ids[start:end],
        positions=inputs.positions[start:end],
        slot_mapping=inputs.slot_mapping[start:end],
        query_starts=[row - start for row in inputs.query_starts[first : last + 1]],
        context_lens=inputs.context_lens[first:last],
        block_tables=inputs.block_tables[first:last].contiguous(),
        logits_rows=None if inputs.logits_rows is None else _within(inputs.logits_rows, start, end),
        lora=_plan(inputs.lora, start, end),
        pooled=None if inputs.pooled is None else _pooled(inputs.pooled, start, end),
    )


def _plan(lora: LoraPlan | None, start: int, end: int) -> LoraPlan | None:
    if lora is None:
        return None
    segments = [
        (one.adapter, max(one.row_start, start) - start, min(one.row_end, end) - start)
        for one in lora.segments
        if one.row_start < end and one.row_end > start
    ]
    return make_plan(segments, end - start)


def _pooled(pooled: PooledRows, start: int, end: int) -> PooledRows:
    first, last = torch.searchsorted(pooled.kept, torch.tensor([start, end])).tolist()
    return PooledRows(
        pooled.kept[first:last] - start,
        _within(pooled.logits_places, first, last),
        _within(pooled.hidden_places, first, last),
    )


def _within(numbers: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Select the numbers of a range, counted from its start. They ascend."""
    first, last = torch.searchsorted(numbers, torch.tensor([start, end])).tolist()
    return numbers[first:last] - start
