"""A step's requests as the tensors that the model reads. Built with NumPy, per sequence, never per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from loraserve.engine.scheduler import ScheduledRequest
from loraserve.model.inputs import ModelInputs
from loraserve.types import Digest
from loraserve_kernels.layout import PackedAdapter
from loraserve_kernels.plan import LoraPlan, make_plan


@dataclass(frozen=True, slots=True)
class Batch:
    """What crosses from the scheduler to the runner.

    Attributes:
        entries: the step's requests; base rows first, then adapter by adapter, so that an adapter's rows are one slice.
        inputs: their rows.
        logits_ranges: per entry, its part ``[start, end)`` of the logits; empty when the step doesn't reach its last token.
    """

    entries: list[ScheduledRequest]
    inputs: ModelInputs
    logits_ranges: list[tuple[int, int]]


def build_batch(
    scheduled: Sequence[ScheduledRequest], block_size: int, packed: Callable[[Digest], PackedAdapter]
) -> Batch:
    """Return the step's tensors. ``packed`` gives the weights of an adapter that some scheduled request has pinned."""
    entries = sorted(scheduled, key=_adapter_digest)
    counts = [entry.num_tokens for entry in entries]
    query_starts = [0, *np.cumsum(counts).tolist()]
    token_ids = np.empty(query_starts[-1], dtype=np.int64)
    positions = np.empty(query_starts[-1], dtype=np.int64)
    slots = np.empty(query_starts[-1], dtype=np.int64)
    tables = np.zeros((len(entries), max(len(entry.request.blocks) for entry in entries)), dtype=np.int32)
    logits_rows: list[np.ndarray] = []
    logits_ranges: list[tuple[int, int]] = []
    num_logits = 0
    for i, entry in enumerate(entries):
        request, first, last = entry.request, query_starts[i], query_starts[i + 1]
        token_ids[first:last] = request.token_ids[entry.start : entry.start + entry.num_tokens]
        positions[first:last] = np.arange(entry.start, entry.start + entry.num_tokens)
        tables[i, : len(request.blocks)] = request.blocks
        here = positions[first:last]
        slots[first:last] = tables[i, here // block_size].astype(np.int64) * block_size + here % block_size
        start = first if request.wants_prompt_logprobs else last - 1 if entry.is_sampled else last
        logits_rows.append(np.arange(start, last))
        logits_ranges.append((num_logits, num_logits + last - start))
        num_logits += last - start
    inputs = ModelInputs(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        query_starts=query_starts,
        context_lens=[entry.start + entry.num_tokens for entry in entries],
        block_tables=torch.from_numpy(tables),
        logits_rows=torch.from_numpy(np.concatenate(logits_rows)),
        lora=_plan(entries, query_starts, packed),
    )
    return Batch(entries, inputs, logits_ranges)


def _adapter_digest(entry: ScheduledRequest) -> str:
    return entry.request.adapter.digest if entry.request.adapter is not None else ""


def _plan(
    entries: Sequence[ScheduledRequest], query_starts: Sequence[int], packed: Callable[[Digest], PackedAdapter]
) -> LoraPlan | None:
    segments = []
    for digest, group in groupby(range(len(entries)), key=lambda i: _adapter_digest(entries[i])):
        if digest:
            members = list(group)
            segments.append((packed(Digest(digest)), query_starts[members[0]], query_starts[members[-1] + 1]))
    return make_plan(segments, query_starts[-1])
