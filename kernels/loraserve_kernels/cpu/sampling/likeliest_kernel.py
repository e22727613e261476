"""Largest number of each row, and whether all of the row is finite; compiled by numba."""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from loraserve_kernels.cpu import row_loop
from loraserve_kernels.cpu.compilation.compiler import compile_kernel
from loraserve_kernels.cpu.simd import (
    F32,
    LANES,
    fetch_add,
    fma,
    larger,
    load,
    load_int,
    load_one,
    max_lanes,
    splat,
    stamp_with,
    sum_lanes,
)

# The argument block, in int64 words. The counter is on a cache line of its own.
CLAIMED, NUM_ROWS, X, X_STRIDE, WIDTH, OUT, NUM_WORDS = 0, 8, 9, 10, 11, 12, 13
"""OUT: of an int64 for each row, 0 before."""

_F32_BYTES, _I64_BYTES = 4, 8
_BLOCK = 32 * LANES
"""Numbers that are looked through one by one, once their maximum is known to be the largest."""


@numba.njit
def _look_through(args, row):  # type: ignore[no-untyped-def]
    """Write the place of a row's largest number, the first of equal ones.

    It is -1 where the row isn't finite.
    """
    width, x = load_int(args, WIDTH), load_int(args, X) + row * load_int(args, X_STRIDE) * _F32_BYTES
    whole, zero = width // LANES * LANES, splat(np.float32(0))
    taint, best, first = zero, np.float32(-np.inf), 0
    for start in range(0, whole, _BLOCK):
        largest = load(x, start, F32)
        for k in range(start, min(start + _BLOCK, whole), LANES):
            v = load(x, k, F32)
            # x · 0 is NaN for NaN and for infinity: what a maximum alone could pass over
            taint = fma(v, zero, taint)
            largest = larger(v, largest)
        of_block = max_lanes(largest)
        if of_block > best:
            best, first = of_block, start
    is_finite = sum_lanes(taint) == np.float32(0)
    for k in range(whole, width):
        v = load_one(x, k, F32)
        is_finite = is_finite and v - v == np.float32(0)
        if v > best:
            best, first = v, k
    while is_finite and load_one(x, first, F32) != best:
        first += 1
    fetch_add(load_int(args, OUT) + row * _I64_BYTES, first if is_finite else -1)


_likeliest = row_loop.row_loop("likeliest", _look_through, NUM_ROWS)


@functools.cache
def compiled() -> Any:
    """Load the kernel, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = stamp_with(row_loop.__file__)

    def find_likeliest(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _likeliest(args)

    return compile_kernel(find_likeliest)
