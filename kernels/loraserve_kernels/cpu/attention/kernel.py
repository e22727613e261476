"""Paged attention for mixed rows in one launch, compiled by numba.

Keys and values are read where they lie, block by block; nothing is gathered. A task is up to eight
rows of one sequence and the query heads of one key head, so that a block read from memory serves
them all. Scores first (each block of keys against each row), then their softmax, then the weighted
sum of the values.

A row's result is the same bits whatever shares its batch and however its prompt was cut into
chunks: every key's score is a sum in one order, the softmax runs over the row's own positions in
vectors that start at a block's start, and values are added in ascending order of position.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from loraserve_kernels.cpu.compilation.compiler import compile_kernel
from loraserve_kernels.cpu.simd import (
    F32,
    LANES,
    STAMP,
    absolute,
    add,
    choose_below,
    divide,
    dot_rows,
    exp,
    fetch_add,
    fma,
    load,
    load_int,
    load_int32,
    load_one,
    max_lanes,
    prefetch,
    splat,
    store,
    store_one,
    sum_lanes,
)

# The argument block, in int64 words. The counters (tasks claimed, threads entered) are on cache
# lines of their own.
CLAIMED, ENTERED, Q, Q_ROW, Q_HEAD, OUT, OUT_ROW, OUT_HEAD, K, K_BLOCK, K_HEAD = (
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
    24,
)
V, V_BLOCK, V_HEAD, BLOCK_TABLES, MAX_BLOCKS, SEQUENCES, NUM_SEQUENCES = 25, 26, 27, 28, 29, 30, 31
NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, WINDOW, SCRATCH, SCRATCH_ROW, SCALE, SOFT_CAP, NUM_WORDS = (
    32,
    33,
    34,
    35,
    36,
    37,
    38,
    39,
    40,
    41,
)

# A sequence's row of the sequence table, in int64 words.
ROW_START, NUM_ROWS, CONTEXT_LEN, SEQUENCE_WORDS = 0, 1, 2, 3

ROW_TILE = 8
CHUNK_BYTES = 16384
"""Keys, or values, that one head of a row reads before the next: they stay in a core's first cache.

Processors fetch ahead of reads that continue from page to page; heads that take turns at each block
make them stop.
"""
WORD = 8
F32_BYTES = 4
LINE = 16
"""float32 of a cache line."""


@numba.njit(inline="never")
def _scores(q, q_row, q_head, num_rows, group, width, k, k_next, size, first, start, position, scores, scores_row):  # type: ignore[no-untyped-def]
    """Write the products of each row and head with one block's keys, unscaled.

    `first` is the block's first position, `start` that of the scores.
    """
    for row in range(num_rows):
        # a later row sees what an earlier one sees
        if first <= position + row:
            for head in range(group):
                x = q + (row * q_row + head * q_head) * F32_BYTES
                out = (row * group + head) * scores_row + first - start
                for key in range(0, size, LANES):
                    store(scores, out + key, dot_rows(x, k + key * width * F32_BYTES, width, width))
                    if row == 0 and head == 0:
                        for i in range(0, LANES * width, LINE):
                            prefetch(k_next, key * width + i, F32)


@numba.njit(inline="never")
def _cap_softly(scores, padded, scale, cap):  # type: ignore[no-untyped-def]
    """Replace the scores up to `padded` by cap · tanh(scale · score / cap)."""
    factor, zero, one = splat(scale / cap), splat(np.float32(0)), splat(np.float32(1))
    top, twice, bound = splat(cap), splat(np.float32(2)), splat(np.float32(0.625))
    minus_twice_top = splat(np.float32(-2) * cap)
    for key in range(0, padded, LANES):
        x = fma(load(scores, key, F32), factor, zero)
        # 1 − 2 / (e^2x + 1) loses a small x's last bits: a polynomial in x² there, from Cephes'
        # tanhf
        large = fma(divide(minus_twice_top, add(exp(fma(x, twice, zero)), one)), one, top)
        square = fma(x, x, zero)
        p = fma(splat(np.float32(-5.70498872745e-3)), square, splat(np.float32(2.06390887954e-2)))
        p = fma(p, square, splat(np.float32(-5.37397155531e-2)))
        p = fma(p, square, splat(np.float32(1.33314422036e-1)))
        p = fma(p, square, splat(np.float32(-3.33332819422e-1)))
        small = fma(fma(fma(p, square, zero), x, x), top, zero)
        store(scores, key, choose_below(absolute(x), bound, small, large))


@numba.njit(inline="never")
def _softmax(scores, first, end, padded, scale):  # type: ignore[no-untyped-def]
    """Replace scores ``first:end`` by e^(scale · (score − largest)), and return their sum.

    All others up to `padded` become 0.
    """
    hidden = np.float32(-np.inf)
    for key in range(first):
        store_one(scores, key, hidden)
    for key in range(end, padded):
        store_one(scores, key, hidden)
    largest = hidden
    for key in range(0, padded, LANES):
        largest = max(largest, max_lanes(load(scores, key, F32)))
    factor, shift = splat(scale), splat(-largest * scale)
    total = splat(np.float32(0))
    for key in range(0, padded, LANES):
        weight = exp(fma(load(scores, key, F32), factor, shift))
        store(scores, key, weight)
        total = add(total, weight)
    return sum_lanes(total)


@numba.njit(inline="never")
def _values(weights, v, v_next, first, end, width, out):  # type: ignore[no-untyped-def]
    """Add to `out` the values ``first:end`` of a block, each times its weight, in order."""
    column = 0
    while column + 4 * LANES <= width:
        a0, a1 = load(out, column, F32), load(out, column + LANES, F32)
        a2, a3 = load(out, column + 2 * LANES, F32), load(out, column + 3 * LANES, F32)
        for key in range(first, end):
            weight, at = splat(load_one(weights, key, F32)), key * width + column
            a0, a1 = fma(weight, load(v, at, F32), a0), fma(weight, load(v, at + LANES, F32), a1)
            a2, a3 = fma(weight, load(v, at + 2 * LANES, F32), a2), fma(weight, load(v, at + 3 * LANES, F32), a3)
            if v_next != 0:
                for i in range(0, 4 * LANES, LINE):
                    prefetch(v_next, at + i, F32)
        store(out, column, a0)
        store(out, column + LANES, a1)
        store(out, column + 2 * LANES, a2)
        store(out, column + 3 * LANES, a3)
        column += 4 * LANES
    while column < width:
        a0 = load(out, column, F32)
        for key in range(first, end):
            a0 = fma(splat(load_one(weights, key, F32)), load(v, key * width + column, F32), a0)
        store(out, column, a0)
        column += LANES


@numba.njit
def _ask(blocks, number, lines, head, group):  # type: ignore[no-untyped-def]
    """Prefetch a head's share of the lines of a block; no-op where there is none of that number.

    `blocks` are as `_following` gives them, and counted from the first.
    """
    table, base, stride, first, end = blocks
    if first + number < end:
        there = base + load_int32(table, first + number) * stride * F32_BYTES
        share = (lines + group - 1) // group
        for line in range(head * share, min((head + 1) * share, lines)):
            prefetch(there, line * LINE, F32)


@numba.njit(inline="never")
def _row_scores(q, q_head, group, width, size, blocks, scores, scores_row, ahead):  # type: ignore[no-untyped-def]
    """Write the products of one row's heads with the keys of some blocks, unscaled.

    `scores` are those of the first block. Each head prefetches its share of the blocks `ahead`.
    Both are as `_following` gives them.
    """
    lines = size * width // LINE
    table, k, k_block, first, end = blocks
    for head in range(group):
        x, out = q + head * q_head * F32_BYTES, scores + head * scores_row * F32_BYTES
        for block in range(first, end):
            here = k + load_int32(table, block) * k_block * F32_BYTES
            for key in range(0, size, LANES):
                store(out, (block - first) * size + key, dot_rows(x, here + key * width * F32_BYTES, width, width))
            _ask(ahead, block - first, lines, head, group)


@numba.njit(inline="never")
def _row_values(weights, weights_row, group, width, size, blocks, begin, stop, out, out_head, ahead):  # type: ignore[no-untyped-def]
    """Add to one row's heads of `out` the values of some blocks, each times its weight.

    They are those of positions ``begin:stop`` alone, in order. `weights` are those of the first
    block; `blocks` and `ahead` as in `_row_scores`.
    """
    lines = size * width // LINE
    table, v, v_block, first, end = blocks
    for head in range(group):
        sums = out + head * out_head * F32_BYTES
        for block in range(first, end):
            here = v + load_int32(table, block) * v_block * F32_BYTES
            at = weights + (head * weights_row + (block - first) * size) * F32_BYTES
            _values(at, here, 0, max(0, begin - block * size), min(size, stop - block * size), width, sums)
            _ask(ahead, block - first, lines, head, group)


@numba.njit
def _following(args, sequence, head):  # type: ignore[no-untyped-def]
    """Find the keys that a thread is likely to read next.

    They are those of a head that is counted on from sequence to sequence: their block table, the
    address that block 0 would have, the elements from block to block, the first block and the end.
    """
    num_heads, size, last = load_int(args, NUM_KV_HEADS), load_int(args, BLOCK_SIZE), load_int(args, NUM_SEQUENCES) - 1
    sequence, head = min(sequence + head // num_heads, last), head % num_heads
    entry = load_int(args, SEQUENCES) + sequence * SEQUENCE_WORDS * WORD
    table = load_int(args, BLOCK_TABLES) + sequence * load_int(args, MAX_BLOCKS) * 4
    position = load_int(entry, CONTEXT_LEN) - load_int(entry, NUM_ROWS)
    first = max(0, position + 1 - load_int(args, WINDOW)) // size
    base = load_int(args, K) + head * load_int(args, K_HEAD) * F32_BYTES
    return table, base, load_int(args, K_BLOCK), first, position // size + 1


@numba.njit
def _attend(args):  # type: ignore[no-untyped-def]
    """Compute a thread's part of a step's attention: it claims tasks until none is left."""
    q, q_row, q_head = load_int(args, Q), load_int(args, Q_ROW), load_int(args, Q_HEAD)
    out, out_row, out_head = load_int(args, OUT), load_int(args, OUT_ROW), load_int(args, OUT_HEAD)
    k, k_block, k_head = load_int(args, K), load_int(args, K_BLOCK), load_int(args, K_HEAD)
    v, v_block, v_head = load_int(args, V), load_int(args, V_BLOCK), load_int(args, V_HEAD)
    num_heads, group, width = load_int(args, NUM_KV_HEADS), load_int(args, GROUP), load_int(args, HEAD_DIM)
    size, window = load_int(args, BLOCK_SIZE), load_int(args, WINDOW)
    scores_row = load_int(args, SCRATCH_ROW)
    scale, cap = load_one(args, SCALE * 2, F32), load_one(args, SOFT_CAP * 2, F32)
    thread = fetch_add(args + ENTERED * WORD, 1)
    scores = load_int(args, SCRATCH) + thread * ROW_TILE * group * scores_row * F32_BYTES
    zero = splat(np.float32(0))
    claimed, task = fetch_add(args, 1), 0
    chunk = max(1, CHUNK_BYTES // (size * width * F32_BYTES))
    for sequence in range(load_int(args, NUM_SEQUENCES)):
        entry = load_int(args, SEQUENCES) + sequence * SEQUENCE_WORDS * WORD
        table = load_int(args, BLOCK_TABLES) + sequence * load_int(args, MAX_BLOCKS) * 4
        num_rows, context_len = load_int(entry, NUM_ROWS), load_int(entry, CONTEXT_LEN)
        for row0 in range(0, num_rows, ROW_TILE):
            rows = min(ROW_TILE, num_rows - row0)
            # of the tile's first row
            position = context_len - num_rows + row0
            first_block = max(0, position + 1 - window) // size
            end_block = (position + rows - 1) // size + 1
            start = first_block * size
            for head in range(num_heads):
                if task != claimed:
                    task += 1
                    continue
                task += 1
                row = load_int(entry, ROW_START) + row0
                qh = q + (row * q_row + head * group * q_head) * F32_BYTES
                oh = out + (row * out_row + head * group * out_head) * F32_BYTES
                kh, vh = k + head * k_head * F32_BYTES, v + head * v_head * F32_BYTES
                # several rows take longer than memory, and one head reads a block once: blocks in
                # turn are faster there
                is_one_row = rows == 1 and group > 1
                if is_one_row:
                    for block in range(first_block, end_block, chunk):
                        end = min(block + chunk, end_block)
                        ahead = (table, kh, k_block, end, end_block)
                        if end == end_block:
                            ahead = (table, vh, v_block, first_block, end_block)
                        blocks, at = (table, kh, k_block, block, end), scores + (block * size - start) * F32_BYTES
                        _row_scores(qh, q_head, group, width, size, blocks, at, scores_row, ahead)
                else:
                    for block in range(first_block, end_block):
                        here = kh + load_int32(table, block) * k_block * F32_BYTES
                        after = kh + load_int32(table, min(block + 1, end_block - 1)) * k_block * F32_BYTES
                        _scores(
                            qh,
                            q_row,
                            q_head,
                            rows,
                            group,
                            width,
                            here,
                            after,
                            size,
                            block * size,
                            start,
                            position,
                            scores,
                            scores_row,
                        )
                for i in range(rows):
                    end = position + i + 1 - start
                    first = max(0, end - window)
                    for g in range(group):
                        at = scores + (i * group + g) * scores_row * F32_BYTES
                        padded = (end + size - 1) // size * size
                        if cap > 0:
                            _cap_softly(at, padded, scale, cap)
                            total = _softmax(at, first, end, padded, np.float32(1))
                        else:
                            total = _softmax(at, first, end, padded, scale)
                        # behind the row's weights, where the next step finds it
                        store_one(at, scores_row - 1, total)
                        for column in range(0, width, LANES):
                            store(oh, i * out_row + g * out_head + column, zero)
                if is_one_row:
                    following = _following(args, sequence, head + load_int(args, ENTERED))
                    begin = position + 1 - window
                    for block in range(first_block, end_block, chunk):
                        end = min(block + chunk, end_block)
                        ahead = following if end == end_block else (table, vh, v_block, end, end_block)
                        blocks, at = (table, vh, v_block, block, end), scores + (block * size - start) * F32_BYTES
                        _row_values(at, scores_row, group, width, size, blocks, begin, context_len, oh, out_head, ahead)
                else:
                    for block in range(first_block, end_block):
                        here = vh + load_int32(table, block) * v_block * F32_BYTES
                        after = vh + load_int32(table, min(block + 1, end_block - 1)) * v_block * F32_BYTES
                        for i in range(rows):
                            end = min(position + i + 1 - block * size, size)
                            first = max(0, position + i + 1 - window - block * size)
                            for g in range(group):
                                _values(
                                    scores + ((i * group + g) * scores_row + block * size - start) * F32_BYTES,
                                    here,
                                    after if i + g == 0 else 0,
                                    first,
                                    end,
                                    width,
                                    oh + (i * out_row + g * out_head) * F32_BYTES,
                                )
                for i in range(rows):
                    for g in range(group):
                        total = load_one(scores, (i * group + g + 1) * scores_row - 1, F32)
                        factor = splat(np.float32(1) / total)
                        at = i * out_row + g * out_head
                        for column in range(0, width, LANES):
                            store(oh, at + column, fma(load(oh, at + column, F32), factor, zero))
                claimed = fetch_add(args, 1)


@functools.cache
def compiled() -> Any:
    """Load the kernel, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = STAMP

    def attend(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _attend(args)

    return compile_kernel(attend)
