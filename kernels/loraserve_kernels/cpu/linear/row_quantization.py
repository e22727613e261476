"""Rows of activations rounded to int8 by their absolute maximum, or by those of groups of inputs.

Compiled by numba.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np

from loraserve_kernels.cpu import hadamard, row_loop
from loraserve_kernels.cpu.compilation.compiler import compile_kernel
from loraserve_kernels.cpu.hadamard import block_buffer, rotate_block
from loraserve_kernels.cpu.simd import (
    F32,
    I8,
    LANES,
    absolute,
    add,
    fma,
    larger,
    load,
    load_int,
    load_one,
    max_lanes,
    nearest,
    splat,
    stamp_with,
    store,
    store_int8,
    store_int8_one,
    store_int16,
    store_int16_one,
    store_one,
    sum_lanes,
)

# The argument block, in int64 words. The counter is on a cache line of its own.
CLAIMED, X, X_STRIDE, NUM_ROWS, WIDTH = 0, 8, 9, 10, 11

# Words of every kernel that rounds its rows: where the codes and scales go (no codes: nothing is
# rounded), what is added to the codes, whether they are int16, where the starts of groups go, where
# the largest magnitudes of rows are of which this is a part (0: rows are whole), the inputs of a
# Hadamard block by which a row is rotated before (0: it isn't), and the inputs of a group that has
# a scale of its own (0: a row has one scale). Groups with scales have starts, and of the other
# words CODES, CODE_ROW_BYTES and SCALES alone. Their rows may have outliers: where these go, and
# how many a row has.
CODES, CODE_ROW_BYTES, SCALES, OFFSET, IS_WIDE, STARTS, GROUP, TOPS, ROTATION = 40, 41, 42, 43, 44, 45, 46, 47, 48
SCALE_GROUP, OUTLIERS, NUM_OUTLIERS, NUM_WORDS = 49, 50, 51, 52

F32_BYTES = 4


@numba.njit
def quantize_row(source, target, scale, width, offset, is_wide, starts, group, tops, rotation):  # type: ignore[no-untyped-def]
    """Write a row's codes, ``round(127 x / max |x|)`` plus the offset, and ``max |x| / 127``.

    Args:
        source: address of `width` float32, which stay as they are.
        target: of as many bytes, or int16 if `is_wide` isn't 0.
        scale: of one float32. A row that isn't finite gets codes of 0 and the scale NaN.
        starts: of a float32 for each group of `group` inputs, a multiple of `LANES`: the sum of
            the group's codes, which have no offset, negated; 0: they aren't needed.
        tops: of a float32, the largest magnitude in the parts of this row that others have; 0: this
            is the whole row.
        rotation: inputs of a Hadamard block, which divides `width`: x is the row times H; 0: the
            row itself.
    """
    whole, zero = width // LANES * LANES, splat(np.float32(0))
    # rotated numbers are computed twice instead of kept: they never leave the nearest cache
    step, rotated = rotation if rotation != 0 else max(whole, 1), block_buffer()
    # x · 0 is NaN for NaN and for infinity: what a maximum alone could pass over
    largest, taint = zero, zero
    for first in range(0, whole, step):
        block = source + first * F32_BYTES
        if rotation != 0:
            rotate_block(block, rotated, rotation)
            block = rotated
        for k in range(0, step, LANES):
            v = load(block, k, F32)
            largest, taint = larger(absolute(v), largest), fma(v, zero, taint)
    top, bad = max_lanes(largest), sum_lanes(taint)
    for k in range(whole, width):
        one = load_one(source, k, F32)
        top, bad = max(top, abs(one)), bad + one * np.float32(0)
    if tops != 0:
        one = load_one(tops, 0, F32)
        top, bad = max(top, one), bad + one * np.float32(0)
    # also for rows so small that the factor overflows: they round to nothing
    factor = np.float32(127) / top if top > np.float32(1e-36) else np.float32(0)
    if bad != bad:
        factor = np.float32(0)
    store_one(scale, 0, top / np.float32(127) + bad)
    times = splat(factor)
    for first in range(0, whole, step):
        block = source + first * F32_BYTES
        if rotation != 0:
            rotate_block(block, rotated, rotation)
            block = rotated
        for k in range(0, step, LANES):
            # infinity · 0 would be NaN
            scaled = zero if factor == np.float32(0) else fma(load(block, k, F32), times, zero)
            if is_wide != 0:
                store_int16(target, first + k, scaled, offset)
            else:
                store_int8(target, first + k, scaled, offset)
    for k in range(whole, width):
        code = np.float32(0) if factor == np.float32(0) else load_one(source, k, F32) * factor
        if is_wide != 0:
            store_int16_one(target, k, code, offset)
        else:
            store_int8_one(target, k, code, offset)
    if starts != 0:
        for g in range(width // group):
            total = zero
            for k in range(g * group, (g + 1) * group, LANES):
                total = add(total, load(target, k, I8))
            store_one(starts, g, -sum_lanes(total))


@numba.njit
def top_of(block, count):  # type: ignore[no-untyped-def]
    """Find the largest magnitude of `count` float32, a multiple of `LANES`, and NaN or 0.

    The second is NaN where one of them isn't finite, which a maximum alone could pass over.
    """
    zero = splat(np.float32(0))
    # x · 0 is NaN for NaN and for infinity
    largest, taint = zero, zero
    for k in range(0, count, LANES):
        v = load(block, k, F32)
        largest, taint = larger(absolute(v), largest), fma(v, zero, taint)
    return max_lanes(largest), sum_lanes(taint)


@numba.njit
def find_outliers(source, outliers, count, tops, width, group):  # type: ignore[no-untyped-def]
    """Write the numbers and values of a row's largest magnitudes, as pairs of float32.

    The first of equal ones is taken. Groups that aren't finite have none: a value of 0 says that
    there are fewer.

    Args:
        source: address of `width` float32.
        outliers: of as many pairs as `count`.
        tops: scratch of a float32 for each group.
        group: inputs of a group, a multiple of `LANES` that divides `width`.
    """
    for number in range(width // group):
        top, bad = top_of(source + number * group * F32_BYTES, group)
        store_one(tops, number, np.float32(0) if bad != bad else top)
    for i in range(count):
        top, chosen = np.float32(0), -1
        for number in range(width // group):
            one = load_one(tops, number, F32)
            if one > top:
                top, chosen = one, number
        place, value = 0, np.float32(0)
        if chosen >= 0:
            first, top, rest = chosen * group, np.float32(0), np.float32(0)
            for k in range(first, first + group):
                is_taken = False
                for j in range(i):
                    is_taken = is_taken or load_one(outliers, 2 * j, F32) == np.float32(k)
                one = np.float32(0) if is_taken else abs(load_one(source, k, F32))
                if one > top:
                    top, rest, place = one, top, k
                elif one > rest:
                    rest = one
            value = load_one(source, place, F32)
            store_one(tops, chosen, rest)
        store_one(outliers, 2 * i, np.float32(place))
        store_one(outliers, 2 * i + 1, value)


@numba.njit
def quantize_groups(source, target, scales, starts, width, group, outliers, count):  # type: ignore[no-untyped-def]
    """Write a row's codes and scales as `quantize_row` does, for each group of its inputs.

    Args:
        source: address of `width` float32, which stay as they are.
        target: of as many bytes.
        scales: of a float32 for each group. A group that isn't finite gets codes of 0 and the scale
            NaN, which makes all of its row's products NaN.
        starts: of a float32 for each group: the sum of its codes, negated.
        group: inputs of a group, a multiple of `LANES` that divides `width`; with outliers, at most
            as many as the largest Hadamard block has.
        outliers: of pairs of float32 that `find_outliers` writes; their inputs get codes of 0.
        count: number of outliers.
    """
    zero, without = splat(np.float32(0)), block_buffer()
    if count != 0:
        find_outliers(source, outliers, count, scales, width, group)
    for number in range(width // group):
        first = number * group
        block = source + first * F32_BYTES
        for i in range(count):
            place = int(load_one(outliers, 2 * i, F32)) - first
            if 0 <= place < group and load_one(outliers, 2 * i + 1, F32) != np.float32(0):
                if block != without:
                    for k in range(0, group, LANES):
                        store(without, k, load(block, k, F32))
                    block = without
                store_one(without, place, np.float32(0))
        top, bad = top_of(block, group)
        # also for groups so small that the factor overflows: they round to nothing
        factor = np.float32(127) / top if top > np.float32(1e-36) else np.float32(0)
        if bad != bad:
            factor = np.float32(0)
        store_one(scales, number, top / np.float32(127) + bad)
        times, total = splat(factor), zero
        for k in range(0, group, LANES):
            # infinity · 0 would be NaN
            codes = zero if factor == np.float32(0) else nearest(fma(load(block, k, F32), times, zero))
            store_int8(target, first + k, codes, 0)
            total = add(total, codes)
        store_one(starts, number, -sum_lanes(total))


@numba.njit
def round_row(args, source, row, width):  # type: ignore[no-untyped-def]
    """Round a row by a kernel's argument block, if that requires it.

    Args:
        source: address of the row's `width` float32.
        row: its number, from which the places of its codes, scale and starts follow.
    """
    codes, starts, group, tops = (
        load_int(args, CODES),
        load_int(args, STARTS),
        load_int(args, GROUP),
        load_int(args, TOPS),
    )
    if codes == 0:
        return
    target, scale_group = codes + row * load_int(args, CODE_ROW_BYTES), load_int(args, SCALE_GROUP)
    if scale_group != 0:
        first = row * (width // scale_group) * F32_BYTES
        count = load_int(args, NUM_OUTLIERS)
        outliers = load_int(args, OUTLIERS) + row * count * 2 * F32_BYTES
        scales = load_int(args, SCALES) + first
        quantize_groups(source, target, scales, starts + first, width, scale_group, outliers, count)
        return
    if starts != 0:
        starts += row * (width // group) * F32_BYTES
    if tops != 0:
        tops += row * F32_BYTES
    scale = load_int(args, SCALES) + row * F32_BYTES
    offset, is_wide, rotation = load_int(args, OFFSET), load_int(args, IS_WIDE), load_int(args, ROTATION)
    quantize_row(source, target, scale, width, offset, is_wide, starts, group, tops, rotation)


@numba.njit
def _quantize_row(args, row):  # type: ignore[no-untyped-def]
    source = load_int(args, X) + row * load_int(args, X_STRIDE) * F32_BYTES
    round_row(args, source, row, load_int(args, WIDTH))


_quantize = row_loop.row_loop("quantize", _quantize_row, NUM_ROWS)


@functools.cache
def compiled() -> Any:
    """Load the kernel, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = stamp_with(row_loop.__file__, hadamard.__file__)

    def quantize_rows(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _quantize(args)

    return compile_kernel(quantize_rows)
