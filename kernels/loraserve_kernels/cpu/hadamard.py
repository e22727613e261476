"""Blocks of a row multiplied with a Hadamard matrix, for numba's kernels.

A block goes through its butterflies in registers: first those of inputs that are half of it apart,
last those of neighbours, each a sum and a difference that are rounded once. `common.rotation`
does the same with tensors: both give the same bits, with vectors of any width.
"""

# numba has no types
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from loraserve_kernels.common.formats import ROTATION_BLOCKS
from loraserve_kernels.cpu import vector_code as code
from loraserve_kernels.cpu.vector_code import INT32, LANES, VECTOR

_LARGEST = max(ROTATION_BLOCKS)


@intrinsic
def block_buffer(typingctx: Any) -> Any:
    """Allocate the largest block's float32 on the stack of the calling function."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(VECTOR, _LARGEST // LANES))
        return builder.ptrtoint(memory, context.get_value_type(types.intp))

    return types.intp(), codegen


def _rotation(block: int) -> Any:
    """Build the intrinsic that multiplies a block of this size."""

    @intrinsic
    def rotate_whole(typingctx: Any, source: Any, target: Any) -> Any:
        """Write ``H x`` of the block at `source`, H's elements being 1 and −1."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            count = block // LANES
            vectors = [code.load_vector(builder, args[0], code.const(i * LANES), types.float32) for i in range(count)]
            distance = block // 2
            while distance:
                if distance >= LANES:
                    vectors = _between(builder, vectors, distance // LANES)
                else:
                    vectors = [_within(builder, vector, distance) for vector in vectors]
                distance //= 2
            for i, vector in enumerate(vectors):
                code.store_vector(builder, vector, args[1], code.const(i * LANES))
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), codegen

    return rotate_whole


def _between(builder: Any, vectors: list[Any], step: int) -> list[Any]:
    """Compute sums and differences of vectors that are `step` apart."""
    turned = list(vectors)
    for i in range(len(vectors)):
        if not i & step:
            turned[i] = builder.fadd(vectors[i], vectors[i + step])
            turned[i + step] = builder.fsub(vectors[i], vectors[i + step])
    return turned


def _within(builder: Any, value: Any, step: int) -> Any:
    """Compute sums and differences of a vector's lanes that are `step` apart."""
    partners = ir.Constant(ir.VectorType(INT32, LANES), [i ^ step for i in range(LANES)])
    signs = ir.Constant(VECTOR, [-1.0 if i & step else 1.0 for i in range(LANES)])
    # a product with 1 or −1 is exact: whether it is fused changes no bit
    return code.fma(builder, value, signs, builder.shuffle_vector(value, value, partners))


_rotate_64, _rotate_32, _rotate_16 = map(_rotation, ROTATION_BLOCKS)


@numba.njit
def rotate_block(source, target, block):  # type: ignore[no-untyped-def]
    """Write ``H x`` of a block of 64, 32 or 16 float32; source and target may be the same."""
    if block == 64:
        _rotate_64(source, target)
    elif block == 32:
        _rotate_32(source, target)
    else:
        _rotate_16(source, target)
