"""Products of weights in 4 or 8 bits by activations in int8 with a scale for each group of 32.

Compiled by numba. A group's products are summed in whole numbers, exactly; a channel's groups are
added in order: ``total += (weight's scale · group's scale) · (sum(code · x) + zero · start)``. Then
a row's outliers are, whose codes are 0: ``total += (weight's scale · x) · (code - zero)``.
"""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import product
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from loraserve_kernels.common.quantized import MXFP4_CODE
from loraserve_kernels.cpu.compilation.compiler import compile_kernel
from loraserve_kernels.cpu.linear.tiles.codes_ahead import CodesAhead
from loraserve_kernels.cpu.linear.tiles.tile import (
    BIAS,
    CODES,
    GROUP,
    GROUP_STARTS,
    GROUP_ZEROS,
    HAS_VNNI,
    NUM_OUTLIERS,
    OUTLIERS,
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

INPUTS = 32
"""Inputs of a group of activations."""
_INPUTS_BIT = 5
_FOURS = 4
"""Inputs of a channel that stand in four neighbouring bytes."""
_PAIR_BYTES = 8
"""Bytes of an outlier: its number and its value."""

# A kind of weight: a tuple of three values, whose numba types distinguish them.
_FORMATS = {"int4": np.int32(0), "int8": np.int8(0), "mxfp4": np.float32(0)}
_SCALES = {"float32": np.float32(0), "bfloat16": np.uint16(0), "float16": np.int16(0)}
_ZEROS = {"none": np.int8(0), "uint8": np.uint8(0), "float32": np.float32(0)}
_KINDS = {
    f"g32-{format}-{scales}-{zeros}": (_FORMATS[format], _SCALES[scales], _ZEROS[zeros])
    for format, scales, zeros in product(_FORMATS, _SCALES, _ZEROS)
}
_NAMES: dict[Any, str] = {numba.typeof(kind): name for name, kind in _KINDS.items()}

_MXFP4_MIDDLE = 12
_MXFP4_BYTES = tuple(int(2 * number) + _MXFP4_MIDDLE for number in MXFP4_CODE)
"""Twice the number that a code of mxfp4 means, plus 12: no sign is left."""


class _Weight:
    """Loads and products of one kind of weight.

    Codes of int8 are their own number, or where the processor has VNNI that number plus 128. Those
    of mxfp4 are looked up as twice their number plus 12.
    """

    def __init__(self, writer: TileWriter, name: str) -> None:
        self._writer, self._builder = writer, writer.builder
        _, format, self._scales, self._zeros = name.split("-")
        self._is_int4, self._is_mxfp4 = format == "int4", format == "mxfp4"
        self._is_packed = self._is_int4 or self._is_mxfp4
        self.scale_bytes = 4 if self._scales == "float32" else 2
        self.zero_bytes = 4 if self._zeros == "float32" else 1
        self.inputs_per_load = 2 * _FOURS if self._is_packed else _FOURS

    def scale(self, address: Any) -> Any:
        """Load the scales of a vector's channels."""
        writer, builder = self._writer, self._builder
        if self._scales == "float32":
            return writer.load(address, vector(F32), 4)
        if self._scales == "float16":
            return builder.fpext(writer.load(address, vector(ir.HalfType()), 2), vector(F32))
        halves = builder.zext(writer.load(address, vector(I16), 2), vector(I32))
        return builder.bitcast(builder.shl(halves, fill(I32, 16)), vector(F32))

    def zero(self, address: Any) -> Any:
        """Load what `whole` multiplies starts with; None: with nothing."""
        writer, builder = self._writer, self._builder
        has_offset = not self._is_packed and not HAS_VNNI
        if self._zeros == "none":
            middle = _MXFP4_MIDDLE if self._is_mxfp4 else 8 if self._is_int4 else 128
            return None if has_offset else fill(F32, float(middle))
        if self._zeros == "float32":
            return writer.load(address, vector(F32), 4)
        zero = builder.uitofp(writer.load(address, vector(I8)), vector(F32))
        return builder.fsub(zero, fill(F32, 128.0)) if has_offset else zero

    def whole(self, sums: Any, zero: Any, start: Any) -> Any:
        """Compute ``sum(code · x) + zero · start``.

        Whole numbers below 2²⁴, and no step rounds, but the last one of a zero in float32.
        """
        writer = self._writer
        value = self._builder.sitofp(sums, vector(F32))
        if zero is None:
            return value
        if self._zeros == "float32" and not self._is_packed and not HAS_VNNI:
            # the sum that codes plus 128 have: the same bits on every processor
            value = writer.fma(fill(F32, -128.0), start, value)
        return writer.fma(zero, start, value)

    def codes_of(self, codes: Any, number: Any) -> list[Any]:
        """Load an input's codes by vector, as `whole` takes sums of them.

        Args:
            codes: address of a tile's codes.
            number: of the input.
        """
        writer, builder = self._writer, self._builder
        run = builder.udiv(number, writer.const(self.inputs_per_load))
        at = writer.at(codes, writer.times(run, TILE * _FOURS))
        loaded = [writer.load(writer.at(at, writer.const(c * LANES * _FOURS)), vector(I32)) for c in range(VECTORS)]
        bits = writer.times(builder.and_(number, writer.const(_FOURS - 1)), 8)
        if self._is_packed:
            # the second four inputs have the upper halves of bytes
            bits = builder.add(bits, builder.and_(number, writer.const(_FOURS)))
        shift = writer.splat(builder.trunc(bits, I32))
        if self._is_packed:
            found = [builder.and_(builder.lshr(one, shift), fill(I32, 15)) for one in loaded]
            if self._is_mxfp4:
                found = [builder.and_(writer.look_up_bytes(_MXFP4_BYTES, one), fill(I32, 255)) for one in found]
            return found
        if HAS_VNNI:
            return [builder.and_(builder.lshr(one, shift), fill(I32, 255)) for one in loaded]
        rest = builder.sub(fill(I32, 24), shift)
        return [builder.ashr(builder.shl(one, rest), fill(I32, 24)) for one in loaded]

    def sums(
        self, codes: Any, inputs: Sequence[Any], count: Any, codes_ahead: CodesAhead
    ) -> dict[tuple[int, int], Any]:
        """Compute a group's ``sum(code · x)`` by row and vector, in 32 bits.

        Args:
            codes: address of the group's codes of a tile.
            inputs: addresses of the group's activations of each row.
            count: `INPUTS`, as a number that the compiler doesn't know: it would unroll the loop,
                and run out of registers.
        """
        writer, builder = self._writer, self._builder
        cells = [(t, c) for t in range(len(inputs)) for c in range(VECTORS)]
        # eight sums of two products in int4, at most 30,480 together: 16 bits hold them
        is_short = self._is_int4 and not HAS_VNNI
        # not a constant either: else sums were converted to floats in each round of the loop
        zero = writer.splat(builder.trunc(builder.sub(count, writer.const(INPUTS)), I32))
        zero = builder.bitcast(zero, vector(I16, 2 * LANES)) if is_short else zero
        found = {cell: cgutils.alloca_once(builder, zero.type) for cell in cells}
        for cell in cells:
            builder.store(zero, found[cell])
        step = writer.const(self.inputs_per_load)
        with cgutils.for_range_slice(builder, writer.const(0), count, step, I64, inc=True) as (k, _):
            codes_ahead.ask()
            at = writer.at(codes, writer.times(k, TILE * _FOURS // self.inputs_per_load))
            loaded = [writer.load(writer.at(at, writer.const(c * LANES * _FOURS)), vector(I32)) for c in range(VECTORS)]
            halves = self._weights(loaded)
            # parts whose products are added together first, in 16 bits
            together = len(halves) if self._is_mxfp4 and not HAS_VNNI else 1
            for first in range(0, len(halves), together):
                parts = halves[first : first + together]
                for t, address in enumerate(inputs):
                    xs = [
                        writer.splat(writer.load(writer.at(address, k, writer.const((first + i) * _FOURS)), I32))
                        for i in range(len(parts))
                    ]
                    for c in range(VECTORS):
                        added = self._add(builder.load(found[t, c]), [part[c] for part in parts], xs)
                        builder.store(added, found[t, c])
        sums = {cell: builder.load(found[cell]) for cell in cells}
        return {cell: writer.sum_pairs(one) for cell, one in sums.items()} if is_short else sums

    def _weights(self, loaded: Sequence[Any]) -> list[list[tuple[Any, Any]]]:
        """Split loaded codes into four inputs' by vector: unsigned, and as they are."""
        writer, builder = self._writer, self._builder
        if self._is_packed:
            low = fill(I32, 0x0F0F0F0F)
            halves = [[builder.and_(p, low) for p in loaded]]
            halves += [[builder.and_(builder.lshr(p, fill(I32, 4)), low) for p in loaded]]
            if self._is_mxfp4:
                halves = [[writer.look_up_bytes(_MXFP4_BYTES, half) for half in part] for part in halves]
            return [[(half, half) for half in part] for part in halves]
        if HAS_VNNI:
            return [[(codes, codes) for codes in loaded]]
        return [[(writer.magnitudes(codes), codes) for codes in loaded]]

    def _add(self, sums: Any, weights: Sequence[tuple[Any, Any]], xs: Sequence[Any]) -> Any:
        """Add products with a row's four activations, one or two such fours, to the sums."""
        writer, builder = self._writer, self._builder
        if self._is_mxfp4 and not HAS_VNNI:
            # four products of at most 24 · 127 fit in 16 bits, a group's 32 don't
            products = [writer.multiply_bytes(unsigned, x) for (unsigned, _), x in zip(weights, xs, strict=True)]
            return builder.add(sums, writer.sum_pairs(builder.add(*products)))
        (unsigned, codes), x = weights[0], xs[0]
        if HAS_VNNI:
            return writer.multiply_fours(sums, unsigned, x)
        if self._is_int4:
            return builder.add(sums, writer.multiply_bytes(unsigned, x))
        # |code| · (x with the code's sign): two products of at most 128 · 127 fit in 16 bits
        return builder.add(sums, writer.sum_pairs(writer.multiply_bytes(unsigned, writer.with_signs(x, codes))))


def _product(num_rows: int) -> Any:
    @intrinsic
    def g32_product(
        typingctx: Any, args: Any, number: Any, row: Any, following: Any, part: Any, num_parts: Any, kind: Any
    ) -> Any:
        """Compute `num_rows` rows of a tile's channels from activations in int8."""
        name = _NAMES[kind]

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            writer = TileWriter(builder, values[0])
            weight = _Weight(writer, name)
            rows = rows_of(writer, values[2], num_rows)
            inputs = [writer.at(writer.word(X), builder.mul(r, writer.word(X_STRIDE))) for r in rows]
            group_bytes = [builder.mul(r, writer.times(writer.word(START_STRIDE), 4)) for r in rows]
            row_scales = [writer.at(writer.word(ROW_SCALES), offset) for offset in group_bytes]
            starts = [writer.at(writer.word(GROUP_STARTS), offset) for offset in group_bytes]
            codes = writer.at(writer.word(CODES), builder.mul(values[1], writer.word(TILE_BYTES)))
            codes_ahead = CodesAhead(writer, values, TILE * _FOURS)
            channel = writer.times(values[1], TILE)
            scales = writer.at(writer.word(SCALES), writer.times(channel, weight.scale_bytes))
            zeros = writer.at(writer.word(GROUP_ZEROS), writer.times(channel, weight.zero_bytes))
            stride, width, group = writer.word(SCALE_STRIDE), writer.word(WIDTH), writer.word(GROUP)
            cells = [(t, c) for t in range(num_rows) for c in range(VECTORS)]
            totals = {cell: cgutils.alloca_once_value(builder, ZERO) for cell in cells}
            one, inputs_count = writer.const(INPUTS), writer.smaller(group, writer.const(INPUTS))

            def of_group(count: Any) -> tuple[list[Any], list[Any]]:
                """Load the scales and zeros of a weight's group by vector."""
                place = builder.mul(count, stride)
                scale_at = writer.at(scales, writer.times(place, weight.scale_bytes))
                zero_at = writer.at(zeros, writer.times(place, weight.zero_bytes))
                offsets = [c * LANES for c in range(VECTORS)]
                return (
                    [weight.scale(writer.at(scale_at, writer.const(o * weight.scale_bytes))) for o in offsets],
                    [weight.zero(writer.at(zero_at, writer.const(o * weight.zero_bytes))) for o in offsets],
                )

            with cgutils.for_range_slice(builder, writer.const(0), width, group, I64, inc=True) as (start, count):
                scale, zero = of_group(count)
                end = writer.at(start, group)
                with cgutils.for_range_slice(builder, start, end, one, I64, inc=True) as (k, _):
                    at = writer.times(k, TILE * _FOURS // weight.inputs_per_load)
                    sums = weight.sums(
                        writer.at(codes, at), [writer.at(x, k) for x in inputs], inputs_count, codes_ahead
                    )
                    offset = writer.times(builder.lshr(k, writer.const(_INPUTS_BIT)), 4)
                    for t in range(num_rows):
                        x_scale, x_start = (
                            writer.splat(writer.load(writer.at(address[t], offset), F32, 4))
                            for address in (row_scales, starts)
                        )
                        for c in range(VECTORS):
                            whole = weight.whole(sums[t, c], zero[c], x_start)
                            factor = builder.fmul(scale[c], x_scale)
                            builder.store(writer.fma(factor, whole, builder.load(totals[t, c])), totals[t, c])
            num_outliers, outlier_step = writer.word(NUM_OUTLIERS), writer.const(1)
            pairs = [
                writer.at(writer.word(OUTLIERS), builder.mul(r, writer.times(num_outliers, _PAIR_BYTES))) for r in rows
            ]
            with cgutils.for_range_slice(builder, writer.const(0), num_outliers, outlier_step, I64, inc=True) as (i, _):
                for t in range(num_rows):
                    pair = writer.at(pairs[t], writer.times(i, _PAIR_BYTES))
                    number = builder.fptosi(writer.load(pair, F32, 4), I64)
                    value = writer.splat(writer.load(writer.at(pair, writer.const(4)), F32, 4))
                    scale, zero = of_group(builder.udiv(number, group))
                    for c, code in enumerate(weight.codes_of(codes, number)):
                        whole = weight.whole(code, zero[c], fill(F32, -1.0))
                        factor = builder.fmul(scale[c], value)
                        builder.store(writer.fma(factor, whole, builder.load(totals[t, c])), totals[t, c])
            bias = writer.at(writer.word(BIAS), writer.times(channel, 4))

            def result(t: int, c: int) -> Any:
                added = writer.load(writer.at(bias, writer.const(c * LANES * 4)), vector(F32), 4)
                return builder.fadd(builder.load(totals[t, c]), added)

            store(writer, rows, channel, result)
            return context.get_dummy_value()

        return types.void(types.intp, *[types.int64] * 5, kind), codegen

    return g32_product


_run_products = tile_loop(_product(1), _product(4), _product(8))


@functools.cache
def compiled(name: str) -> Any:
    """Load the kernel for a kind of weight, compiled or read from numba's cache.

    It is a C function of the argument block's address.

    Args:
        name: a `G32Weight.kernel`.
    """
    stamp, kind = tile_stamp(), _KINDS[name]

    def multiply_g32(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _run_products(args, kind)

    # by its name numba resolves it from its cache, too
    multiply_g32.__name__ = multiply_g32.__qualname__ = f"multiply_{name.replace('-', '_')}"
    return compile_kernel(multiply_g32)
