"""Copies of chosen rows of a step; compiled by numba."""

from __future__ import annotations

import functools
from typing import Any

import numba

from loraserve_kernels.cpu import row_loop
from loraserve_kernels.cpu.compilation.compiler import compile_kernel
from loraserve_kernels.cpu.simd import F32, LANES, load, load_int, load_one, stamp_with, store, store_one

# The argument block, in int64 words. The counter is on a cache line of its own.
CLAIMED, NUM_ROWS, ROWS, X, OUT, WIDTH = 0, 8, 9, 10, 11, 12

F32_BYTES = 4


@numba.njit
def _gather_row(args, row):  # type: ignore[no-untyped-def]
    """Copy a row of `WIDTH` float32; `ROWS` are the rows' numbers in int64."""
    width = load_int(args, WIDTH)
    whole = width // LANES * LANES
    source = load_int(args, X) + load_int(load_int(args, ROWS), row) * width * F32_BYTES
    target = load_int(args, OUT) + row * width * F32_BYTES
    for k in range(0, whole, LANES):
        store(target, k, load(source, k, F32))
    for k in range(whole, width):
        store_one(target, k, load_one(source, k, F32))


_gather = row_loop.row_loop("gather", _gather_row, NUM_ROWS)


@functools.cache
def compiled() -> Any:
    """Load the kernel, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = stamp_with(row_loop.__file__)

    def gather_rows(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _gather(args)

    return compile_kernel(gather_rows)
