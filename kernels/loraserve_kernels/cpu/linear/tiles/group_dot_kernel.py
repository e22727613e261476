"""Products of weights in int4, in groups, by activations in int8; compiled by numba."""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from loraserve_kernels.cpu.compilation.compiler import compile_kernel
from loraserve_kernels.cpu.linear.tiles.codes_ahead import CodesAhead
from loraserve_kernels.cpu.linear.tiles.tile import (
    BIAS,
    CODES,
    GROUP,
    GROUP_STARTS,
    GROUP_ZEROS,
    ROW_SCALES,
    SCALE_STRIDE,
    SCALES,
    START_STRIDE,
    TILE,
    TILE_BYTES,
    VECTORS,
    WIDTH,
    X_STRIDE,
    X,
)
from loraserve_kernels.cpu.linear.tiles.tile_loop import tile_loop, tile_stamp
from loraserve_kernels.cpu.linear.tiles.tile_writer import (
    F32,
    I8,
    I16,
    I32,
    I64,
    ZERO,
    TileWriter,
    fill,
    rows_of,
    store,
    vector,
)
from loraserve_kernels.cpu.simd import LANES

FOURS = 4
"""Inputs of a channel whose codes of int4 are one half of four bytes; the next four are the other
half.
"""


def _group_dot(num_rows: int, scale_bytes: int) -> Any:
    @intrinsic
    def group_dot(
        typingctx: Any, args: Any, number: Any, row: Any, following: Any, part: Any, num_parts: Any, kind: Any
    ) -> Any:
        """Compute `num_rows` rows of a tile's channels in int4 from activations in int8.

        Each is ``Σ_group scale · (sum(code · x) + zero · start) · row's scale + bias``, a group's
        sum exact.
        """

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            writer = TileWriter(builder, values[0])
            rows = rows_of(writer, values[2], num_rows)
            inputs = [writer.at(writer.word(X), builder.mul(r, writer.word(X_STRIDE))) for r in rows]
            start_bytes = writer.times(writer.word(START_STRIDE), 4)
            starts = [writer.at(writer.word(GROUP_STARTS), builder.mul(r, start_bytes)) for r in rows]
            codes = writer.at(writer.word(CODES), builder.mul(values[1], writer.word(TILE_BYTES)))
            codes_ahead = CodesAhead(writer, values, TILE * 4)
            channel = writer.times(values[1], TILE)
            scales = writer.at(writer.word(SCALES), writer.times(channel, scale_bytes))
            zeros = writer.at(writer.word(GROUP_ZEROS), channel)
            stride, width, group = writer.word(SCALE_STRIDE), writer.word(WIDTH), writer.word(GROUP)
            cells = [(t, c) for t in range(num_rows) for c in range(VECTORS)]
            totals = {cell: cgutils.alloca_once_value(builder, ZERO) for cell in cells}
            sums = {cell: cgutils.alloca_once(builder, vector(I32)) for cell in cells}
            low = fill(I32, 0x0F0F0F0F)
            with cgutils.for_range_slice(builder, writer.const(0), width, group, I64, inc=True) as (start, _):
                for cell in cells:
                    builder.store(fill(I32, 0), sums[cell])
                end = writer.at(start, group)
                with cgutils.for_range_slice(builder, start, end, writer.const(2 * FOURS), I64, inc=True) as (k, _):
                    # four bytes a channel hold eight inputs
                    at = writer.at(codes, writer.times(k, TILE * FOURS // (2 * FOURS)))
                    codes_ahead.ask()
                    packed = [
                        writer.load(writer.at(at, writer.const(c * LANES * 4)), vector(I32)) for c in range(VECTORS)
                    ]
                    halves = [
                        [builder.and_(p, low) for p in packed],
                        [builder.and_(builder.lshr(p, fill(I32, 4)), low) for p in packed],
                    ]
                    for half in (0, 1):
                        for t in range(num_rows):
                            address = writer.at(inputs[t], k, writer.const(half * FOURS))
                            x = writer.splat(writer.load(address, I32))
                            for c in range(VECTORS):
                                value = writer.add_fours(builder.load(sums[t, c]), halves[half][c], x)
                                builder.store(value, sums[t, c])
                index = builder.udiv(start, group)
                place = builder.mul(index, stride)
                at, zeros_at = writer.at(scales, writer.times(place, scale_bytes)), writer.at(zeros, place)
                for c in range(VECTORS):
                    scale = _scales(writer, writer.at(at, writer.const(c * LANES * scale_bytes)), scale_bytes)
                    bytes_ = writer.load(writer.at(zeros_at, writer.const(c * LANES)), vector(I8))
                    zero = builder.uitofp(bytes_, vector(F32))
                    for t in range(num_rows):
                        first = writer.splat(writer.load(writer.at(starts[t], writer.times(index, 4)), F32, 4))
                        # whole numbers below 2²⁴: no step rounds
                        exact = writer.fma(zero, first, builder.sitofp(builder.load(sums[t, c]), vector(F32)))
                        builder.store(writer.fma(scale, exact, builder.load(totals[t, c])), totals[t, c])
            bias = writer.at(writer.word(BIAS), writer.times(channel, 4))

            def result(t: int, c: int) -> Any:
                row_scale = writer.load(writer.at(writer.word(ROW_SCALES), writer.times(rows[t], 4)), F32, 4)
                added = writer.load(writer.at(bias, writer.const(c * LANES * 4)), vector(F32), 4)
                return writer.fma(builder.load(totals[t, c]), writer.splat(row_scale), added)

            store(writer, rows, channel, result)
            return context.get_dummy_value()

        return types.void(types.intp, *[types.int64] * 5, kind), codegen

    return group_dot


def _scales(writer: TileWriter, address: Any, scale_bytes: int) -> Any:
    """Load the scales of a vector's channels, from float32 or bfloat16 in memory."""
    if scale_bytes == 4:
        return writer.load(address, vector(F32), 4)
    halves = writer.builder.zext(writer.load(address, vector(I16), 2), vector(I32))
    return writer.builder.bitcast(writer.builder.shl(halves, fill(I32, 16)), vector(F32))


# keep these loops apart from others in numba's cache
_GROUP_DOT, _GROUP_DOT_HALF = np.float64(0), np.complex64(0)
_run_group_dots = tile_loop(_group_dot(1, 4), _group_dot(4, 4), _group_dot(8, 4))
_run_half_group_dots = tile_loop(_group_dot(1, 2), _group_dot(4, 2), _group_dot(8, 2))


@functools.cache
def compiled() -> Any:
    """Load the kernel for int4 by int8, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = tile_stamp()

    def multiply_int4(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _run_group_dots(args, _GROUP_DOT)

    return compile_kernel(multiply_int4)


@functools.cache
def compiled_half() -> Any:
    """Load the kernel for int4 with scales in bfloat16 by int8, as `compiled` does."""
    stamp = tile_stamp()

    def multiply_int4_half(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _run_half_group_dots(args, _GROUP_DOT_HALF)

    return compile_kernel(multiply_int4_half)
