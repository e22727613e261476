"""An MLP's gate of a step's rows, ``activation(gate) · up``, and its codes in int8; by numba.

A row is computed by one thread, in one order: its bits don't depend on the others.
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
    divide,
    exp,
    fma,
    load,
    load_int,
    load_one,
    multiply,
    splat,
    stamp_with,
    store,
    store_one,
)

# The argument block, in int64 words, in addition to those of `round_row`. The counter is on a cache
# line of its own.
CLAIMED, NUM_ROWS, WIDTH, X, X_STRIDE, OUT, IS_GELU = 0, 8, 9, 10, 11, 12, 13

F32_BYTES = 4

_CUBIC, _TWICE_ROOT = np.float32(0.044715), np.float32(-2 * 0.7978845608028654)
"""gelu's approximation with tanh is ``x · sigmoid(2 · sqrt(2 / π) · (x + 0.044715 x³))``."""


@numba.njit
def _gated(gate, up, is_gelu):  # type: ignore[no-untyped-def]
    """Compute ``activation(gate) · up`` by lane."""
    one = splat(np.float32(1))
    if is_gelu != 0:
        cube = multiply(multiply(gate, gate), gate)
        slope = multiply(fma(cube, splat(_CUBIC), gate), splat(_TWICE_ROOT))
    else:
        slope = multiply(gate, splat(np.float32(-1)))
    return multiply(divide(gate, add(exp(slope), one)), up)


@numba.njit
def _gate_row(args, row):  # type: ignore[no-untyped-def]
    width, is_gelu = load_int(args, WIDTH), load_int(args, IS_GELU)
    whole = width // LANES * LANES
    gate = load_int(args, X) + row * load_int(args, X_STRIDE) * F32_BYTES
    up, out = gate + width * F32_BYTES, load_int(args, OUT) + row * width * F32_BYTES
    for k in range(0, whole, LANES):
        store(out, k, _gated(load(gate, k, F32), load(up, k, F32), is_gelu))
    for k in range(whole, width):
        x = np.float64(load_one(gate, k, F32))
        slope = x
        if is_gelu != 0:
            slope = 2 * 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # one of few elements of a row: numba's exponential of float64 overflows to infinity
        store_one(out, k, np.float32(x / (1 + np.exp(-slope)) * load_one(up, k, F32)))
    round_row(args, out, row, width)


_gate = row_loop.row_loop("gate", _gate_row, NUM_ROWS)


@functools.cache
def compiled() -> Any:
    """Load the kernel, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = stamp_with(row_loop.__file__, row_quantization.__file__, hadamard.__file__)

    def gate_rows(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _gate(args)

    return compile_kernel(gate_rows)
