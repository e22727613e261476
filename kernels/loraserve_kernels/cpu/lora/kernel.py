"""Kernel of all that a step's adapters change at a site, in one launch, compiled by numba.

Two phases, shared out among the threads in small tasks by one atomic counter. Shrink: ``scratch[t,
r] = scaling · A[r] · x[t]`` for the ranks of all the site's slices, a task being some ranks of one
of them for some rows; and where an adapter has rows of its own in W, ``y[t, id] = W'[id] · x[t] +
bias``, a task being some ids for some rows. Expand: ``y[t, n] += Σ_r scratch[t, r] · B[r, n]``,
then ``y += δ · (y − bias)``, then ``y += shift``, a task being some columns for some rows. Weights
are read in the dtype that they're stored in, once per 32 rows, and widened in registers; sums are
float32.

A row's result is the same bits whatever shares its batch, prompts cut into chunks or not: each dot
product is one vector accumulator over k in ascending order, each output adds its ranks in ascending
order, and neither depends on the number of rows, segments or threads.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numba

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
from loraserve_kernels.cpu.compilation.compiler import compile_kernel
from loraserve_kernels.cpu.lora import products, replaced_rows, tiles
from loraserve_kernels.cpu.lora.products import add_delta, add_shift, expand, shrink
from loraserve_kernels.cpu.lora.replaced_rows import REPLACED_BLOCK, gather, look_up, scatter
from loraserve_kernels.cpu.simd import BF16, F16, F32, I8, fetch_add, load_int, pause, stamp_with

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
RANK_BLOCK = 32
COLUMN_BLOCK = 2048
TILE_FLOATS = ROW_BLOCK * REPLACED_BLOCK
WORD = 8
F32_BYTES = I32_BYTES = 4


@numba.njit
def _apply(args, kind):  # type: ignore[no-untyped-def]
    """Compute a thread's part of a launch: it claims tasks until none is left."""
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
        floats = load_int(segment, FLOATS)
        for row in range(load_int(segment, ROW_START), row_end, ROW_BLOCK):
            rows, rank_start = min(ROW_BLOCK, row_end - row), 0
            for i in range(num_slices):
                record = records + i * RECORD_WORDS * WORD
                num_ranks, a = load_int(record, RANK), load_int(record, A)
                scalings = floats + load_int(record, SCALINGS) * F32_BYTES
                for rank in range(0, num_ranks, RANK_BLOCK):
                    if task == claimed:
                        out = scratch + (row * scratch_stride + rank_start + rank) * F32_BYTES
                        ranks, first = min(RANK_BLOCK, num_ranks - rank), a + rank * in_features
                        factors = scalings + rank * F32_BYTES
                        if takes_tokens != 0:
                            ids = x + row * x_stride * WORD
                            gather(
                                ids, x_stride, rows, data, first, ranks, in_features, factors, out, scratch_stride, kind
                            )
                        else:
                            xs = x + row * x_stride * F32_BYTES
                            shrink(
                                xs, x_stride, rows, data, first, ranks, in_features, factors, out, scratch_stride, kind
                            )
                        fetch_add(finished, 1)
                        claimed = fetch_add(args, 1)
                    task += 1
                rank_start += num_ranks
            column_start = 0
            for i in range(num_slices if tile != 0 else 0):
                # y's columns are replaced before anything is added to them
                record = records + i * RECORD_WORDS * WORD
                num_replaced, width = load_int(record, NUM_ROWS), load_int(args, WIDTHS + i)
                # a token is looked up once
                block = max(1, num_replaced) if takes_tokens != 0 else REPLACED_BLOCK
                for n in range(0, num_replaced, block):
                    if task == claimed:
                        out = y + (row * y_stride + column_start) * F32_BYTES
                        ids = load_int(segment, ALL_ROW_IDS) + (load_int(record, ROW_IDS) + n) * I32_BYTES
                        first, scales = load_int(record, ROWS), load_int(record, ROW_SCALES)
                        scales = floats + (scales + n) * F32_BYTES if scales >= 0 else 0
                        if takes_tokens != 0:
                            tokens = x + row * x_stride * WORD
                            look_up(tokens, x_stride, rows, out, y_stride, ids, block, data, first, width, scales, kind)
                        else:
                            xs, count = x + row * x_stride * F32_BYTES, min(REPLACED_BLOCK, num_replaced - n)
                            first += n * in_features
                            shrink(xs, x_stride, rows, data, first, count, in_features, 0, tile, REPLACED_BLOCK, kind)
                            added = bias + column_start * F32_BYTES if bias != 0 else 0
                            scatter(out, y_stride, rows, tile, ids, count, scales, added)
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
                            expand(
                                out,
                                y_stride,
                                rows,
                                scratch + (row * scratch_stride + rank_start) * F32_BYTES,
                                scratch_stride,
                                data,
                                load_int(record, B) + column,
                                width,
                                num_ranks,
                                columns,
                                kind,
                            )
                            if delta >= 0:
                                added = bias + (column_start + column) * F32_BYTES if bias != 0 else 0
                                add_delta(out, y_stride, rows, floats + (delta + column) * F32_BYTES, added, columns)
                            if shift >= 0:
                                add_shift(out, y_stride, rows, floats + (shift + column) * F32_BYTES, columns)
                            claimed = fetch_add(args, 1)
                        task += 1
                column_start += width
                rank_start += num_ranks


# One entry for each element type, each with a name of its own: numba resolves machine code from its
# cache by name, and two closures of one name would answer for each other. Each closes over the
# stamp (see `simd.STAMP`), which changes with the files of the products and a record's words too.
_RECORD = (RANK, A, B, SCALINGS, DELTA, SHIFT, NUM_ROWS, ROWS, ROW_IDS, ROW_SCALES, RECORD_WORDS)
_FILES = (products.__file__, replaced_rows.__file__, tiles.__file__)
_STAMP = zlib.crc32(repr((stamp_with(*_FILES), _RECORD)).encode())


@functools.cache
def compiled_float32() -> Any:
    """Load the kernel for adapters in float32, compiled or read from numba's cache."""
    stamp = _STAMP

    def lora_float32(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _apply(args, F32)

    return compile_kernel(lora_float32)


@functools.cache
def compiled_bfloat16() -> Any:
    """Load the kernel for adapters in bfloat16, compiled or read from numba's cache."""
    stamp = _STAMP

    def lora_bfloat16(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _apply(args, BF16)

    return compile_kernel(lora_bfloat16)


@functools.cache
def compiled_float16() -> Any:
    """Load the kernel for adapters in float16, compiled or read from numba's cache."""
    stamp = _STAMP

    def lora_float16(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _apply(args, F16)

    return compile_kernel(lora_float16)


@functools.cache
def compiled_int8() -> Any:
    """Load the kernel for adapters in int8, compiled or read from numba's cache."""
    stamp = _STAMP

    def lora_int8(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _apply(args, I8)

    return compile_kernel(lora_int8)
