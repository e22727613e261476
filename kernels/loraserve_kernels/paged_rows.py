"""Rows of numbers in pages of one size: where each finds room, and how it is written there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraserve_kernels.errors import ShapeMismatch
from loraserve_kernels.reference import quantize_rows

UNIT_BYTES = 32
"""Every row starts at a multiple of this."""

_ROWS_AT_ONCE = 4096
"""Quantized at a time: a whole vocabulary's rows in float32 would take gigabytes."""

Runs = list[tuple[int, int]]
"""Where rows lie, one after the other: (first byte, number of rows)."""


def row_num_bytes(width: int, dtype: torch.dtype) -> int:
    """Bytes of one row in a page, with the zeros that follow it."""
    return -(-width * dtype.itemsize // UNIT_BYTES) * UNIT_BYTES


class Placing:
    """First fit of rows into pages.

    Raises:
        ShapeMismatch: a page of no whole number of units.
    """

    def __init__(self, page_num_bytes: int) -> None:
        if page_num_bytes % UNIT_BYTES or page_num_bytes < UNIT_BYTES:
            raise ShapeMismatch(f"a page of {page_num_bytes} bytes; it must be a multiple of {UNIT_BYTES}")
        self._page_num_bytes = page_num_bytes
        self._used: list[int] = []
        self._first_open = 0

    @property
    def num_pages(self) -> int:
        return len(self._used)

    def place(self, num_rows: int, num_bytes: int) -> Runs:
        """Find room for rows of `num_bytes` each.

        Raises:
            ShapeMismatch: a page is too small for one of them.
        """
        size = self._page_num_bytes
        if num_bytes > size:
            raise ShapeMismatch(f"a row of a module takes {num_bytes} bytes; a page has {size}: make pages larger")
        runs, page = [], self._first_open
        while num_rows:
            if page == len(self._used):
                self._used.append(0)
                # pages far behind are nearly full: looking at the last eight alone keeps the search short
                self._first_open = max(0, page - 8)
            count = min(num_rows, (size - self._used[page]) // num_bytes)
            if count:
                runs.append((page * size + self._used[page], count))
                self._used[page] += count * num_bytes
                num_rows -= count
            page += 1
        return runs


def write_rows(pages: Tensor, runs: Runs, rows: Tensor, dtype: torch.dtype) -> npt.NDArray[np.float32]:
    """Copy rows [n, width] to where they were placed; return what each is multiplied with to be itself: 1, or its scale in int8."""
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
    """Where each row starts, in bytes."""
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
