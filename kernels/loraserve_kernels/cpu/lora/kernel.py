"""All that a step's adapters change at a site, in one launch, compiled by numba.

Two phases, shared out among the threads in small tasks by one atomic counter. Shrink: ``scratch[t,
r] = A[r] · x[t]`` for the ranks of all the site's slices, a task being some ranks for some rows;
and where an adapter has rows of its own in W, ``y[t, id] = W'[id] · x[t] + bias``, a task being
some ids for some rows. Expand: ``y[t, n] += Σ_r scaling · scratch[t, r] · B[r, n]``, then ``y += δ
· (y − bias)``, then ``y += shift``, a task being some columns for some rows. Weights are read in
the dtype that they're stored in, once per 32 rows, and widened in registers; sums are float32.

A row's result is the same bits whatever shares its batch, prompts cut into chunks or not: each dot
product is one vector accumulator over k in ascending order, each output adds its ranks in ascending
order, and neither depends on the number of rows, segments or threads.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numba
import numpy as np
from numba import types

from loraserve_kernels.common.sizes import (
    DELTA,
    NUM_ROWS,
    RANK,
    RECORD_WORDS,
    ROW_IDS,
    ROW_SCALES,
    ROWS,
    SCALINGS,
    SHIFT,
    A,
    B,
)
from loraserve_kernels.cpu.simd import (
    BF16,
    F16,
    F32,
    I8,
    LANES,
    STAMP,
    add,
    fetch_add,
    fma,
    fma_one,
    load,
    load_int,
    load_int32,
    load_one,
    pause,
    prefetch,
    splat,
    store,
    store_one,
    sum_lanes,
)

# The argument block, in int64 words. The three counters are on cache lines of their own.
CLAIMED, FINISHED, ENTERED, X, X_STRIDE, Y, Y_STRIDE, SEGMENTS, NUM_SEGMENTS = 0, 8, 16, 24, 25, 26, 27, 28, 29
IN_FEATURES, FIRST_RECORD, NUM_SLICES, WIDTHS, SCRATCH, SCRATCH_STRIDE, TAKES_TOKENS, BIAS, TILES = (
    30,
    31,
    32,
    33,
    36,
    37,
    38,
    39,
    40,
)
NUM_WORDS = 48

# A segment's row of the segment table, in int64 words.
ROW_START, ROW_END, DATA, FLOATS, ALL_ROW_IDS, RECORDS, SEGMENT_WORDS = 0, 1, 2, 3, 4, 5, 8

ROW_BLOCK = 32
RANK_BLOCK = 16
REPLACED_BLOCK = 64
COLUMN_BLOCK = 2048
TILE_FLOATS = ROW_BLOCK * REPLACED_BLOCK
WORD = 8
F32_BYTES = I32_BYTES = 4


@numba.njit(inline="never")
def _shrink(x, x_stride, num_rows, data, a, num_ranks, width, scratch, scratch_stride, kind):  # type: ignore[no-untyped-def]
    """Write the dot products of `num_rows` rows of x with `num_ranks` rows of A.

    Four ranks at a time, and two rows where there are two.
    """
    whole = width // LANES * LANES
    rank = 0
    while rank < num_ranks:
        tile = min(4, num_ranks - rank)
        # a tile of fewer than four ranks repeats its last: the sums are computed and not stored
        a0 = a + rank * width
        a1 = a + min(rank + 1, num_ranks - 1) * width
        a2 = a + min(rank + 2, num_ranks - 1) * width
        a3 = a + min(rank + 3, num_ranks - 1) * width
        row = 0
        while row < num_rows:
            pair = min(2, num_rows - row)
            x0 = x + row * x_stride * F32_BYTES
            x1 = x + (row + pair - 1) * x_stride * F32_BYTES
            zero = splat(np.float32(0))
            s00, s01, s02, s03 = zero, zero, zero, zero
            s10, s11, s12, s13 = zero, zero, zero, zero
            if pair == 2:
                for k in range(0, whole, LANES):
                    v0, v1 = load(x0, k, F32), load(x1, k, F32)
                    w0, w1 = load(data, a0 + k, kind), load(data, a1 + k, kind)
                    w2, w3 = load(data, a2 + k, kind), load(data, a3 + k, kind)
                    s00, s01, s02, s03 = fma(w0, v0, s00), fma(w1, v0, s01), fma(w2, v0, s02), fma(w3, v0, s03)
                    s10, s11, s12, s13 = fma(w0, v1, s10), fma(w1, v1, s11), fma(w2, v1, s12), fma(w3, v1, s13)
            else:
                for k in range(0, whole, LANES):
                    v0 = load(x0, k, F32)
                    prefetch(data, a0 + 4 * width + k, kind)
                    prefetch(data, a1 + 4 * width + k, kind)
                    prefetch(data, a2 + 4 * width + k, kind)
                    prefetch(data, a3 + 4 * width + k, kind)
                    s00, s01 = fma(load(data, a0 + k, kind), v0, s00), fma(load(data, a1 + k, kind), v0, s01)
                    s02, s03 = fma(load(data, a2 + k, kind), v0, s02), fma(load(data, a3 + k, kind), v0, s03)
            for i in range(pair):
                xi = x0 if i == 0 else x1
                out = (row + i) * scratch_stride + rank
                d0, d1 = sum_lanes(s00 if i == 0 else s10), sum_lanes(s01 if i == 0 else s11)
                d2, d3 = sum_lanes(s02 if i == 0 else s12), sum_lanes(s03 if i == 0 else s13)
                for k in range(whole, width):
                    v = load_one(xi, k, F32)
                    d0, d1 = fma_one(load_one(data, a0 + k, kind), v, d0), fma_one(load_one(data, a1 + k, kind), v, d1)
                    d2, d3 = fma_one(load_one(data, a2 + k, kind), v, d2), fma_one(load_one(data, a3 + k, kind), v, d3)
                store_one(scratch, out, d0)
                if tile > 1:
                    store_one(scratch, out + 1, d1)
                if tile > 2:
                    store_one(scratch, out + 2, d2)
                if tile > 3:
                    store_one(scratch, out + 3, d3)
            row += pair
        rank += 4


@numba.njit(inline="never")
def _gather(token_ids, stride, num_rows, data, a, num_ranks, width, scratch, scratch_stride, kind):  # type: ignore[no-untyped-def]
    """Write column token_id of `num_ranks` rows of A for each of `num_rows` token ids."""
    for row in range(num_rows):
        token_id = load_int(token_ids, row * stride)
        for rank in range(num_ranks):
            store_one(scratch, row * scratch_stride + rank, load_one(data, a + rank * width + token_id, kind))


@numba.njit(inline="never")
def _scatter(y, y_stride, num_rows, tile, ids, num_ids, scales, bias):  # type: ignore[no-untyped-def]
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
    """Where a token stands among ascending ids; -1: nowhere."""
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
def _look_up(token_ids, stride, num_rows, y, y_stride, ids, num_ids, data, first, width, scales, kind):  # type: ignore[no-untyped-def]
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


@numba.njit(inline="never")
def _add(y, y_stride, num_rows, values, width):  # type: ignore[no-untyped-def]
    """Add `width` numbers to these columns of `num_rows` rows of y."""
    whole = width // LANES * LANES
    for row in range(num_rows):
        at = y + row * y_stride * F32_BYTES
        for n in range(0, whole, LANES):
            store(at, n, add(load(at, n, F32), load(values, n, F32)))
        for n in range(whole, width):
            store_one(at, n, load_one(at, n, F32) + load_one(values, n, F32))


@numba.njit(inline="never")
def _scale(y, y_stride, num_rows, delta, bias, width):  # type: ignore[no-untyped-def]
    """Add ``delta · (y − bias)`` to `width` columns of `num_rows` rows of y.

    A bias of 0 is none.
    """
    whole = width // LANES * LANES
    minus = splat(np.float32(-1))
    for row in range(num_rows):
        at = y + row * y_stride * F32_BYTES
        for n in range(0, whole, LANES):
            v = load(at, n, F32)
            w = v
            if bias != 0:
                w = fma(load(bias, n, F32), minus, v)
            store(at, n, fma(load(delta, n, F32), w, v))
        for n in range(whole, width):
            v = load_one(at, n, F32)
            w = v
            if bias != 0:
                w = fma_one(load_one(bias, n, F32), np.float32(-1), v)
            store_one(at, n, fma_one(load_one(delta, n, F32), w, v))


@numba.njit(inline="never")
def _expand(y, y_stride, num_rows, scratch, scratch_stride, scalings, data, b, b_stride, num_ranks, width, kind):  # type: ignore[no-untyped-def]
    """Add ``Σ_r scalings[r] · scratch[row, r] · B[r, n]`` to `width` columns of rows of y.

    Ranks are in ascending order. Four ranks at a time.
    """
    whole = width // LANES * LANES
    rank = 0
    while rank < num_ranks:
        tile = 4 if rank + 4 <= num_ranks else 1
        b0 = b + rank * b_stride
        b1, b2, b3 = b0 + b_stride, b0 + 2 * b_stride, b0 + 3 * b_stride
        last = rank + tile - 1
        c0, c1 = load_one(scalings, rank, F32), load_one(scalings, min(rank + 1, last), F32)
        c2, c3 = load_one(scalings, min(rank + 2, last), F32), load_one(scalings, last, F32)
        row = 0
        while row < num_rows:
            pair = 2 if tile == 4 and row + 2 <= num_rows else 1
            y0 = y + row * y_stride * F32_BYTES
            y1 = y0 + y_stride * F32_BYTES
            at = row * scratch_stride + rank
            if tile == 1:
                f0 = load_one(scratch, at, F32) * c0
                t0 = splat(f0)
                for n in range(0, whole, LANES):
                    store(y0, n, fma(load(data, b0 + n, kind), t0, load(y0, n, F32)))
                for n in range(whole, width):
                    store_one(y0, n, fma_one(load_one(data, b0 + n, kind), f0, load_one(y0, n, F32)))
            else:
                f0 = load_one(scratch, at, F32) * c0
                f1 = load_one(scratch, at + 1, F32) * c1
                f2 = load_one(scratch, at + 2, F32) * c2
                f3 = load_one(scratch, at + 3, F32) * c3
                t0, t1, t2, t3 = splat(f0), splat(f1), splat(f2), splat(f3)
                if pair == 1:
                    for n in range(0, whole, LANES):
                        prefetch(data, b0 + 4 * b_stride + n, kind)
                        prefetch(data, b1 + 4 * b_stride + n, kind)
                        prefetch(data, b2 + 4 * b_stride + n, kind)
                        prefetch(data, b3 + 4 * b_stride + n, kind)
                        v = fma(load(data, b0 + n, kind), t0, load(y0, n, F32))
                        v = fma(load(data, b1 + n, kind), t1, v)
                        v = fma(load(data, b2 + n, kind), t2, v)
                        store(y0, n, fma(load(data, b3 + n, kind), t3, v))
                else:
                    at += scratch_stride
                    u0 = splat(load_one(scratch, at, F32) * c0)
                    u1 = splat(load_one(scratch, at + 1, F32) * c1)
                    u2 = splat(load_one(scratch, at + 2, F32) * c2)
                    u3 = splat(load_one(scratch, at + 3, F32) * c3)
                    for n in range(0, whole, LANES):
                        w = load(data, b0 + n, kind)
                        v = fma(w, t0, load(y0, n, F32))
                        u = fma(w, u0, load(y1, n, F32))
                        w = load(data, b1 + n, kind)
                        v = fma(w, t1, v)
                        u = fma(w, u1, u)
                        w = load(data, b2 + n, kind)
                        v = fma(w, t2, v)
                        u = fma(w, u2, u)
                        w = load(data, b3 + n, kind)
                        store(y0, n, fma(w, t3, v))
                        store(y1, n, fma(w, u3, u))
                for i in range(pair):
                    yi = y0 if i == 0 else y1
                    for r in range(4):
                        f = load_one(scratch, (row + i) * scratch_stride + rank + r, F32)
                        f = f * load_one(scalings, rank + r, F32)
                        for n in range(whole, width):
                            store_one(
                                yi, n, fma_one(load_one(data, b0 + r * b_stride + n, kind), f, load_one(yi, n, F32))
                            )
            row += pair
        rank += tile


@numba.njit
def _apply(args, kind):  # type: ignore[no-untyped-def]
    """One thread's part of a launch: it claims tasks until none is left."""
    x, x_stride = load_int(args, X), load_int(args, X_STRIDE)
    y, y_stride = load_int(args, Y), load_int(args, Y_STRIDE)
    scratch, scratch_stride = load_int(args, SCRATCH), load_int(args, SCRATCH_STRIDE)
    segments, num_segments = load_int(args, SEGMENTS), load_int(args, NUM_SEGMENTS)
    in_features, first_record = load_int(args, IN_FEATURES), load_int(args, FIRST_RECORD)
    num_slices = load_int(args, NUM_SLICES)
    takes_tokens, bias, tile = load_int(args, TAKES_TOKENS), load_int(args, BIAS), load_int(args, TILES)
    if tile != 0:
        tile += fetch_add(args + ENTERED * WORD, 1) * TILE_FLOATS * F32_BYTES
    finished = args + FINISHED * WORD
    claimed, task = fetch_add(args, 1), 0
    for s in range(num_segments):
        segment = segments + s * SEGMENT_WORDS * WORD
        row_end, data = load_int(segment, ROW_END), load_int(segment, DATA)
        records = load_int(segment, RECORDS) + first_record * RECORD_WORDS * WORD
        num_ranks = 0
        for i in range(num_slices):
            num_ranks += load_int(records, i * RECORD_WORDS + RANK)
        a = load_int(records, A)
        for row in range(load_int(segment, ROW_START), row_end, ROW_BLOCK):
            for rank in range(0, num_ranks, RANK_BLOCK):
                if task == claimed:
                    out = scratch + (row * scratch_stride + rank) * F32_BYTES
                    rows, ranks, first = (
                        min(ROW_BLOCK, row_end - row),
                        min(RANK_BLOCK, num_ranks - rank),
                        a + rank * in_features,
                    )
                    if takes_tokens != 0:
                        ids = x + row * x_stride * WORD
                        _gather(ids, x_stride, rows, data, first, ranks, in_features, out, scratch_stride, kind)
                    else:
                        xs = x + row * x_stride * F32_BYTES
                        _shrink(xs, x_stride, rows, data, first, ranks, in_features, out, scratch_stride, kind)
                    fetch_add(finished, 1)
                    claimed = fetch_add(args, 1)
                task += 1
            column_start = 0
            for i in range(num_slices if tile != 0 else 0):
                # y's columns are replaced before anything is added to them
                record = records + i * RECORD_WORDS * WORD
                num_replaced, width = load_int(record, NUM_ROWS), load_int(args, WIDTHS + i)
                # a token is looked up once
                block = max(1, num_replaced) if takes_tokens != 0 else REPLACED_BLOCK
                for n in range(0, num_replaced, block):
                    if task == claimed:
                        rows = min(ROW_BLOCK, row_end - row)
                        out = y + (row * y_stride + column_start) * F32_BYTES
                        ids = load_int(segment, ALL_ROW_IDS) + (load_int(record, ROW_IDS) + n) * I32_BYTES
                        first, scales = load_int(record, ROWS), load_int(record, ROW_SCALES)
                        scales = load_int(segment, FLOATS) + (scales + n) * F32_BYTES if scales >= 0 else 0
                        if takes_tokens != 0:
                            tokens = x + row * x_stride * WORD
                            _look_up(
                                tokens, x_stride, rows, out, y_stride, ids, block, data, first, width, scales, kind
                            )
                        else:
                            xs, count = x + row * x_stride * F32_BYTES, min(REPLACED_BLOCK, num_replaced - n)
                            first += n * in_features
                            _shrink(xs, x_stride, rows, data, first, count, in_features, tile, REPLACED_BLOCK, kind)
                            added = bias + column_start * F32_BYTES if bias != 0 else 0
                            _scatter(out, y_stride, rows, tile, ids, count, scales, added)
                        fetch_add(finished, 1)
                        claimed = fetch_add(args, 1)
                    task += 1
                column_start += width
    # expand reads what any thread has shrunk. No shrink task waits for another, so this ends
    # whatever the number of threads.
    while fetch_add(finished, 0) < task:
        pause()
    for s in range(num_segments):
        segment = segments + s * SEGMENT_WORDS * WORD
        row_end, data = load_int(segment, ROW_END), load_int(segment, DATA)
        floats = load_int(segment, FLOATS)
        records = load_int(segment, RECORDS) + first_record * RECORD_WORDS * WORD
        for row in range(load_int(segment, ROW_START), row_end, ROW_BLOCK):
            column_start, rank_start = 0, 0
            for i in range(num_slices):
                width = load_int(args, WIDTHS + i)
                record = records + i * RECORD_WORDS * WORD
                num_ranks, delta, shift = load_int(record, RANK), load_int(record, DELTA), load_int(record, SHIFT)
                if num_ranks > 0 or delta >= 0 or shift >= 0:
                    for column in range(0, width, COLUMN_BLOCK):
                        if task == claimed:
                            out = y + (row * y_stride + column_start + column) * F32_BYTES
                            rows, columns = min(ROW_BLOCK, row_end - row), min(COLUMN_BLOCK, width - column)
                            _expand(
                                out,
                                y_stride,
                                rows,
                                scratch + (row * scratch_stride + rank_start) * F32_BYTES,
                                scratch_stride,
                                floats + load_int(record, SCALINGS) * F32_BYTES,
                                data,
                                load_int(record, B) + column,
                                width,
                                num_ranks,
                                columns,
                                kind,
                            )
                            if delta >= 0:
                                added = bias + (column_start + column) * F32_BYTES if bias != 0 else 0
                                _scale(out, y_stride, rows, floats + (delta + column) * F32_BYTES, added, columns)
                            if shift >= 0:
                                _add(out, y_stride, rows, floats + (shift + column) * F32_BYTES, columns)
                            claimed = fetch_add(args, 1)
                        task += 1
                column_start += width
                rank_start += num_ranks


# One entry for each element type, each with a name of its own: numba resolves machine code from its
# cache by name, and two closures of one name would
# answer for each other. Each closes over the stamp (see `simd.STAMP`), which changes with a
# record's words too.
_RECORD = (RANK, A, B, SCALINGS, DELTA, SHIFT, NUM_ROWS, ROWS, ROW_IDS, ROW_SCALES, RECORD_WORDS)
_STAMP = zlib.crc32(repr((STAMP, _RECORD)).encode())


@functools.cache
def compiled_float32() -> Any:
    """Return the kernel for adapters in float32, compiled or read from numba's cache."""
    stamp = _STAMP

    def lora_float32(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _apply(args, F32)

    return numba.cfunc(types.void(types.intp), cache=True)(lora_float32)


@functools.cache
def compiled_bfloat16() -> Any:
    """Return the kernel for adapters in bfloat16, compiled or read from numba's cache."""
    stamp = _STAMP

    def lora_bfloat16(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _apply(args, BF16)

    return numba.cfunc(types.void(types.intp), cache=True)(lora_bfloat16)


@functools.cache
def compiled_float16() -> Any:
    """Return the kernel for adapters in float16, compiled or read from numba's cache."""
    stamp = _STAMP

    def lora_float16(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _apply(args, F16)

    return numba.cfunc(types.void(types.intp), cache=True)(lora_float16)


@functools.cache
def compiled_int8() -> Any:
    """Return the kernel for adapters in int8, compiled or read from numba's cache."""
    stamp = _STAMP

    def lora_int8(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _apply(args, I8)

    return numba.cfunc(types.void(types.intp), cache=True)(lora_int8)
