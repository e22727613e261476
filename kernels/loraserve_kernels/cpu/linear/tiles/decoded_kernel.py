"""Products whose weights are decoded in registers while they're multiplied; compiled by numba.

A channel's sum runs over the inputs in order, group by group:
``total += scale · sum(code · x)``.
"""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from loraserve_kernels.common.quantized import TABLES
from loraserve_kernels.cpu.compilation.compiler import compile_kernel
from loraserve_kernels.cpu.linear.tiles.codes_ahead import CodesAhead
from loraserve_kernels.cpu.linear.tiles.tile import (
    BIAS,
    CODES,
    GROUP,
    SCALE_STRIDE,
    SCALES,
    TILE,
    TILE_BYTES,
    VECTORS,
    WIDTH,
    X_STRIDE,
    ZERO_STRIDE,
    ZEROS,
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

# Kinds of codes, passed as values whose numba types distinguish them.
INT8, INT8_ZEROS, INT4, INT4_ZEROS, NF4, FP8, BF16, F16, MXFP4 = (
    np.int8(0),
    np.uint8(0),
    np.int32(0),
    np.uint32(0),
    np.int64(0),
    np.uint64(0),
    np.uint16(0),
    np.int16(0),
    np.float32(0),
)
INT8_FLOAT_ZEROS, INT4_FLOAT_ZEROS = (np.int8(0), np.float32(0)), (np.int32(0), np.float32(0))
_NAMES: dict[Any, str] = {
    types.int8: "int8",
    types.uint8: "int8z",
    types.int32: "int4",
    types.uint32: "int4z",
    types.int64: "nf4",
    types.uint64: "fp8",
    types.uint16: "bf16",
    types.int16: "f16",
    types.float32: "mxfp4",
    numba.typeof(INT8_FLOAT_ZEROS): "int8f",
    numba.typeof(INT4_FLOAT_ZEROS): "int4f",
}
_INT4_CODE = tuple(float(code - 8) for code in range(16))
FP8_SCALE = 256.0
"""Factor for numbers of fp8 that were decoded as a float16 with the same bits."""


def _codes_per_load(kind: str) -> int:
    return 2 if kind in ("int4", "int4z", "int4f", *TABLES) else 1


def _code_bytes(kind: str) -> int:
    return 2 if kind in ("bf16", "f16") else 1


def _decode(writer: TileWriter, kind: str, address: Any, zero: Any) -> list[Any]:
    """Decode the codes of one input, or of two inputs, of `LANES` channels.

    The values aren't scaled yet.
    """
    builder, ints, floats = writer.builder, vector(I32), vector(F32)
    if kind == "bf16":
        raw = builder.zext(writer.load(address, vector(I16)), ints)
        return [builder.bitcast(builder.shl(raw, fill(I32, 16)), floats)]
    if kind == "f16":
        return [builder.fpext(writer.load(address, vector(ir.HalfType())), floats)]
    raw = writer.load(address, vector(I8))
    if kind == "fp8":
        # the sign is in the two highest bits then, and the second belongs to the exponent
        bits = builder.shl(builder.sext(raw, vector(I16)), fill(I16, 7))
        bits = builder.and_(bits, fill(I16, 0xBFFF))
        return [builder.fpext(builder.bitcast(bits, vector(ir.HalfType())), floats)]
    if kind == "int8f":
        # plus 128: a zero in float32 is subtracted from that, in one rounding
        value = builder.sitofp(builder.zext(builder.xor(raw, fill(I8, 0x80)), ints), floats)
        return [builder.fsub(value, zero)]
    if kind in ("int8", "int8z"):
        value = builder.sitofp(builder.sext(raw, ints), floats)
        return [value if kind == "int8" else builder.fsub(value, zero)]
    wide = builder.zext(raw, ints)
    high = builder.lshr(wide, fill(I32, 4))
    if kind == "int4" or kind in TABLES:
        # a look-up takes the place of two instructions that convert and subtract 8
        table = TABLES.get(kind, _INT4_CODE)
        return [writer.look_up(table, half) for half in (wide, high)]
    halves = [builder.and_(wide, fill(I32, 15)), high]
    return [builder.fsub(builder.sitofp(half, floats), zero) for half in halves]


def _tile(num_rows: int) -> Any:
    @intrinsic
    def tile(
        typingctx: Any, args: Any, number: Any, row: Any, following: Any, part: Any, num_parts: Any, kind: Any
    ) -> Any:
        """Compute `num_rows` rows of a tile's channels from activations in float32."""
        name = _NAMES[kind]

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            writer = TileWriter(builder, values[0])
            rows = rows_of(writer, values[2], num_rows)
            row_bytes = writer.times(writer.word(X_STRIDE), 4)
            inputs = [writer.at(writer.word(X), builder.mul(r, row_bytes)) for r in rows]
            codes = writer.at(writer.word(CODES), builder.mul(values[1], writer.word(TILE_BYTES)))
            codes_ahead = CodesAhead(writer, values, TILE * _code_bytes(name))
            channel = writer.times(values[1], TILE)
            scales = writer.at(writer.word(SCALES), writer.times(channel, 4))
            zero_size = 4 if name in ("int8f", "int4f") else 1
            zeros = writer.at(writer.word(ZEROS), writer.times(channel, zero_size))
            scale_bytes = writer.times(writer.word(SCALE_STRIDE), 4)
            zero_bytes = writer.times(writer.word(ZERO_STRIDE), zero_size)
            width, group = writer.word(WIDTH), writer.word(GROUP)
            cells = [(t, c) for t in range(num_rows) for c in range(VECTORS)]
            totals = {cell: cgutils.alloca_once_value(builder, ZERO) for cell in cells}
            sums = {cell: cgutils.alloca_once(builder, vector(F32)) for cell in cells}
            per_load = _codes_per_load(name)
            with cgutils.for_range_slice(builder, writer.const(0), width, group, I64, inc=True) as (start, _):
                for cell in cells:
                    builder.store(ZERO, sums[cell])
                index = builder.udiv(start, group)
                zero: list[Any] = [fill(F32, 8.0)] * VECTORS
                first = writer.at(zeros, builder.mul(index, zero_bytes))
                if name in ("int4f", "int8f"):
                    offsets = [writer.const(c * LANES * 4) for c in range(VECTORS)]
                    zero = [writer.load(writer.at(first, offset), vector(F32), 4) for offset in offsets]
                elif name in ("int4z", "int8z"):
                    raw = [writer.load(writer.at(first, writer.const(c * LANES)), vector(I8)) for c in range(VECTORS)]
                    zero = [builder.uitofp(one, vector(F32)) for one in raw]
                    if name == "int8z":
                        zero = [builder.fsub(one, fill(F32, 128.0)) for one in zero]
                end = writer.smaller(writer.at(start, group), width)
                with cgutils.for_range_slice(builder, start, end, writer.const(per_load), I64, inc=True) as (k, _):
                    step = builder.udiv(k, writer.const(per_load))
                    at = writer.at(codes, writer.times(step, TILE * _code_bytes(name)))
                    codes_ahead.ask()
                    decoded = [
                        _decode(writer, name, writer.at(at, writer.const(c * LANES * _code_bytes(name))), zero[c])
                        for c in range(VECTORS)
                    ]
                    for part in range(per_load):
                        offset = writer.times(writer.at(k, writer.const(part)), 4)
                        for t in range(num_rows):
                            x = writer.splat(writer.load(writer.at(inputs[t], offset), F32, 4))
                            for c in range(VECTORS):
                                value = writer.fma(decoded[c][part], x, builder.load(sums[t, c]))
                                builder.store(value, sums[t, c])
                at = writer.at(scales, builder.mul(index, scale_bytes))
                for c in range(VECTORS):
                    scale = writer.load(writer.at(at, writer.const(c * LANES * 4)), vector(F32), 4)
                    for t in range(num_rows):
                        value = writer.fma(scale, builder.load(sums[t, c]), builder.load(totals[t, c]))
                        builder.store(value, totals[t, c])
            bias = writer.at(writer.word(BIAS), writer.times(channel, 4))
            store(writer, rows, channel, lambda t, c: _with_bias(writer, builder.load(totals[t, c]), bias, c))
            return context.get_dummy_value()

        return types.void(types.intp, *[types.int64] * 5, kind), codegen

    return tile


def _with_bias(writer: TileWriter, value: Any, bias: Any, c: int) -> Any:
    return writer.builder.fadd(value, writer.load(writer.at(bias, writer.const(c * LANES * 4)), vector(F32), 4))


_run_tiles = tile_loop(_tile(1), _tile(4), _tile(8))


_KINDS: dict[str, Any] = {
    _NAMES[numba.typeof(kind)]: kind
    for kind in (
        INT8,
        INT8_ZEROS,
        INT8_FLOAT_ZEROS,
        INT4,
        INT4_ZEROS,
        INT4_FLOAT_ZEROS,
        NF4,
        FP8,
        BF16,
        F16,
        MXFP4,
    )
}


@functools.cache
def compiled(name: str) -> Any:
    """Load the kernel for codes of a kind, compiled or read from numba's cache.

    It is a C function of the argument block's address.

    Args:
        name: a `DecodedWeight.kind`.
    """
    stamp, kind = tile_stamp(), _KINDS[name]

    def multiply(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _run_tiles(args, kind)

    # by its name numba resolves it from its cache, too
    multiply.__name__ = multiply.__qualname__ = f"multiply_{name}"
    return compile_kernel(multiply)
