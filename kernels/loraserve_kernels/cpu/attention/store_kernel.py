"""Writes of a step's keys and values to the KV cache, compiled by numba."""

from __future__ import annotations

import functools
from typing import Any

import numba

from loraserve_kernels.cpu.compilation.compiler import compile_kernel
from loraserve_kernels.cpu.simd import F32, LANES, STAMP, fetch_add, load, load_int, store

# The argument block, in int64 words. The counters (rows claimed, slots outside the cache) are on
# cache lines of their own.
CLAIMED, OUTSIDE, K, K_ROW, K_HEAD, V, V_ROW, V_HEAD, SLOTS, NUM_ROWS = (
    0,
    8,
    16,
    17,
    18,
    19,
    20,
    21,
    22,
    23,
)
K_CACHE, K_BLOCK, K_CACHE_HEAD, V_CACHE, V_BLOCK, V_CACHE_HEAD = 24, 25, 26, 27, 28, 29
NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_DIM, NUM_WORDS = 30, 31, 32, 33, 34

ROWS_AT_ONCE = 16
"""Rows that a thread claims at a time."""
_WORD = 8


@numba.njit
def _store(args):  # type: ignore[no-untyped-def]
    """Write a thread's part of a step's keys and values to the cache.

    A slot that the cache doesn't have is counted and not written.
    """
    k, k_row, k_head = load_int(args, K), load_int(args, K_ROW), load_int(args, K_HEAD)
    v, v_row, v_head = load_int(args, V), load_int(args, V_ROW), load_int(args, V_HEAD)
    k_cache, k_block, k_cache_head = (
        load_int(args, K_CACHE),
        load_int(args, K_BLOCK),
        load_int(args, K_CACHE_HEAD),
    )
    v_cache, v_block, v_cache_head = (
        load_int(args, V_CACHE),
        load_int(args, V_BLOCK),
        load_int(args, V_CACHE_HEAD),
    )
    slots, num_rows, num_heads = load_int(args, SLOTS), load_int(args, NUM_ROWS), load_int(args, NUM_HEADS)
    num_blocks, size, width = load_int(args, NUM_BLOCKS), load_int(args, BLOCK_SIZE), load_int(args, HEAD_DIM)
    while True:
        first = fetch_add(args, ROWS_AT_ONCE)
        if first >= num_rows:
            return
        for row in range(first, min(first + ROWS_AT_ONCE, num_rows)):
            slot = load_int(slots, row)
            if slot < 0 or slot >= num_blocks * size:
                fetch_add(args + OUTSIDE * _WORD, 1)
                continue
            block, offset = slot // size, slot % size
            for head in range(num_heads):
                k_from, k_to = row * k_row + head * k_head, block * k_block + head * k_cache_head + offset * width
                v_from, v_to = row * v_row + head * v_head, block * v_block + head * v_cache_head + offset * width
                for i in range(0, width, LANES):
                    store(k_cache, k_to + i, load(k, k_from + i, F32))
                    store(v_cache, v_to + i, load(v, v_from + i, F32))


@functools.cache
def compiled() -> Any:
    """Load the kernel, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = STAMP

    def store_kv(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _store(args)

    return compile_kernel(store_kv)
