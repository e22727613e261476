"""LLVM code of which vector intrinsics are made: elements in memory, products, sums over lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils


def _features() -> frozenset[str]:
    """List the features that numba compiles for.

    They are the processor's, or those that NUMBA_CPU_FEATURES names instead.
    """
    told = numba.config.CPU_FEATURES
    if told is None:
        return frozenset(name for name, has in llvmlite.binding.get_host_cpu_features().items() if has)
    return frozenset(name[1:] for name in told.split(",") if name.startswith("+"))


FEATURES: frozenset[str] = _features()
LANES: int = 16 if "avx512f" in FEATURES else 8
"""float32 lanes of a vector: one register of the machine."""
LINE_BYTES = 64
"""Bytes that a processor reads from memory together."""

FLOAT, DOUBLE = ir.FloatType(), ir.DoubleType()
VECTOR = ir.VectorType(FLOAT, LANES)
INT8, INT16, INT32, INT64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)
ELEMENTS: dict[Any, ir.Type] = {types.float32: FLOAT, types.uint16: INT16, types.int16: INT16, types.int8: INT8}
"""numba's types of `simd.F32` and the other kinds → what lies in memory."""


def scalar(element: ir.Type) -> ir.Type:
    return element


def wide(element: ir.Type) -> ir.Type:
    return ir.VectorType(element, LANES)


def element_bytes(kind: Any) -> int:
    """Look up the bytes of an element in memory."""
    return 4 if ELEMENTS[kind] is FLOAT else int(ELEMENTS[kind].width) // 8


def const(number: int) -> Any:
    return ir.Constant(INT64, number)


def pointer_to(builder: Any, address: Any, index: Any, element: ir.Type) -> Any:
    return builder.gep(builder.inttoptr(address, element.as_pointer()), [index])


def widen(builder: Any, raw: Any, kind: Any, shape: Any) -> Any:
    """Widen `raw` to float32; `shape` makes an element's type into a scalar's or a vector's."""
    if kind == types.uint16:
        number = 16 if shape is scalar else [16] * LANES
        bits = builder.shl(builder.zext(raw, shape(INT32)), ir.Constant(shape(INT32), number))
        return builder.bitcast(bits, shape(FLOAT))
    if kind == types.int16:
        return builder.fpext(builder.bitcast(raw, shape(ir.HalfType())), shape(FLOAT))
    if kind == types.int8:
        return builder.sitofp(raw, shape(FLOAT))
    return raw


def load_vector(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    """Load `LANES` elements of a kind from `index`, widened to float32."""
    element = ELEMENTS[kind]
    pointer = builder.bitcast(pointer_to(builder, address, index, element), wide(element).as_pointer())
    return widen(builder, builder.load(pointer, align=element_bytes(kind)), kind, wide)


def load_scalar(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    """Load element `index` of a kind, widened to float32."""
    return widen(builder, builder.load(pointer_to(builder, address, index, ELEMENTS[kind])), kind, scalar)


def store_vector(builder: Any, value: Any, address: Any, index: Any) -> None:
    """Write a vector of any length to float32 elements from `index`."""
    pointer = pointer_to(builder, address, index, FLOAT)
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(wide(value.type), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(wide(INT32), [0] * LANES))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute ``a · b + c`` of vectors or scalars, rounded once where the machine can."""
    name = "llvm.fmuladd.f32" if a.type is FLOAT else f"llvm.fmuladd.v{LANES}f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, [a, b, c])


def prefetch(builder: Any, address: Any, index: Any, kind: Any, *, level: int = 1) -> None:
    """Prefetch the cache line of element `index`; any address is allowed, mapped or not.

    Args:
        level: of the caches, the one that it is brought into: 1 or 2.
    """
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [ir.PointerType(), INT32, INT32, INT32]), "llvm.prefetch.p0"
    )
    pointer = pointer_to(builder, address, index, ELEMENTS[kind])
    builder.call(function, [pointer, *(ir.Constant(INT32, number) for number in (0, 4 - level, 1))])


def prefetch_vectors(builder: Any, address: Any, index: Any, count: int, kind: Any) -> None:
    """Prefetch the cache lines of ``count · LANES`` elements from `index`, each once."""
    for offset in range(0, count * LANES, LINE_BYTES // element_bytes(kind)):
        prefetch(builder, address, builder.add(index, const(offset)), kind)


def sum_lanes(builder: Any, value: Any) -> Any:
    """Sum a vector's lanes, halves first: always in the same order."""
    width = LANES
    while width > 1:
        width //= 2
        order = ir.VectorType(INT32, width)
        low, high = (
            builder.shuffle_vector(value, value, ir.Constant(order, list(range(at, at + width)))) for at in (0, width)
        )
        value = builder.fadd(low, high)
    return builder.extract_element(value, ir.Constant(INT32, 0))


def join_sums(builder: Any, vectors: Sequence[Any]) -> Any:
    """Compute a vector whose lane j is the sum of vector j's lanes, as `sum_lanes` adds them.

    Args:
        vectors: `LANES` of them.
    """
    # after each round, `parts[i]` holds partial sums of twice as many vectors in half as many lanes
    # each
    parts, span = list(vectors), LANES
    while len(parts) > 1:
        half, span = len(parts) // 2, span // 2
        joined = []
        for i in range(half):
            first, second = parts[i], parts[i + half]
            lanes = range(LANES)
            low = [lane if lane // span % 2 == 0 else LANES + lane - span for lane in lanes]
            high = [lane + span if lane // span % 2 == 0 else LANES + lane for lane in lanes]
            picked = [
                builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT32, LANES), order))
                for order in (low, high)
            ]
            joined.append(builder.fadd(*picked))
        parts = joined
    return parts[0]
