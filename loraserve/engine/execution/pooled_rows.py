"""Rows of a step that are pooled: their places in the last layer, and their hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loraserve.engine.execution.batch import Batch
from loraserve.engine.scheduled import StepResult
from loraserve.model.inputs import PooledRows


def pooled_rows(batch: Batch) -> PooledRows:
    """Find the rows of a pooling batch that its last layer continues with, on the host."""
    kept = np.sort(np.concatenate([batch.logits_rows, batch.pooled_rows]))
    places = (np.searchsorted(kept, rows) for rows in (batch.logits_rows, batch.pooled_rows))
    return PooledRows(*(torch.from_numpy(numbers) for numbers in (kept, *places)))


def with_hidden(results: Sequence[StepResult], hidden: Tensor, ranges: Sequence[tuple[int, int]]) -> list[StepResult]:
    """Add the hidden states of its pooled rows to each entry's result.

    Args:
        hidden: [num_pooled, hidden_size], on the host.
        ranges: each entry's part of it.
    """
    return [
        result if start == end else _with_rows(result, hidden[start:end])
        for result, (start, end) in zip(results, ranges, strict=True)
    ]


def _with_rows(result: StepResult, rows: Tensor) -> StepResult:
    if not bool(torch.isfinite(rows).all()):
        return StepResult(is_finite=False)
    return dataclasses.replace(result, hidden=rows)
