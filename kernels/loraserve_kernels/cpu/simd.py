"""Vectors for numba: a type of `LANES` float32, and the operations that the kernels use.

numba vectorises loops when it can prove that it may; a float32 sum it may not reorder. Kernels that
state their vectors get the same machine code on every compiler version, and the same order of
additions whatever the number of rows, which is what makes a row's result independent of its batch.

Memory is addressed by integers (`Tensor.data_ptr()`): a kernel checks nothing, its caller
everything.
"""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

from loraserve_kernels.cpu import vector_code as code
from loraserve_kernels.cpu.vector_code import (
    DOUBLE,
    FEATURES,
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    LANES,
    VECTOR,
    pointer_to,
    wide,
)

__all__ = ["FEATURES", "LANES"]

STAMP: int = zlib.crc32(Path(__file__).read_bytes(), zlib.crc32(Path(code.__file__).read_bytes()))
"""Changes with this file and with `vector_code`. numba's cache notices a change of the file that a
kernel is written in, not of those that it imports: every compiled entry closes over the stamp,
which makes it part of the cache's key.
"""


def stamp_with(*files: str) -> int:
    """Hash a stamp for an entry that runs what these files define too; it changes with them."""
    stamp = STAMP
    for file in files:
        stamp = zlib.crc32(Path(file).read_bytes(), stamp)
    return stamp


class VectorType(types.Type):  # type: ignore[misc]
    """`LANES` float32 in a register. Exists inside kernels only: no boxing to Python."""

    def __init__(self) -> None:
        super().__init__(name=f"vector[float32, {LANES}]")


vector = VectorType()


@register_model(VectorType)
class VectorModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VECTOR)


# What an element in memory is, passed to loads as a value whose numba type encodes it. int8 is
# widened to float32 like the others.
F32, BF16, F16, I8 = np.float32(0), np.uint16(0), np.int16(0), np.int8(0)


@intrinsic
def load(typingctx: Any, address: Any, index: Any, kind: Any) -> Any:
    """Load elements ``index`` to ``index + LANES - 1`` of an array, widened to float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return code.load_vector(builder, args[0], args[1], signature.args[2])

    return vector(types.intp, types.intp, kind), codegen


@intrinsic
def load_one(typingctx: Any, address: Any, index: Any, kind: Any) -> Any:
    """Element `index` of the array at `address`, widened to float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return code.load_scalar(builder, args[0], args[1], signature.args[2])

    return types.float32(types.intp, types.intp, kind), codegen


@intrinsic
def store(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Write a vector to elements ``index`` to ``index + LANES - 1`` of a float32 array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code.store_vector(builder, args[2], args[0], args[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, vector), codegen


@intrinsic
def store_one(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Write a float32 to element `index` of the array at `address`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], pointer_to(builder, args[0], args[1], FLOAT))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32, types.int64), codegen


@intrinsic
def load_int(typingctx: Any, address: Any, index: Any) -> Any:
    """Element `index` of the int64 array at `address`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(pointer_to(builder, args[0], args[1], INT64))

    return types.int64(types.intp, types.intp), codegen


@intrinsic
def load_int32(typingctx: Any, address: Any, index: Any) -> Any:
    """Element `index` of the int32 array at `address`, as int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(pointer_to(builder, args[0], args[1], INT32)), INT64)

    return types.int64(types.intp, types.intp), codegen


@intrinsic
def store_int(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Write an int64 to element `index` of the array at `address`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], pointer_to(builder, args[0], args[1], INT64))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64), codegen


@intrinsic
def load_double(typingctx: Any, address: Any, index: Any) -> Any:
    """Element `index` of the float64 array at `address`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(pointer_to(builder, args[0], args[1], DOUBLE))

    return types.float64(types.intp, types.intp), codegen


@intrinsic
def store_double(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
    """Write a float64 to element `index` of the array at `address`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], pointer_to(builder, args[0], args[1], DOUBLE))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float64), codegen


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """Fill every lane of a vector with `value`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return code.splat(builder, args[0])

    return vector(types.float32), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute ``a · b + c`` by lane, rounded once where the machine can.

    Every one with AVX2 can.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return code.fma(builder, *args)

    return vector(vector, vector, vector), codegen


@intrinsic
def fma_one(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute ``a · b + c`` of float32, rounded as `fma` rounds."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return code.fma(builder, *args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def sum_lanes(typingctx: Any, value: Any) -> Any:
    """Sum the lanes, halves first: always in the same order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return code.sum_lanes(builder, args[0])

    return types.float32(vector), codegen


@intrinsic
def fetch_add(typingctx: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at `address` and return what it was before.

    It is atomic among threads, and a full fence.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Hint to the core that it spins."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if llvmlite.binding.get_default_triple().startswith(("x86_64", "i686")):
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            )
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any, index: Any, kind: Any) -> Any:
    """Prefetch the cache line of element `index` of the array at `address`.

    Any address is allowed, mapped or not.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code.prefetch(builder, args[0], args[1], signature.args[2])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, kind), codegen


@intrinsic
def add(typingctx: Any, a: Any, b: Any) -> Any:
    """Add two vectors by lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(args[0], args[1])

    return vector(vector, vector), codegen


@intrinsic
def divide(typingctx: Any, a: Any, b: Any) -> Any:
    """Divide a by b, by lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fdiv(args[0], args[1])

    return vector(vector, vector), codegen


@intrinsic
def choose_below(typingctx: Any, value: Any, bound: Any, below: Any, otherwise: Any) -> Any:
    """Choose, by lane, `below` where the value is below the bound, and `otherwise` elsewhere.

    Where either is NaN, it is `otherwise`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return vector(vector, vector, vector, vector), codegen


@intrinsic
def max_lanes(typingctx: Any, value: Any) -> Any:
    """Find the largest lane; NaN lanes may be passed over."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, width = args[0], LANES
        while width > 1:
            width //= 2
            low, high = (
                builder.shuffle_vector(
                    value, value, ir.Constant(ir.VectorType(INT32, width), list(range(at, at + width)))
                )
                for at in (0, width)
            )
            value = builder.select(builder.fcmp_ordered(">", low, high), low, high)
        return builder.extract_element(value, ir.Constant(INT32, 0))

    return types.float32(vector), codegen


@intrinsic
def exp(typingctx: Any, value: Any) -> Any:
    """Compute e to each lane, within 2 units in the last place.

    It is 0 below -87.3, infinity above 88.37, NaN for NaN.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def const(number: float) -> Any:
            return ir.Constant(VECTOR, [number] * LANES)

        def call(name: str, *operands: Any) -> Any:
            function_type = ir.FunctionType(VECTOR, [VECTOR] * len(operands))
            return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), operands)

        x = args[0]
        # e^x = 2^n · e^r with n = round(x / ln 2) and |r| ≤ ln 2 / 2; ln 2 in two parts, so that r
        # keeps its bits
        n = call(f"llvm.rint.v{LANES}f32", builder.fmul(x, const(1.44269504088896341)))
        r = call(f"llvm.fmuladd.v{LANES}f32", n, const(-0.693359375), x)
        r = call(f"llvm.fmuladd.v{LANES}f32", n, const(2.12194440e-4), r)
        p = const(1.9875691500e-4)
        for coefficient in (
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
            1.0,
            1.0,
        ):
            p = call(f"llvm.fmuladd.v{LANES}f32", p, r, const(coefficient))
        low, high = builder.fcmp_ordered("<", x, const(-87.3)), builder.fcmp_ordered(">", x, const(88.37))
        # out of range or NaN: any exponent will do, the result is replaced or NaN already
        inside = builder.fcmp_ordered("ord", x, x)
        inside = builder.and_(inside, builder.not_(builder.or_(low, high)))
        integers = ir.VectorType(INT32, LANES)
        exponent = builder.fptosi(builder.select(inside, n, const(0.0)), integers)
        exponent = builder.shl(
            builder.add(exponent, ir.Constant(integers, [127] * LANES)), ir.Constant(integers, [23] * LANES)
        )
        result = builder.fmul(p, builder.bitcast(exponent, VECTOR))
        result = builder.select(low, const(0.0), result)
        return builder.select(high, const(float("inf")), result)

    return vector(vector), codegen


@intrinsic
def dot_rows(typingctx: Any, x: Any, rows: Any, stride: Any, width: Any) -> Any:
    """Compute a vector whose lane j is the dot product of `x` with row j at `rows`.

    There are `LANES` rows. Each product is summed by lanes, then over the lanes in the order of
    `sum_lanes`: a row's result doesn't depend on the other rows.

    Args:
        x: address of `width` float32.
        rows: address of the first row, float32.
        stride: elements from one row to the next.
        width: a multiple of `LANES`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, rows, stride, width = args
        sums = [cgutils.alloca_once_value(builder, code.ZERO) for _ in range(LANES)]
        step = ir.Constant(INT64, LANES)
        with cgutils.for_range_slice(builder, ir.Constant(INT64, 0), width, step, INT64, inc=True) as (k, _):
            xk = code.load_vector(builder, x, k, types.float32)
            for j, total in enumerate(sums):
                at = builder.add(builder.mul(stride, ir.Constant(INT64, j)), k)
                row = code.load_vector(builder, rows, at, types.float32)
                builder.store(code.fma(builder, row, xk, builder.load(total)), total)
        return code.join_sums(builder, [builder.load(total) for total in sums])

    return vector(types.intp, types.intp, types.intp, types.intp), codegen


def _by_lane(name: str, doc: str) -> Any:
    """Build the intrinsic that is LLVM's function of this name on each lane."""

    @intrinsic
    def of_lanes(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function_type = ir.FunctionType(VECTOR, [VECTOR])
            function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.{name}.v{LANES}f32")
            return builder.call(function, args)

        return vector(vector), codegen

    of_lanes.__doc__ = doc
    return of_lanes


absolute = _by_lane("fabs", "Return the magnitude of each lane.")
nearest = _by_lane("rint", "Return each lane's nearest whole number, as `store_int8` rounds.")


@intrinsic
def larger(typingctx: Any, a: Any, b: Any) -> Any:
    """Choose the larger of two vectors, by lane; where either is NaN, b's."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return vector(vector, vector), codegen


def _store_codes(element: ir.Type) -> Any:
    """Build the intrinsic that writes codes of a type of integers.

    Their rounding is the nearest integer, ties to even.
    """

    @intrinsic
    def store_codes(typingctx: Any, address: Any, index: Any, value: Any, offset: Any) -> Any:
        """Write the lanes, rounded, plus `offset`; their sums must fit."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(VECTOR, [VECTOR]), f"llvm.rint.v{LANES}f32"
            )
            codes = builder.fptosi(builder.call(function, [args[2]]), ir.VectorType(INT32, LANES))
            undefined = ir.Constant(codes.type, ir.Undefined)
            first = builder.insert_element(undefined, builder.trunc(args[3], INT32), ir.Constant(INT32, 0))
            offsets = builder.shuffle_vector(first, undefined, ir.Constant(codes.type, [0] * LANES))
            codes = builder.add(codes, offsets)
            pointer = builder.bitcast(pointer_to(builder, args[0], args[1], element), wide(element).as_pointer())
            builder.store(builder.trunc(codes, wide(element)), pointer, align=element.width // 8)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, vector, types.int64), codegen

    return store_codes


def _store_code(element: ir.Type) -> Any:
    """Build the intrinsic that writes one code, rounded as `_store_codes` rounds."""

    @intrinsic
    def store_code(typingctx: Any, address: Any, index: Any, value: Any, offset: Any) -> Any:
        """Write a float32, rounded, plus `offset`; the sum must fit."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(FLOAT, [FLOAT]), "llvm.rint.f32")
            code = builder.fptosi(builder.call(function, [args[2]]), INT32)
            code = builder.add(code, builder.trunc(args[3], INT32))
            builder.store(builder.trunc(code, element), pointer_to(builder, args[0], args[1], element))
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.float32, types.int64), codegen

    return store_code


store_int8, store_int8_one = _store_codes(INT8), _store_code(INT8)
store_int16, store_int16_one = _store_codes(INT16), _store_code(INT16)


@intrinsic
def square_root(typingctx: Any, value: Any) -> Any:
    """Compute the square root of a float32, correctly rounded."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(FLOAT, [FLOAT]), "llvm.sqrt.f32")
        return builder.call(function, [args[0]])

    return types.float32(types.float32), codegen


@intrinsic
def multiply(typingctx: Any, a: Any, b: Any) -> Any:
    """Multiply two vectors by lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(args[0], args[1])

    return vector(vector, vector), codegen
