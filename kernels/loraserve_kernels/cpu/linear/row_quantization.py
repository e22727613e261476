"""Rows of activations rounded to int8, each by its own absolute maximum; compiled by numba."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from numba import types

from loraserve_kernels.cpu.simd import (
    F32,
    LANES,
    STAMP,
    absolute,
    fetch_add,
    fma,
    larger,
    load,
    load_int,
    load_one,
    max_lanes,
    splat,
    store_int8,
    store_int8_one,
    store_one,
    sum_lanes,
)

# The argument block, in int64 words. The counter is on a cache line of its own.
CLAIMED, X, X_STRIDE, CODES, SCALES, NUM_ROWS, WIDTH, OFFSET, NUM_WORDS = 0, 8, 9, 10, 11, 12, 13, 14, 15

ROW_BLOCK = 8
F32_BYTES = 4


@numba.njit
def _quantize(args):  # type: ignore[no-untyped-def]
    """Quantize the rows that this thread claims.

    Codes are ``round(127 x / max |x|)`` plus the offset, scales ``max |x| / 127``.
    """
    x, x_stride, codes = load_int(args, X), load_int(args, X_STRIDE), load_int(args, CODES)
    scales, num_rows, width = load_int(args, SCALES), load_int(args, NUM_ROWS), load_int(args, WIDTH)
    whole, offset = width // LANES * LANES, load_int(args, OFFSET)
    zero = splat(np.float32(0))
    while True:
        first = fetch_add(args, ROW_BLOCK)
        if first >= num_rows:
            return
        for row in range(first, min(first + ROW_BLOCK, num_rows)):
            source, target = x + row * x_stride * F32_BYTES, codes + row * width
            # x · 0 is NaN for NaN and for infinity: what a maximum alone could pass over
            largest, taint = zero, zero
            for k in range(0, whole, LANES):
                v = load(source, k, F32)
                largest, taint = larger(absolute(v), largest), fma(v, zero, taint)
            top, bad = max_lanes(largest), sum_lanes(taint)
            for k in range(whole, width):
                one = load_one(source, k, F32)
                top, bad = max(top, abs(one)), bad + one * np.float32(0)
            # also for rows so small that the factor overflows: they round to nothing
            factor = np.float32(127) / top if top > np.float32(1e-36) else np.float32(0)
            if bad != bad:
                factor = np.float32(0)
            store_one(scales, row, top / np.float32(127) + bad)
            if factor == np.float32(0):
                for k in range(0, whole, LANES):
                    store_int8(target, k, zero, offset)
                for k in range(whole, width):
                    store_int8_one(target, k, np.float32(0), offset)
            else:
                times = splat(factor)
                for k in range(0, whole, LANES):
                    store_int8(target, k, fma(load(source, k, F32), times, zero), offset)
                for k in range(whole, width):
                    store_int8_one(target, k, load_one(source, k, F32) * factor, offset)


@functools.cache
def compiled() -> Any:
    """Return the kernel, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = STAMP

    def quantize_rows(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _quantize(args)

    return numba.cfunc(types.void(types.intp), cache=True)(quantize_rows)
