"""Copies of chosen rows of a step; compiled by numba."""

from __future__ import annotations

import functools
from typing import Any

import numba
from numba import types

from loraserve_kernels.cpu.simd import F32, LANES, STAMP, fetch_add, load, load_int, load_one, store, store_one

# The argument block, in int64 words. The counter is on a cache line of its own.
CLAIMED, NUM_ROWS, ROWS, X, OUT, WIDTH = 0, 8, 9, 10, 11, 12

F32_BYTES = 4


@numba.njit
def _gather(args):  # type: ignore[no-untyped-def]
    """Copy rows of `WIDTH` float32 that this thread claims; `ROWS` are their numbers in int64."""
    num_rows, width = load_int(args, NUM_ROWS), load_int(args, WIDTH)
    whole = width // LANES * LANES
    while True:
        row = fetch_add(args, 1)
        if row >= num_rows:
            return
        source = load_int(args, X) + load_int(load_int(args, ROWS), row) * width * F32_BYTES
        target = load_int(args, OUT) + row * width * F32_BYTES
        for k in range(0, whole, LANES):
            store(target, k, load(source, k, F32))
        for k in range(whole, width):
            store_one(target, k, load_one(source, k, F32))


@functools.cache
def compiled() -> Any:
    """Return the kernel, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = STAMP

    def gather_rows(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _gather(args)

    return numba.cfunc(types.void(types.intp), cache=True)(gather_rows)
