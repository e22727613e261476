"""Code that all kernels over tiles share: words of the argument block, vectors, and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from loraserve_kernels.cpu.linear.tiles.tile import HAS_VNNI, NUM_ROWS, VECTORS, Y_STRIDE, Y
from loraserve_kernels.cpu.simd import FEATURES, LANES

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()


def vector(element: ir.Type, lanes: int = LANES) -> ir.Type:
    return ir.VectorType(element, lanes)


def fill(element: ir.Type, number: Any, lanes: int = LANES) -> Any:
    return ir.Constant(vector(element, lanes), [number] * lanes)


ZERO = ir.Constant(vector(F32), [0.0] * LANES)


class TileWriter:
    """Writes what the kernels have in common.

    These are words of the argument block, and vectors at addresses in bytes.
    """

    def __init__(self, builder: Any, args: Any) -> None:
        self.builder, self._args = builder, args

    def word(self, index: int) -> Any:
        return self.load(self.builder.add(self._args, self.const(8 * index)), I64, 8)

    def const(self, number: int) -> Any:
        return ir.Constant(I64, number)

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
        undefined = ir.Constant(vector(value.type), ir.Undefined)
        first = self.builder.insert_element(undefined, value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, undefined, fill(I32, 0))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self._call(f"llvm.fmuladd.v{LANES}f32", vector(F32), a, b, c)

    def look_up(self, table: tuple[float, ...], indices: Any) -> Any:
        """Look up the entries of a table of 16 at the low four bits of a vector of int32."""
        builder = self.builder
        if LANES == 16 and "avx512f" in FEATURES:
            return self._call(
                "llvm.x86.avx512.permvar.sf.512", vector(F32), ir.Constant(vector(F32), list(table)), indices
            )
        indices = builder.and_(indices, fill(I32, 15))
        if LANES == 8 and "avx2" in FEATURES:
            halves = [
                self._call(
                    "llvm.x86.avx2.permps",
                    vector(F32),
                    ir.Constant(vector(F32), list(table[first : first + 8])),
                    indices,
                )
                for first in (0, 8)
            ]
            return builder.select(builder.icmp_signed("<", indices, fill(I32, 8)), *halves)
        # a tree of choices, which every machine has
        entries = [fill(F32, number) for number in table]
        for bit in range(4):
            is_set = builder.icmp_signed("!=", builder.and_(indices, fill(I32, 1 << bit)), fill(I32, 0))
            entries = [builder.select(is_set, high, low) for low, high in zip(entries[::2], entries[1::2], strict=True)]
        return entries[0]

    def look_up_bytes(self, table: tuple[int, ...], codes: Any) -> Any:
        """Look up the entries of a table of 16 bytes at bytes below 16, as a vector of int32."""
        name = "llvm.x86.avx512.pshuf.b.512" if LANES == 16 else "llvm.x86.avx2.pshuf.b"
        indices = self.as_bytes(codes)
        # an instruction looks up within each 16 bytes
        repeated = ir.Constant(indices.type, list(table) * (LANES // 4))
        return self.builder.bitcast(self._call(name, indices.type, repeated, indices), vector(I32))

    def multiply_pairs(self, a: Any, b: Any) -> Any:
        """Multiply int16, each pair of neighbouring products summed in 32 bits."""
        builder = self.builder
        if LANES == 16 and "avx512bw" in FEATURES:
            return self._call("llvm.x86.avx512.pmaddw.d.512", vector(I32), a, b)
        if LANES == 8 and "avx2" in FEATURES:
            return self._call("llvm.x86.avx2.pmadd.wd", vector(I32), a, b)
        parts = []
        for first in (0, 1):
            order = ir.Constant(vector(I32), list(range(first, 2 * LANES, 2)))
            wide = [builder.sext(builder.shuffle_vector(v, v, order), vector(I32)) for v in (a, b)]
            parts.append(builder.mul(*wide))
        return builder.add(*parts)

    def multiply_fours(self, sums: Any, a: Any, b: Any) -> Any:
        """Add four products of bytes each, of unsigned a by signed b, to the sums."""
        return self._call(f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", vector(I32), sums, a, b)

    def add_fours(self, sums: Any, a: Any, b: Any) -> Any:
        """Add four products each, of codes of int4 by bytes with a sign, to the sums."""
        if HAS_VNNI:
            return self.multiply_fours(sums, a, b)
        # two products of at most 15 · 128 fit in 16 bits
        return self.builder.add(sums, self.sum_pairs(self.multiply_bytes(a, b)))

    def multiply_bytes(self, a: Any, b: Any) -> Any:
        """Sum two products of bytes each, of unsigned a by signed b, in 16 bits.

        They are wrong where 16 bits don't hold them.
        """
        name = "llvm.x86.avx512.pmaddubs.w.512" if LANES == 16 else "llvm.x86.avx2.pmadd.ub.sw"
        return self._call(name, vector(I16, 2 * LANES), self.as_bytes(a), self.as_bytes(b))

    def sum_pairs(self, shorts: Any) -> Any:
        """Sum neighbours in 16 bits, in 32 bits."""
        return self.multiply_pairs(shorts, fill(I16, 1, 2 * LANES))

    def magnitudes(self, codes: Any) -> Any:
        """Compute the magnitudes of bytes with a sign, as bytes without one."""
        bytes_ = self.as_bytes(codes)
        return self._call(f"llvm.abs.v{4 * LANES}i8", bytes_.type, bytes_, ir.Constant(ir.IntType(1), 0))

    def with_signs(self, a: Any, signs: Any) -> Any:
        """Negate bytes with a sign where those of `signs` are negative.

        Where `signs` is 0 they may be anything; -128 stays -128.
        """
        builder, a, signs = self.builder, self.as_bytes(a), self.as_bytes(signs)
        if LANES == 8:
            return self._call("llvm.x86.avx2.psign.b", a.type, a, signs)
        zeros = fill(I8, 0, 4 * LANES)
        return builder.select(builder.icmp_signed("<", signs, zeros), builder.sub(zeros, a), a)

    def as_bytes(self, value: Any) -> Any:
        return self.builder.bitcast(value, vector(I8, 4 * LANES))

    def _call(self, name: str, result: ir.Type, *args: Any) -> Any:
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(result, [arg.type for arg in args]), name
        )
        return self.builder.call(function, args)


def rows_of(writer: TileWriter, row: Any, num_rows: int) -> list[Any]:
    """Compute the numbers of a block's rows.

    Beyond the last it's the last again: computed twice, and stored twice.
    """
    last = writer.builder.sub(writer.word(NUM_ROWS), writer.const(1))
    return [writer.smaller(writer.at(row, writer.const(t)), last) for t in range(num_rows)]


def store(writer: TileWriter, rows: list[Any], channel: Any, value: Callable[[int, int], Any]) -> None:
    row_bytes = writer.times(writer.word(Y_STRIDE), 4)
    first = writer.at(writer.word(Y), writer.times(channel, 4))
    for t, r in enumerate(rows):
        for c in range(VECTORS):
            writer.store(value(t, c), writer.at(first, writer.builder.mul(r, row_bytes), writer.const(c * LANES * 4)))
