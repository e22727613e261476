"""Rows of numbers in pages of one size, where `sizes.Placing` found room for them: how they are
written there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve_kernels.common.sizes import UNIT_BYTES as UNIT_BYTES
from loraserve_kernels.common.sizes import Placing as Placing
from loraserve_kernels.common.sizes import Runs as Runs
from loraserve_kernels.common.sizes import row_num_bytes as row_num_bytes
from loraserve_kernels.reference import quantize_rows

_ROWS_AT_ONCE = 4096
"""Quantized at a time: a whole vocabulary's rows in float32 would take gigabytes."""


def write_rows(pages: Tensor, runs: Runs, rows: Tensor, dtype: torch.dtype) -> npt.NDArray[np.float32]:
    """Copy rows [n, width] to where they were placed; return what each is multiplied with to be
    itself: 1, or its scale in int8.
    """
    scales, num_rows = np.ones(rows.shape[0], dtype=np.float32), rows.shape[0]
    if dtype != torch.int8:
        _copy(pages, runs, rows, 0, dtype)
        return scales
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        codes, scale = quantize_rows(rows[first : first + _ROWS_AT_ONCE].float(), 127)
        _copy(pages, runs, codes, first, dtype)
        scales[first : first + _ROWS_AT_ONCE] = scale.numpy()
    return scales


def starts_of(runs: Runs, width: int, dtype: torch.dtype) -> npt.NDArray[np.int64]:
    """Return the start of each row, in bytes."""
    num_bytes = row_num_bytes(width, dtype)
    return np.concatenate(
        [np.zeros(0, dtype=np.int64), *(start + num_bytes * np.arange(count) for start, count in runs)]
    )


def _copy(pages: Tensor, runs: Runs, rows: Tensor, first: int, dtype: torch.dtype) -> None:
    """Copy rows, the first of which is so many behind the first that was placed."""
    flat, num_bytes, end = pages.view(-1), row_num_bytes(rows.shape[1], dtype), first + rows.shape[0]
    before = 0
    for start, count in runs:
        low, high = max(first, before), min(end, before + count)
        if low < high:
            there = flat[start + (low - before) * num_bytes : start + (high - before) * num_bytes]
            there.view(dtype).view(high - low, -1)[:, : rows.shape[1]] = rows[low - first : high - first]
        before += count
