"""Rows of an adapter that stand in the place of the base's, and an embedding's columns of A."""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import numba
import numpy as np

from loraserve_kernels.cpu.simd import (
    F32,
    LANES,
    fma,
    fma_one,
    load,
    load_int,
    load_int32,
    load_one,
    splat,
    store,
    store_one,
)

REPLACED_BLOCK = 64
"""Replaced rows of a task."""
F32_BYTES = 4


@numba.njit(inline="never")
def gather(token_ids, stride, num_rows, data, a, num_ranks, width, scalings, scratch, scratch_stride, kind):  # type: ignore[no-untyped-def]
    """Write column token_id of `num_ranks` rows of A, scaled, for each of `num_rows` token ids."""
    for row in range(num_rows):
        token_id = load_int(token_ids, row * stride)
        for rank in range(num_ranks):
            value = load_one(data, a + rank * width + token_id, kind) * load_one(scalings, rank, F32)
            store_one(scratch, row * scratch_stride + rank, value)


@numba.njit(inline="never")
def scatter(y, y_stride, num_rows, tile, ids, num_ids, scales, bias):  # type: ignore[no-untyped-def]
    """Write ``scale · tile + bias`` to columns `ids` of `num_rows` rows of y.

    No scales are ones, no bias is none.
    """
    for i in range(num_ids):
        column = load_int32(ids, i)
        scale, added = np.float32(1), np.float32(0)
        if scales != 0:
            scale = load_one(scales, i, F32)
        if bias != 0:
            added = load_one(bias, column, F32)
        for row in range(num_rows):
            store_one(y, row * y_stride + column, fma_one(load_one(tile, row * REPLACED_BLOCK + i, F32), scale, added))


@numba.njit(inline="never")
def _find(ids, num_ids, token_id):  # type: ignore[no-untyped-def]
    """Find where a token stands among ascending ids; -1: nowhere."""
    first, last = load_int32(ids, 0), load_int32(ids, num_ids - 1)
    if token_id < first or token_id > last:
        return -1
    if last - first == num_ids - 1:
        # no gaps, such as a whole table
        return token_id - first
    low, high = 0, num_ids - 1
    while low < high:
        middle = (low + high) // 2
        if load_int32(ids, middle) < token_id:
            low = middle + 1
        else:
            high = middle
    return low if load_int32(ids, low) == token_id else -1


@numba.njit(inline="never")
def look_up(token_ids, stride, num_rows, y, y_stride, ids, num_ids, data, first, width, scales, kind):  # type: ignore[no-untyped-def]
    """Write the replaced row of each of `num_rows` token ids that has one to its row of y."""
    whole = width // LANES * LANES
    for row in range(num_rows):
        found = _find(ids, num_ids, load_int(token_ids, row * stride))
        if found >= 0:
            scale = load_one(scales, found, F32) if scales != 0 else np.float32(1)
            wide, zero = splat(scale), splat(np.float32(0))
            at, out = first + found * width, y + row * y_stride * F32_BYTES
            for n in range(0, whole, LANES):
                store(out, n, fma(load(data, at + n, kind), wide, zero))
            for n in range(whole, width):
                store_one(out, n, load_one(data, at + n, kind) * scale)
