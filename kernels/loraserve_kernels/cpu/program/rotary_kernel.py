"""Queries, keys and values of a step between qkv and attention, in one kernel; compiled by numba.

Queries and keys are normed, where the architecture does, and turned by their positions, in place;
keys and values are written to the paged cache. A row is computed by one thread, in one order: its
bits don't depend on the others.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from loraserve_kernels.cpu import row_loop
from loraserve_kernels.cpu.compilation.compiler import compile_kernel
from loraserve_kernels.cpu.program import norm_kernel
from loraserve_kernels.cpu.program.norm_kernel import inverse_rms, scale_row
from loraserve_kernels.cpu.simd import (
    F32,
    LANES,
    fetch_add,
    fma,
    fma_one,
    load,
    load_int,
    load_one,
    multiply,
    splat,
    stamp_with,
    store,
    store_one,
)

# The argument block, in int64 words. Both counters are written, and on cache lines of their own.
CLAIMED, OUTSIDE, NUM_ROWS, QKV, QKV_STRIDE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 0, 8, 16, 17, 18, 19, 20, 21
ROTATED, COS, SIN, POSITIONS, SLOTS, NUM_BLOCKS, BLOCK_SIZE = 22, 23, 24, 25, 26, 27, 28
K_CACHE, K_BLOCK, K_HEAD, V_CACHE, V_BLOCK, V_HEAD = 29, 30, 31, 32, 33, 34
Q_NORM, K_NORM, IS_NORM_WHOLE, EPS, IS_NORM_LAST, IS_INTERLEAVED = 35, 36, 37, 38, 39, 40
"""ROTATED: elements of a head that turn; 0: none. Q_NORM, K_NORM: addresses of weights; 0: none.
EPS: float32 in the word's first half. IS_NORM_LAST: heads are turned before they're normed.
IS_INTERLEAVED: neighbours turn together.
"""

F32_BYTES, WORD = 4, 8


@numba.njit
def _norm_heads(x, num_heads, width, weight, is_whole, eps):  # type: ignore[no-untyped-def]
    if is_whole != 0:
        scale_row(x, inverse_rms(x, num_heads * width, eps), weight, num_heads * width, x)
        return
    for head in range(num_heads):
        at = x + head * width * F32_BYTES
        scale_row(at, inverse_rms(at, width, eps), weight, width, at)


@numba.njit
def _rotate(x, num_heads, width, half, cos, sin):  # type: ignore[no-untyped-def]
    """Turn each head's elements i and half + i by the angle i."""
    whole = half // LANES * LANES
    for head in range(num_heads):
        first = x + head * width * F32_BYTES
        second = first + half * F32_BYTES
        for k in range(0, whole, LANES):
            c, s = load(cos, k, F32), load(sin, k, F32)
            a, b = load(first, k, F32), load(second, k, F32)
            store(first, k, fma(b, multiply(s, splat(np.float32(-1))), multiply(a, c)))
            store(second, k, fma(a, s, multiply(b, c)))
        for k in range(whole, half):
            c, s = load_one(cos, k, F32), load_one(sin, k, F32)
            a, b = load_one(first, k, F32), load_one(second, k, F32)
            store_one(first, k, fma_one(b, -s, a * c))
            store_one(second, k, fma_one(a, s, b * c))


@numba.njit
def _rotate_pairs(x, num_heads, width, half, cos, sin):  # type: ignore[no-untyped-def]
    """Turn each head's elements 2i and 2i + 1 by the angle i."""
    for head in range(num_heads):
        at = x + head * width * F32_BYTES
        for k in range(half):
            c, s = load_one(cos, k, F32), load_one(sin, k, F32)
            a, b = load_one(at, 2 * k, F32), load_one(at, 2 * k + 1, F32)
            store_one(at, 2 * k, fma_one(b, -s, a * c))
            store_one(at, 2 * k + 1, fma_one(a, s, b * c))


@numba.njit
def _norm(args, q, k):  # type: ignore[no-untyped-def]
    """Norm a row's queries and keys in place."""
    width, num_heads, num_kv_heads = load_int(args, HEAD_DIM), load_int(args, NUM_HEADS), load_int(args, NUM_KV_HEADS)
    eps, is_whole = load_one(args, 2 * EPS, F32), load_int(args, IS_NORM_WHOLE)
    _norm_heads(q, num_heads, width, load_int(args, Q_NORM), is_whole, eps)
    _norm_heads(k, num_kv_heads, width, load_int(args, K_NORM), is_whole, eps)


@numba.njit
def _copy(x, out, width):  # type: ignore[no-untyped-def]
    for k in range(0, width, LANES):
        store(out, k, load(x, k, F32))


@numba.njit
def _turn_and_store_row(args, row):  # type: ignore[no-untyped-def]
    width, num_heads, num_kv_heads = load_int(args, HEAD_DIM), load_int(args, NUM_HEADS), load_int(args, NUM_KV_HEADS)
    half, size = load_int(args, ROTATED) // 2, load_int(args, BLOCK_SIZE)
    q = load_int(args, QKV) + row * load_int(args, QKV_STRIDE) * F32_BYTES
    k = q + num_heads * width * F32_BYTES
    v = k + num_kv_heads * width * F32_BYTES
    has_norm, is_norm_last = load_int(args, Q_NORM) != 0, load_int(args, IS_NORM_LAST) != 0
    if has_norm and not is_norm_last:
        _norm(args, q, k)
    if half != 0:
        angle = load_int(load_int(args, POSITIONS), row) * half * F32_BYTES
        cos, sin = load_int(args, COS) + angle, load_int(args, SIN) + angle
        # keys follow queries
        if load_int(args, IS_INTERLEAVED) != 0:
            _rotate_pairs(q, num_heads + num_kv_heads, width, half, cos, sin)
        else:
            _rotate(q, num_heads + num_kv_heads, width, half, cos, sin)
    if has_norm and is_norm_last:
        _norm(args, q, k)
    slot = load_int(load_int(args, SLOTS), row)
    if slot < 0 or slot >= load_int(args, NUM_BLOCKS) * size:
        # counted and not written
        fetch_add(args + OUTSIDE * WORD, 1)
        return
    number, offset = slot // size, slot % size
    for head in range(num_kv_heads):
        k_to = number * load_int(args, K_BLOCK) + head * load_int(args, K_HEAD) + offset * width
        v_to = number * load_int(args, V_BLOCK) + head * load_int(args, V_HEAD) + offset * width
        _copy(k + head * width * F32_BYTES, load_int(args, K_CACHE) + k_to * F32_BYTES, width)
        _copy(v + head * width * F32_BYTES, load_int(args, V_CACHE) + v_to * F32_BYTES, width)


_turn_and_store = row_loop.row_loop("turn_and_store", _turn_and_store_row, NUM_ROWS)


@functools.cache
def compiled() -> Any:
    """Load the kernel, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = stamp_with(norm_kernel.__file__, row_loop.__file__)

    def turn_and_store(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _turn_and_store(args)

    return compile_kernel(turn_and_store)
