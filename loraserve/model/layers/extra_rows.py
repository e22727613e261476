"""Rows of embedding and head that adapters of a step have beyond the base's.

The base's tables and kernels are left as they are: a token beyond them is embedded as token 0 and
its row written over afterwards, and logits beyond the base's come to the right of them, in a tensor
of their own. A step without such adapters does none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import TypeVar

import torch
from torch import Tensor

from loraserve.model.inputs import GpuInputs, ModelInputs
from loraserve_kernels.common.modules import ExtraRows
from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan

_Inputs = TypeVar("_Inputs", ModelInputs, GpuInputs, ModelInputs | GpuInputs)


def has_extra_rows(lora: LoraPlan | GpuLoraPlan | None) -> bool:
    """Check whether an adapter of the step has rows beyond the base's; on a GPU none has."""
    return isinstance(lora, LoraPlan) and lora.has_extra_rows


def without_extra(token_ids: Tensor, num_rows: int) -> Tensor:
    """Replace tokens beyond a base's rows by 0."""
    return torch.where(token_ids < num_rows, token_ids, 0)


def embeddable(inputs: _Inputs, num_rows: int) -> _Inputs:
    """Replace tokens that the base's table lacks in a step; the same step where it has all."""
    if not has_extra_rows(inputs.lora):
        return inputs
    return replace(inputs, token_ids=without_extra(inputs.token_ids, num_rows))


def write_embeddings(token_ids: Tensor, hidden: Tensor, lora: LoraPlan | GpuLoraPlan | None, num_rows: int) -> None:
    """Write the adapters' own embeddings over the rows of tokens that the base lacks.

    Args:
        token_ids: [num_tokens], as they are in the step.
        hidden: [num_tokens, hidden_size]; other rows stay.
        num_rows: the base's.
    """
    for rows, extra in _extra_of(lora):
        own = token_ids[rows] - num_rows
        is_extra = own >= 0
        hidden[rows][is_extra] = extra.embedding[own[is_extra]]


def with_extra_logits(logits: Tensor, x: Tensor, lora: LoraPlan | GpuLoraPlan | None) -> Tensor:
    """Append the adapters' own logits to the right of the base's.

    The same tensor where no adapter has any. What is to the right of a row's own columns has no
    meaning: -inf, or what a base's cap makes of that.

    Args:
        logits: [num_logits, vocab_size] float32.
        x: [num_logits, hidden_size], what the head has read.
        lora: plan of these rows.
    """
    found = list(_extra_of(lora))
    if not found:
        return logits
    width = logits.shape[1]
    wide = logits.new_empty(logits.shape[0], width + max(extra.num_rows for _, extra in found))
    wide[:, :width] = logits
    wide[:, width:] = -inf
    for rows, extra in found:
        for row in range(rows.start, rows.stop):
            # one by one: a row's numbers are the same in any batch
            wide[row, width : width + extra.num_rows] = extra.head @ x[row].float()
    return wide


def _extra_of(lora: LoraPlan | GpuLoraPlan | None) -> Iterator[tuple[slice, ExtraRows]]:
    """Yield the rows of adapters that have rows beyond the base's, and those."""
    if isinstance(lora, LoraPlan) and lora.has_extra_rows:
        for segment in lora.segments:
            if segment.adapter.extra_rows is not None:
                yield slice(segment.row_start, segment.row_end), segment.adapter.extra_rows
