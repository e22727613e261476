"""Linears whose weights are decoded in registers while they're multiplied; compiled by numba.

A thread claims a tile of `TILE` output channels and a chunk of rows. The codes of a tile stand side
by side for each input, so that one load has an input's codes of `LANES` channels. A channel's sum
runs over the inputs in order, group by group: ``total += scale · sum(code · x)``, with the same
instructions in the same order for any number of rows, so that a row's bits don't depend on the
others. Products of int8 by int8 are summed in 32 bits: exactly, for up to 131,072 inputs. Where the
processor has VNNI, an instruction multiplies four inputs of a channel; elsewhere two. It takes
activations without a sign: their codes plus 128, of which each channel's sum has 128 times the sum
of its weights too much. That is where its sum starts from, negated; sums that leave 32 bits on the
way come back, since they are taken modulo 2³².
"""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from loraserve_kernels.common.quantized import NF4_CODE
from loraserve_kernels.cpu.simd import FEATURES, LANES, STAMP, fetch_add, load_int

# The argument block, in int64 words. The counter is on a cache line of its own.
CLAIMED, X, X_STRIDE, NUM_ROWS, Y, Y_STRIDE, CODES, TILE_BYTES = 0, 8, 9, 10, 11, 12, 13, 14
SCALES, SCALE_STRIDE, ZEROS, ZERO_STRIDE, BIAS, WIDTH, GROUP, NUM_TILES, NUM_WORDS = 15, 16, 17, 18, 19, 20, 21, 22, 24
SUM_STARTS, ROW_SCALES, DOT_BIAS = GROUP, ZEROS, BIAS
"""int8 by int8: each channel's first sum, [channels] int32; the rows' scales, [rows] float32."""
GROUP_STARTS, START_STRIDE = 23, ZERO_STRIDE
"""int4 by int8: what is added to the sum of each group, [rows, groups] float32."""

VECTORS = 2
TILE = VECTORS * LANES
"""Output channels of a tile."""
HAS_VNNI = ("avx512vnni" if LANES == 16 else "avxvnni") in FEATURES
DOT_INPUTS = 4 if HAS_VNNI else 2
"""Inputs of a channel that one instruction multiplies in int8 by int8: they stand side by side."""
CHUNK = 64
"""Rows that a thread claims with a tile: few enough for a core's own cache."""

# Kinds of codes, passed as values whose numba types tell them apart.
INT8, INT8_ZEROS, INT4, INT4_ZEROS, NF4, FP8, BF16, F16 = (
    np.int8(0),
    np.uint8(0),
    np.int32(0),
    np.uint32(0),
    np.int64(0),
    np.uint64(0),
    np.uint16(0),
    np.int16(0),
)
_NAMES: dict[Any, str] = {
    types.int8: "int8",
    types.uint8: "int8z",
    types.int32: "int4",
    types.uint32: "int4z",
    types.int64: "nf4",
    types.uint64: "fp8",
    types.uint16: "bf16",
    types.int16: "f16",
}
_INT4_CODE = tuple(float(code - 8) for code in range(16))
FP8_SCALE = 256.0
"""Factor for numbers of fp8 that were decoded as a float16 with the same bits."""

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOAT = ir.FloatType()


def _vector(element: ir.Type, lanes: int = LANES) -> ir.Type:
    return ir.VectorType(element, lanes)


def _fill(element: ir.Type, number: Any, lanes: int = LANES) -> Any:
    return ir.Constant(_vector(element, lanes), [number] * lanes)


_ZERO = ir.Constant(_vector(_FLOAT), [0.0] * LANES)


class _Writer:
    """Writes what the kernels have in common.

    These are words of the argument block, and vectors at addresses in bytes.
    """

    def __init__(self, builder: Any, args: Any) -> None:
        self.builder, self._args = builder, args

    def word(self, index: int) -> Any:
        return self.load(self.builder.add(self._args, self.const(8 * index)), _I64, 8)

    def const(self, number: int) -> Any:
        return ir.Constant(_I64, number)

    def times(self, value: Any, number: int) -> Any:
        return self.builder.mul(value, self.const(number))

    def at(self, base: Any, *offsets: Any) -> Any:
        for offset in offsets:
            base = self.builder.add(base, offset)
        return base

    def smaller(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def load(self, address: Any, kind: ir.Type, align: int = 1) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=4)

    def splat(self, value: Any) -> Any:
        undefined = ir.Constant(_vector(value.type), ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, undefined, _fill(_I32, 0))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self._call(f"llvm.fmuladd.v{LANES}f32", _vector(_FLOAT), a, b, c)

    def look_up(self, table: tuple[float, ...], indices: Any) -> Any:
        """Return the entries of a table of 16 at the low four bits of a vector of int32."""
        builder = self.builder
        if LANES == 16 and "avx512f" in FEATURES:
            return self._call(
                "llvm.x86.avx512.permvar.sf.512", _vector(_FLOAT), ir.Constant(_vector(_FLOAT), list(table)), indices
            )
        indices = builder.and_(indices, _fill(_I32, 15))
        if LANES == 8 and "avx2" in FEATURES:
            halves = [
                self._call(
                    "llvm.x86.avx2.permps",
                    _vector(_FLOAT),
                    ir.Constant(_vector(_FLOAT), list(table[first : first + 8])),
                    indices,
                )
                for first in (0, 8)
            ]
            return builder.select(builder.icmp_signed("<", indices, _fill(_I32, 8)), *halves)
        # a tree of choices, which every machine has
        entries = [_fill(_FLOAT, number) for number in table]
        for bit in range(4):
            is_set = builder.icmp_signed("!=", builder.and_(indices, _fill(_I32, 1 << bit)), _fill(_I32, 0))
            entries = [builder.select(is_set, high, low) for low, high in zip(entries[::2], entries[1::2], strict=True)]
        return entries[0]

    def multiply_pairs(self, a: Any, b: Any) -> Any:
        """Return products of int16, each pair of neighbours summed in 32 bits."""
        builder = self.builder
        if LANES == 16 and "avx512bw" in FEATURES:
            return self._call("llvm.x86.avx512.pmaddw.d.512", _vector(_I32), a, b)
        if LANES == 8 and "avx2" in FEATURES:
            return self._call("llvm.x86.avx2.pmadd.wd", _vector(_I32), a, b)
        parts = []
        for first in (0, 1):
            order = ir.Constant(_vector(_I32), list(range(first, 2 * LANES, 2)))
            wide = [builder.sext(builder.shuffle_vector(v, v, order), _vector(_I32)) for v in (a, b)]
            parts.append(builder.mul(*wide))
        return builder.add(*parts)

    def multiply_fours(self, sums: Any, a: Any, b: Any) -> Any:
        """Return the sums plus four products of bytes each, of unsigned a by signed b."""
        return self._call(f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", _vector(_I32), sums, a, b)

    def add_fours(self, sums: Any, a: Any, b: Any) -> Any:
        """Return the sums plus four products each, of codes of int4 by bytes with a sign."""
        if HAS_VNNI:
            return self.multiply_fours(sums, a, b)
        # two products of at most 15 · 128 fit in 16 bits
        shorts, width = _vector(_I16, 2 * LANES), 32 * LANES
        name = "llvm.x86.avx512.pmaddubs.w.512" if LANES == 16 else "llvm.x86.avx2.pmadd.ub.sw"
        bytes_ = _vector(_I8, width // 8)
        pairs = self._call(name, shorts, self.builder.bitcast(a, bytes_), self.builder.bitcast(b, bytes_))
        return self.builder.add(sums, self.multiply_pairs(pairs, _fill(_I16, 1, 2 * LANES)))

    def _call(self, name: str, result: ir.Type, *args: Any) -> Any:
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(result, [arg.type for arg in args]), name
        )
        return self.builder.call(function, args)


def _codes_per_load(kind: str) -> int:
    return 2 if kind in ("int4", "int4z", "nf4") else 1


def _code_bytes(kind: str) -> int:
    return 2 if kind in ("bf16", "f16") else 1


def _decode(writer: _Writer, kind: str, address: Any, zero: Any) -> list[Any]:
    """Return the values of one input's codes, or of two inputs', of `LANES` channels.

    They aren't scaled yet.
    """
    builder, ints, floats = writer.builder, _vector(_I32), _vector(_FLOAT)
    if kind == "bf16":
        raw = builder.zext(writer.load(address, _vector(_I16)), ints)
        return [builder.bitcast(builder.shl(raw, _fill(_I32, 16)), floats)]
    if kind == "f16":
        return [builder.fpext(writer.load(address, _vector(ir.HalfType())), floats)]
    raw = writer.load(address, _vector(_I8))
    if kind == "fp8":
        # the sign is in the two highest bits then, and the second belongs to the exponent
        bits = builder.shl(builder.sext(raw, _vector(_I16)), _fill(_I16, 7))
        bits = builder.and_(bits, _fill(_I16, 0xBFFF))
        return [builder.fpext(builder.bitcast(bits, _vector(ir.HalfType())), floats)]
    if kind in ("int8", "int8z"):
        value = builder.sitofp(builder.sext(raw, ints), floats)
        return [value if kind == "int8" else builder.fsub(value, zero)]
    wide = builder.zext(raw, ints)
    high = builder.lshr(wide, _fill(_I32, 4))
    if kind in ("nf4", "int4"):
        # a look-up takes the place of two instructions that convert and subtract 8
        table = NF4_CODE if kind == "nf4" else _INT4_CODE
        return [writer.look_up(table, half) for half in (wide, high)]
    halves = [builder.and_(wide, _fill(_I32, 15)), high]
    return [builder.fsub(builder.sitofp(half, floats), zero) for half in halves]


def _rows_of(writer: _Writer, row: Any, num_rows: int) -> list[Any]:
    """Return the numbers of a block's rows.

    Beyond the last it's the last again: computed twice, and stored twice.
    """
    last = writer.builder.sub(writer.word(NUM_ROWS), writer.const(1))
    return [writer.smaller(writer.at(row, writer.const(t)), last) for t in range(num_rows)]


def _tile(num_rows: int) -> Any:
    @intrinsic
    def tile(typingctx: Any, args: Any, number: Any, row: Any, kind: Any) -> Any:
        """Compute `num_rows` rows of a tile's channels from activations in float32."""
        name = _NAMES[kind]

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            writer = _Writer(builder, values[0])
            rows = _rows_of(writer, values[2], num_rows)
            row_bytes = writer.times(writer.word(X_STRIDE), 4)
            inputs = [writer.at(writer.word(X), builder.mul(r, row_bytes)) for r in rows]
            codes = writer.at(writer.word(CODES), builder.mul(values[1], writer.word(TILE_BYTES)))
            channel = writer.times(values[1], TILE)
            scales = writer.at(writer.word(SCALES), writer.times(channel, 4))
            zeros = writer.at(writer.word(ZEROS), channel)
            scale_bytes, zero_bytes = writer.times(writer.word(SCALE_STRIDE), 4), writer.word(ZERO_STRIDE)
            width, group = writer.word(WIDTH), writer.word(GROUP)
            cells = [(t, c) for t in range(num_rows) for c in range(VECTORS)]
            totals = {cell: cgutils.alloca_once_value(builder, _ZERO) for cell in cells}
            sums = {cell: cgutils.alloca_once(builder, _vector(_FLOAT)) for cell in cells}
            per_load = _codes_per_load(name)
            with cgutils.for_range_slice(builder, writer.const(0), width, group, _I64, inc=True) as (start, _):
                for cell in cells:
                    builder.store(_ZERO, sums[cell])
                index = builder.udiv(start, group)
                zero: list[Any] = [_fill(_FLOAT, 8.0)] * VECTORS
                if name in ("int4z", "int8z"):
                    first = writer.at(zeros, builder.mul(index, zero_bytes))
                    raw = [writer.load(writer.at(first, writer.const(c * LANES)), _vector(_I8)) for c in range(VECTORS)]
                    zero = [builder.uitofp(one, _vector(_FLOAT)) for one in raw]
                    if name == "int8z":
                        zero = [builder.fsub(one, _fill(_FLOAT, 128.0)) for one in zero]
                end = writer.smaller(writer.at(start, group), width)
                with cgutils.for_range_slice(builder, start, end, writer.const(per_load), _I64, inc=True) as (k, _):
                    step = builder.udiv(k, writer.const(per_load))
                    at = writer.at(codes, writer.times(step, TILE * _code_bytes(name)))
                    decoded = [
                        _decode(writer, name, writer.at(at, writer.const(c * LANES * _code_bytes(name))), zero[c])
                        for c in range(VECTORS)
                    ]
                    for part in range(per_load):
                        offset = writer.times(writer.at(k, writer.const(part)), 4)
                        for t in range(num_rows):
                            x = writer.splat(writer.load(writer.at(inputs[t], offset), _FLOAT, 4))
                            for c in range(VECTORS):
                                value = writer.fma(decoded[c][part], x, builder.load(sums[t, c]))
                                builder.store(value, sums[t, c])
                at = writer.at(scales, builder.mul(index, scale_bytes))
                for c in range(VECTORS):
                    scale = writer.load(writer.at(at, writer.const(c * LANES * 4)), _vector(_FLOAT), 4)
                    for t in range(num_rows):
                        value = writer.fma(scale, builder.load(sums[t, c]), builder.load(totals[t, c]))
                        builder.store(value, totals[t, c])
            bias = writer.at(writer.word(BIAS), writer.times(channel, 4))
            _store(writer, rows, channel, lambda t, c: _with_bias(writer, builder.load(totals[t, c]), bias, c))
            return context.get_dummy_value()

        return types.void(types.intp, types.int64, types.int64, kind), codegen

    return tile


def _with_bias(writer: _Writer, value: Any, bias: Any, c: int) -> Any:
    return writer.builder.fadd(value, writer.load(writer.at(bias, writer.const(c * LANES * 4)), _vector(_FLOAT), 4))


def _store(writer: _Writer, rows: list[Any], channel: Any, value: Callable[[int, int], Any]) -> None:
    row_bytes = writer.times(writer.word(Y_STRIDE), 4)
    first = writer.at(writer.word(Y), writer.times(channel, 4))
    for t, r in enumerate(rows):
        for c in range(VECTORS):
            writer.store(value(t, c), writer.at(first, writer.builder.mul(r, row_bytes), writer.const(c * LANES * 4)))


def _dot(num_rows: int) -> Any:
    @intrinsic
    def dot(typingctx: Any, args: Any, number: Any, row: Any, kind: Any) -> Any:
        """Compute `num_rows` rows of a tile's channels from activations in bytes or int16.

        Each is ``sum(code · x) · scale · row's scale + bias``, the sum exact, the end rounded once.
        """

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            writer = _Writer(builder, values[0])
            rows = _rows_of(writer, values[2], num_rows)
            row_bytes = writer.times(writer.word(X_STRIDE), 4 // DOT_INPUTS)
            inputs = [writer.at(writer.word(X), builder.mul(r, row_bytes)) for r in rows]
            codes = writer.at(writer.word(CODES), builder.mul(values[1], writer.word(TILE_BYTES)))
            channel = writer.times(values[1], TILE)
            starts = writer.at(writer.word(SUM_STARTS), writer.times(channel, 4))
            first = [writer.load(writer.at(starts, writer.const(c * LANES * 4)), _vector(_I32)) for c in range(VECTORS)]
            sums = {
                (t, c): cgutils.alloca_once_value(builder, first[c]) for t in range(num_rows) for c in range(VECTORS)
            }
            steps = builder.udiv(writer.word(WIDTH), writer.const(DOT_INPUTS))
            with cgutils.for_range_slice(builder, writer.const(0), steps, writer.const(1), _I64, inc=True) as (k, _):
                at = writer.at(codes, writer.times(k, DOT_INPUTS * TILE))
                loaded = [
                    _load_codes(writer, writer.at(at, writer.const(c * LANES * DOT_INPUTS))) for c in range(VECTORS)
                ]
                for t in range(num_rows):
                    x = writer.splat(writer.load(writer.at(inputs[t], writer.times(k, 4)), _I32))
                    for c in range(VECTORS):
                        builder.store(_add_products(writer, builder.load(sums[t, c]), x, loaded[c]), sums[t, c])
            at = writer.at(writer.word(SCALES), writer.times(channel, 4))
            bias = writer.at(writer.word(DOT_BIAS), writer.times(channel, 4))

            def result(t: int, c: int) -> Any:
                scale = writer.load(writer.at(at, writer.const(c * LANES * 4)), _vector(_FLOAT), 4)
                scaled = builder.fmul(builder.sitofp(builder.load(sums[t, c]), _vector(_FLOAT)), scale)
                row_scale = writer.load(writer.at(writer.word(ROW_SCALES), writer.times(rows[t], 4)), _FLOAT, 4)
                added = writer.load(writer.at(bias, writer.const(c * LANES * 4)), _vector(_FLOAT), 4)
                return writer.fma(scaled, writer.splat(row_scale), added)

            _store(writer, rows, channel, result)
            return context.get_dummy_value()

        return types.void(types.intp, types.int64, types.int64, kind), codegen

    return dot


def _load_codes(writer: _Writer, address: Any) -> Any:
    """Return `DOT_INPUTS` codes of each of `LANES` channels, as products take them."""
    if HAS_VNNI:
        return writer.load(address, _vector(_I32))
    return writer.builder.sext(writer.load(address, _vector(_I8, 2 * LANES)), _vector(_I16, 2 * LANES))


def _add_products(writer: _Writer, sums: Any, x: Any, codes: Any) -> Any:
    """Return the sums plus the products of codes and of a row's `DOT_INPUTS` activations in x."""
    if HAS_VNNI:
        return writer.multiply_fours(sums, x, codes)
    return writer.builder.add(writer.multiply_pairs(codes, writer.builder.bitcast(x, codes.type)), sums)


HAS_BYTE_PAIRS = "avx512bw" in FEATURES if LANES == 16 else "avx2" in FEATURES
"""Whether there is an instruction that multiplies bytes without a sign by bytes with one."""
FOURS = 4
"""Inputs of a channel whose codes of int4 are one half of four bytes; the next four are the other
half.
"""


def _group_dot(num_rows: int) -> Any:
    @intrinsic
    def group_dot(typingctx: Any, args: Any, number: Any, row: Any, kind: Any) -> Any:
        """Compute `num_rows` rows of a tile's channels in int4 from activations in int8.

        Each is ``Σ_group scale · (sum(code · x) + start) · row's scale + bias``, a group's sum
        exact.
        """

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            writer = _Writer(builder, values[0])
            rows = _rows_of(writer, values[2], num_rows)
            inputs = [writer.at(writer.word(X), builder.mul(r, writer.word(X_STRIDE))) for r in rows]
            start_bytes = writer.times(writer.word(START_STRIDE), 4)
            starts = [writer.at(writer.word(GROUP_STARTS), builder.mul(r, start_bytes)) for r in rows]
            codes = writer.at(writer.word(CODES), builder.mul(values[1], writer.word(TILE_BYTES)))
            channel = writer.times(values[1], TILE)
            scales = writer.at(writer.word(SCALES), writer.times(channel, 4))
            scale_bytes, width, group = (
                writer.times(writer.word(SCALE_STRIDE), 4),
                writer.word(WIDTH),
                writer.word(GROUP),
            )
            cells = [(t, c) for t in range(num_rows) for c in range(VECTORS)]
            totals = {cell: cgutils.alloca_once_value(builder, _ZERO) for cell in cells}
            sums = {cell: cgutils.alloca_once(builder, _vector(_I32)) for cell in cells}
            low = _fill(_I32, 0x0F0F0F0F)
            with cgutils.for_range_slice(builder, writer.const(0), width, group, _I64, inc=True) as (start, _):
                for cell in cells:
                    builder.store(_fill(_I32, 0), sums[cell])
                end = writer.at(start, group)
                with cgutils.for_range_slice(builder, start, end, writer.const(2 * FOURS), _I64, inc=True) as (k, _):
                    # four bytes a channel hold eight inputs
                    at = writer.at(codes, writer.times(k, TILE * FOURS // (2 * FOURS)))
                    packed = [
                        writer.load(writer.at(at, writer.const(c * LANES * 4)), _vector(_I32)) for c in range(VECTORS)
                    ]
                    halves = [
                        [builder.and_(p, low) for p in packed],
                        [builder.and_(builder.lshr(p, _fill(_I32, 4)), low) for p in packed],
                    ]
                    for half in (0, 1):
                        for t in range(num_rows):
                            address = writer.at(inputs[t], k, writer.const(half * FOURS))
                            x = writer.splat(writer.load(address, _I32))
                            for c in range(VECTORS):
                                value = writer.add_fours(builder.load(sums[t, c]), halves[half][c], x)
                                builder.store(value, sums[t, c])
                index = builder.udiv(start, group)
                at = writer.at(scales, builder.mul(index, scale_bytes))
                for c in range(VECTORS):
                    scale = writer.load(writer.at(at, writer.const(c * LANES * 4)), _vector(_FLOAT), 4)
                    for t in range(num_rows):
                        first = writer.splat(writer.load(writer.at(starts[t], writer.times(index, 4)), _FLOAT, 4))
                        exact = builder.fadd(builder.sitofp(builder.load(sums[t, c]), _vector(_FLOAT)), first)
                        builder.store(writer.fma(scale, exact, builder.load(totals[t, c])), totals[t, c])
            bias = writer.at(writer.word(BIAS), writer.times(channel, 4))

            def result(t: int, c: int) -> Any:
                row_scale = writer.load(writer.at(writer.word(ROW_SCALES), writer.times(rows[t], 4)), _FLOAT, 4)
                added = writer.load(writer.at(bias, writer.const(c * LANES * 4)), _vector(_FLOAT), 4)
                return writer.fma(builder.load(totals[t, c]), writer.splat(row_scale), added)

            _store(writer, rows, channel, result)
            return context.get_dummy_value()

        return types.void(types.intp, types.int64, types.int64, kind), codegen

    return group_dot


ROWS = 8 if LANES == 16 else 4
"""Rows that one pass over a tile's codes multiplies:
as many as there are registers for their sums.
"""


def _runner(one: Any, four: Any, eight: Any) -> Any:
    """Return the loop that claims tiles and multiplies their codes with chunks of rows.

    A chunk has one, four or eight rows.
    """

    @numba.njit
    def run(args, kind):  # type: ignore[no-untyped-def]
        num_rows, num_tiles = load_int(args, NUM_ROWS), load_int(args, NUM_TILES)
        while True:
            item = fetch_add(args, 1)
            start = item // num_tiles * CHUNK
            if start >= num_rows:
                return
            end = min(start + CHUNK, num_rows)
            number = item % num_tiles
            for row in range(start, end, ROWS):
                if end - row == 1:
                    one(args, number, row, kind)
                elif ROWS == 4 or end - row <= 4:
                    four(args, number, row, kind)
                else:
                    eight(args, number, row, kind)

    return run


# The three loops have one name, by which numba resolves machine code from its cache: an argument of
# a type of its own, for each of them and each kind, keeps them apart.
_DOT, _GROUP_DOT = np.float32(0), np.float64(0)
_run_tiles = _runner(_tile(1), _tile(4), _tile(8))
_run_dots = _runner(_dot(1), _dot(4), _dot(8))
_run_group_dots = _runner(_group_dot(1), _group_dot(4), _group_dot(8))


@functools.lru_cache(maxsize=None, typed=True)  # the kinds' values are equal, their types aren't
def compiled(kind: Any) -> Any:
    """Return the kernel for codes of a kind, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = STAMP

    def multiply(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _run_tiles(args, kind)

    # by its name numba resolves it from its cache, too
    multiply.__name__ = multiply.__qualname__ = f"multiply_{_NAMES[numba.typeof(kind)]}"
    return numba.cfunc(types.void(types.intp), cache=True)(multiply)


@functools.cache
def compiled_dot() -> Any:
    """Return the kernel for int8 by int8, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = STAMP

    def multiply_int8(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _run_dots(args, _DOT)

    return numba.cfunc(types.void(types.intp), cache=True)(multiply_int8)


@functools.cache
def compiled_group_dot() -> Any:
    """Return the kernel for int4 by int8, compiled or read from numba's cache.

    It is a C function of the argument block's address.
    """
    stamp = STAMP

    def multiply_int4(args):  # type: ignore[no-untyped-def]
        if stamp != 0:
            _run_group_dots(args, _GROUP_DOT)

    return numba.cfunc(types.void(types.intp), cache=True)(multiply_int4)
