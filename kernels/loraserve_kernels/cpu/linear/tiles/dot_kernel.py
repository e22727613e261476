"""Products of weights in int8 by activations in int8; compiled by numba.

They are summed in 32 bits: exactly, for up to 131,072 inputs. Where the processor has VNNI, an
instruction multiplies four inputs of a channel; elsewhere two. It takes activations without a sign:
their codes plus 128, of which each channel's sum has 128 times the sum of its weights too much.
That is where its sum starts from, negated; sums that leave 32 bits on the way come back, since they
are taken modulo 2³².
"""

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
    CODES,
    DOT_BIAS,
    DOT_INPUTS,
    HAS_VNNI,
    ROW_SCALES,
    SCALES,
    SUM_STARTS,
    TILE,
    TILE_BYTES,
    VECTORS,
    WIDTH,
    X_STRIDE,
    X,
)
from loraserve_kernels.cpu.linear.tiles.tile_loop import tile_loop, tile_stamp
from loraserve_kernels.cpu.linear.tiles.tile_writer import F32, I8, I16, I32, I64, TileWriter, rows_of, store, vector
from loraserve_kernels.cpu.simd import LANES


def _dot(num_rows: int) -> Any:
    @intrinsic
    def dot(
        typingctx: Any, args: Any, number: Any, row: Any, following: Any, part: Any, num_parts: Any, kind: Any
    ) -> Any:
        """Compute `num_rows` rows of a tile's channels from activations in bytes or int16.

        Each is ``sum(code · x) · scale · row's scale + bias``, the sum exact, the end rounded once.
        """

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            writer = TileWriter(builder, values[0])
            rows = rows_of(writer, values[2], num_rows)
            row_bytes = writer.times(writer.word(X_STRIDE), 4 // DOT_INPUTS)
            inputs = [writer.at(writer.word(X), builder.mul(r, row_bytes)) for r in rows]
            codes = writer.at(writer.word(CODES), builder.mul(values[1], writer.word(TILE_BYTES)))
            codes_ahead = CodesAhead(writer, values, DOT_INPUTS * TILE)
            channel = writer.times(values[1], TILE)
            starts = writer.at(writer.word(SUM_STARTS), writer.times(channel, 4))
            first = [writer.load(writer.at(starts, writer.const(c * LANES * 4)), vector(I32)) for c in range(VECTORS)]
            sums = {
                (t, c): cgutils.alloca_once_value(builder, first[c]) for t in range(num_rows) for c in range(VECTORS)
            }
            steps = builder.udiv(writer.word(WIDTH), writer.const(DOT_INPUTS))
            with cgutils.for_range_slice(builder, writer.const(0), steps, writer.const(1), I64, inc=True) as (k, _):
                at = writer.at(codes, writer.times(k, DOT_INPUTS * TILE))
                codes_ahead.ask()
                loaded = [
                    _load_codes(writer, writer.at(at, writer.const(c * LANES * DOT_INPUTS))) for c in range(VECTORS)
                ]
                for t in range(num_rows):
                    x = writer.splat(writer.load(writer.at(inputs[t], writer.times(k, 4)), I32))
                    for c in range(VECTORS):
                        builder.store(_add_products(writer, builder.load(sums[t, c]), x, loaded[c]), sums[t, c])
            at = writer.at(writer.word(SCALES), writer.times(channel, 4))
            bias = writer.at(writer.word(DOT_BIAS), writer.times(channel, 4))

            def result(t: int, c: int) -> Any:
                scale = writer.load(writer.at(at, writer.const(c * LANES * 4)), vector(F32), 4)
                scaled = builder.fmul(builder.sitofp(builder.load(sums[t, c]), vector(F32)), scale)
                row_scale = writer.load(writer.at(writer.word(ROW_SCALES), writer.times(rows[t], 4)), F32, 4)
                added = writer.load(writer.at(bias, writer.const(c * LANES * 4)), vector(F32), 4)
                return writer.fma(scaled, writer.splat(row_scale), added)

            store(writer, rows, channel, result)
            return context.get_dummy_value()

        return types.void(types.intp, *[types.int64] * 5, kind), codegen

    return dot


def _load_codes(writer: TileWriter, address: Any) -> Any:
    """Load `DOT_INPUTS` codes of each of `LANES` channels, as products take them."""
    if HAS_VNNI:
        return writer.load(address, vector(I32))
    return writer.builder.sext(writer.load(address, vector(I8, 2 * LANES)), vector(I16, 2 * LANES))


def _add_products(writer: TileWriter, sums: Any, x: Any, codes: Any) -> Any:
    """Add the products of codes and of a row's `DOT_INPUTS` activations in x to the sums."""
    if HAS_VNNI:
        return writer.multiply_fours(sums, x, codes)
    return writer.builder.add(writer.multiply_pairs(codes, writer.builder.bitcast(x, codes.type)), sums)


# keeps this loop apart from others in numba's cache
_DOT = np.float32(0)
_run_dots = tile_loop(_dot(1), _dot(4), _dot(8))


@functools.cache
def compiled() -> Any:
    """Load the kernel for int8 by int8, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = tile_stamp()

    def multiply_int8(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _run_dots(args, _DOT)

    return compile_kernel(multiply_int8)
