"""An adapter's two products for some rows, tile by tile, and what is added behind them."""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import numba
import numpy as np

from loraserve_kernels.cpu.lora.tiles import (
    COLUMNS,
    RANKS,
    ROWS,
    expand_row,
    expand_row_narrow,
    expand_rows,
    expand_rows_narrow,
    shrink_row,
    shrink_rows,
)
from loraserve_kernels.cpu.simd import F32, LANES, add, fma, fma_one, load, load_one, splat, store, store_one

F32_BYTES = 4
_MANY_ROWS = 4
"""Number of rows from which on a tile of B is multiplied with all of them before the next columns
are read. With fewer, memory is what takes time, and whole rows of B are read in the order they lie.
"""


@numba.njit(inline="never")
def shrink(x, x_stride, num_rows, data, a, num_ranks, width, scalings, scratch, scratch_stride, kind):  # type: ignore[no-untyped-def]
    """Write the scaled dot products of `num_rows` rows of x with `num_ranks` rows of A.

    Scalings at address 0 are ones.
    """
    row = 0
    while row < num_rows:
        rows = ROWS if row + ROWS <= num_rows else 1
        xs = x + row * x_stride * F32_BYTES
        for rank in range(0, num_ranks, RANKS):
            factors = scalings + rank * F32_BYTES if scalings != 0 else 0
            out = scratch + (row * scratch_stride + rank) * F32_BYTES
            count, first = min(RANKS, num_ranks - rank), a + rank * width
            if rows == ROWS:
                shrink_rows(xs, x_stride, data, first, width, count, factors, out, scratch_stride, kind)
            else:
                shrink_row(xs, x_stride, data, first, width, count, factors, out, scratch_stride, kind)
        row += rows


@numba.njit(inline="never")
def expand(y, y_stride, num_rows, factors, factor_stride, data, b, b_stride, num_ranks, width, kind):  # type: ignore[no-untyped-def]
    """Add ``Σ_r factors[row, r] · B[r, n]`` to `width` columns of rows of y.

    Ranks are in ascending order.
    """
    whole, tiled = width // LANES * LANES, width // (COLUMNS * LANES) * COLUMNS * LANES
    start = num_rows // ROWS * ROWS if num_rows >= _MANY_ROWS else 0
    if start > 0:
        for n in range(0, tiled, COLUMNS * LANES):
            for row in range(0, start, ROWS):
                at = y + (row * y_stride + n) * F32_BYTES
                factor = factors + row * factor_stride * F32_BYTES
                expand_rows(at, y_stride, factor, factor_stride, data, b + n, b_stride, num_ranks, kind)
        for n in range(tiled, whole, LANES):
            for row in range(0, start, ROWS):
                at = y + (row * y_stride + n) * F32_BYTES
                factor = factors + row * factor_stride * F32_BYTES
                expand_rows_narrow(at, y_stride, factor, factor_stride, data, b + n, b_stride, num_ranks, kind)
    last = num_ranks // RANKS * RANKS
    for rank in range(0, last, RANKS):
        for row in range(start, num_rows):
            at, factor = y + row * y_stride * F32_BYTES, factors + (row * factor_stride + rank) * F32_BYTES
            expand_row(at, factor, data, b + rank * b_stride, b_stride, width, kind)
    for row in range(start if last < num_ranks else num_rows, num_rows):
        factor = factors + (row * factor_stride + last) * F32_BYTES
        for n in range(0, whole, LANES):
            at, first = y + (row * y_stride + n) * F32_BYTES, b + last * b_stride + n
            expand_row_narrow(at, y_stride, factor, factor_stride, data, first, b_stride, num_ranks - last, kind)
    for row in range(num_rows if whole < width else 0):
        for n in range(whole, width):
            value = load_one(y, row * y_stride + n, F32)
            for rank in range(num_ranks):
                factor = load_one(factors, row * factor_stride + rank, F32)
                value = fma_one(load_one(data, b + rank * b_stride + n, kind), factor, value)
            store_one(y, row * y_stride + n, value)


@numba.njit(inline="never")
def add_shift(y, y_stride, num_rows, values, width):  # type: ignore[no-untyped-def]
    """Add `width` numbers to these columns of `num_rows` rows of y."""
    whole = width // LANES * LANES
    for row in range(num_rows):
        at = y + row * y_stride * F32_BYTES
        for n in range(0, whole, LANES):
            store(at, n, add(load(at, n, F32), load(values, n, F32)))
        for n in range(whole, width):
            store_one(at, n, load_one(at, n, F32) + load_one(values, n, F32))


@numba.njit(inline="never")
def add_delta(y, y_stride, num_rows, delta, bias, width):  # type: ignore[no-untyped-def]
    """Add ``delta · (y − bias)`` to `width` columns of `num_rows` rows of y.

    A bias of 0 is none.
    """
    whole = width // LANES * LANES
    minus = splat(np.float32(-1))
    for row in range(num_rows):
        at = y + row * y_stride * F32_BYTES
        for n in range(0, whole, LANES):
            v = load(at, n, F32)
            w = v
            if bias != 0:
                w = fma(load(bias, n, F32), minus, v)
            store(at, n, fma(load(delta, n, F32), w, v))
        for n in range(whole, width):
            v = load_one(at, n, F32)
            w = v
            if bias != 0:
                w = fma_one(load_one(bias, n, F32), np.float32(-1), v)
            store_one(at, n, fma_one(load_one(delta, n, F32), w, v))
