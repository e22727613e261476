"""Residual sums and RMSNorms of a step's rows, and their codes in int8; compiled by numba.

A row: ``hidden += scale · norm(delta)``, where there is a delta, then ``out = norm(hidden)``, then
out's codes, where the linears behind it take codes. Rows of adapters with norms of their own are
normed by these. A row is computed by one thread, in one order: its bits don't depend on the others.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from loraserve_kernels.cpu import hadamard, row_loop
from loraserve_kernels.cpu.compilation.compiler import compile_kernel
from loraserve_kernels.cpu.linear import row_quantization
from loraserve_kernels.cpu.linear.row_quantization import round_row
from loraserve_kernels.cpu.simd import (
    F32,
    LANES,
    add,
    fma,
    fma_one,
    load,
    load_int,
    load_one,
    multiply,
    splat,
    square_root,
    stamp_with,
    store,
    store_one,
    sum_lanes,
)

# The argument block, in int64 words, in addition to those of `round_row`. The counter is on a cache
# line of its own. A weight of 0: no norm. The tables of weights have an address for each row; 0:
# every row has the one weight.
CLAIMED, NUM_ROWS, WIDTH, HIDDEN, DELTA, DELTA_STRIDE, DELTA_WEIGHT, DELTA_WEIGHTS = 0, 8, 9, 10, 11, 12, 13, 14
WEIGHT, WEIGHTS, OUT, EPS, DELTA_SCALE = 15, 16, 17, 18, 19
"""EPS, DELTA_SCALE: float32 in the word's first half."""

F32_BYTES = 4


@numba.njit
def inverse_rms(x, width, eps):  # type: ignore[no-untyped-def]
    """Compute ``1 / sqrt(mean(x²) + eps)`` of `width` float32."""
    whole = width // LANES * LANES
    total = splat(np.float32(0))
    for k in range(0, whole, LANES):
        v = load(x, k, F32)
        total = fma(v, v, total)
    square = sum_lanes(total)
    for k in range(whole, width):
        v = load_one(x, k, F32)
        square = fma_one(v, v, square)
    return np.float32(1) / square_root(square / np.float32(width) + eps)


@numba.njit
def scale_row(x, factor, weight, width, out):  # type: ignore[no-untyped-def]
    """Write ``factor · x · weight`` of `width` float32."""
    whole, factors = width // LANES * LANES, splat(factor)
    for k in range(0, whole, LANES):
        store(out, k, multiply(multiply(load(x, k, F32), factors), load(weight, k, F32)))
    for k in range(whole, width):
        store_one(out, k, load_one(x, k, F32) * factor * load_one(weight, k, F32))


@numba.njit
def _add_row(hidden, delta, scale, width):  # type: ignore[no-untyped-def]
    """Add ``scale · delta`` to `width` float32."""
    whole, scales = width // LANES * LANES, splat(scale)
    for k in range(0, whole, LANES):
        store(hidden, k, add(load(hidden, k, F32), multiply(load(delta, k, F32), scales)))
    for k in range(whole, width):
        store_one(hidden, k, load_one(hidden, k, F32) + load_one(delta, k, F32) * scale)


@numba.njit
def _norm_row(args, row):  # type: ignore[no-untyped-def]
    width, eps = load_int(args, WIDTH), load_one(args, 2 * EPS, F32)
    hidden, out = load_int(args, HIDDEN) + row * width * F32_BYTES, load_int(args, OUT) + row * width * F32_BYTES
    if load_int(args, DELTA) != 0:
        delta = load_int(args, DELTA) + row * load_int(args, DELTA_STRIDE) * F32_BYTES
        weight = load_int(args, DELTA_WEIGHT)
        if load_int(args, DELTA_WEIGHTS) != 0:
            weight = load_int(load_int(args, DELTA_WEIGHTS), row)
        if weight != 0:
            scale_row(delta, inverse_rms(delta, width, eps), weight, width, delta)
        _add_row(hidden, delta, load_one(args, 2 * DELTA_SCALE, F32), width)
    weight = load_int(args, WEIGHT)
    if load_int(args, WEIGHTS) != 0:
        weight = load_int(load_int(args, WEIGHTS), row)
    if weight != 0:
        scale_row(hidden, inverse_rms(hidden, width, eps), weight, width, out)
    else:
        for k in range(width):
            store_one(out, k, load_one(hidden, k, F32))
    round_row(args, out, row, width)


_norm = row_loop.row_loop("norm", _norm_row, NUM_ROWS)


@functools.cache
def compiled() -> Any:
    """Load the kernel, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = stamp_with(row_loop.__file__, row_quantization.__file__, hadamard.__file__)

    def norm_rows(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _norm(args)

    return compile_kernel(norm_rows)
