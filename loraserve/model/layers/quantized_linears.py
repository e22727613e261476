"""Linears whose weights are quantized: each in the order that its kernel reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from loraserve_kernels.common.arithmetic import WEIGHT_ONLY, Arithmetic, outliers_name, rotated_name
from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.common.rotation import rotate
from loraserve_kernels.common.row_blocks import row_blocks
from loraserve_kernels.cpu import instructions
from loraserve_kernels.cpu.linear import g32_dot
from loraserve_kernels.cpu.linear.decoded import (
    DecodedWeight,
    DotWeight,
    GroupDotWeight,
    pack_group_dot,
    unpack_group_dot,
)
from loraserve_kernels.cpu.linear.g32_dot import G32Weight
from loraserve_kernels.cpu.linear.gemm import Int8Weight, int4_linear, int8_linear, pack_int8, unpack_int8
from loraserve_kernels.cpu.linear.packed_linear import PackedWeight, pack_quantized, packed_linear


def bias_bytes(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.nbytes


def _rotated(arithmetic: Arithmetic, block: int) -> Arithmetic:
    return replace(arithmetic, name=rotated_name(arithmetic.name, block))


class Int8Linear:
    """int8 weights by output channel, x in int8 by row; both rotated where the weight is.

    Attributes:
        rotation: inputs of the Hadamard block; 0: there's none.
    """

    __slots__ = ("_arithmetic", "_weight", "bias", "num_bytes", "out_features", "rotation")

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, arithmetic: Arithmetic) -> None:
        self._arithmetic, self.rotation = _rotated(arithmetic, weight.rotation), weight.rotation
        scales = weight.scales.flatten()
        self._weight: Int8Weight = pack_int8(weight.codes, scales, arithmetic.kernel, weight.rotation)
        self.bias, self.out_features = bias, weight.out_features
        self.num_bytes = self._weight.num_bytes + bias_bytes(bias)

    @property
    def arithmetics(self) -> tuple[Arithmetic, ...]:
        return (self._arithmetic,)

    @property
    def own_weight(self) -> DotWeight | None:
        """Weight as our own kernels multiply it; None where a library does."""
        return self._weight.packed if self._weight.kernel == "numba-dot" else None

    def __call__(self, x: Tensor, tops: Tensor | None = None) -> Tensor:
        """Compute the product; `tops` as for `gemm.int8_linear`, where x is a part of each row."""
        return int8_linear(x, self._weight, self.bias, tops)

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        codes = unpack_int8(self._weight)
        for first, last in row_blocks(start, end, self._weight.in_features):
            yield rotate(codes[first:last].float() * self._weight.scales[first:last, None], self.rotation)


class Int4Linear:
    """int4 weights in groups, x in int8 by row; both rotated where the weight is.

    Attributes:
        rotation: inputs of the Hadamard block; 0: there's none.
    """

    __slots__ = ("_arithmetic", "bias", "num_bytes", "out_features", "own_weight", "rotation")

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, arithmetic: Arithmetic) -> None:
        self._arithmetic, self.rotation = _rotated(arithmetic, weight.rotation), weight.rotation
        self.own_weight: GroupDotWeight = pack_group_dot(weight)
        self.bias, self.out_features = bias, weight.out_features
        self.num_bytes = self.own_weight.num_bytes + bias_bytes(bias)

    @property
    def arithmetics(self) -> tuple[Arithmetic, ...]:
        return (self._arithmetic,)

    def __call__(self, x: Tensor, tops: Tensor | None = None) -> Tensor:
        """Compute the product; `tops` as for `gemm.int8_linear`, where x is a part of each row."""
        return int4_linear(x, self.own_weight, self.bias, tops)

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        for first, last in row_blocks(start, end, self.own_weight.in_features):
            yield unpack_group_dot(self.own_weight, first, last)


class G32Linear:
    """int4, int8 or mxfp4 weights, x in int8 in groups of 32 inputs, each with a scale of its own.

    Attributes:
        num_outliers: inputs of a row with the largest magnitudes, which aren't rounded.
    """

    __slots__ = ("_arithmetic", "bias", "num_bytes", "num_outliers", "out_features", "own_weight")

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        self.own_weight: G32Weight = g32_dot.pack(weight)
        self.bias, self.out_features = bias, weight.out_features
        self.num_bytes = self.own_weight.num_bytes + bias_bytes(bias)
        self.num_outliers = 0

    @property
    def arithmetics(self) -> tuple[Arithmetic, ...]:
        return (replace(self._arithmetic, name=outliers_name(self._arithmetic.name, self.num_outliers)),)

    def __call__(self, x: Tensor) -> Tensor:
        return g32_dot.linear(x, self.own_weight, self.bias, self.num_outliers)

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        for first, last in row_blocks(start, end, self.own_weight.in_features):
            yield g32_dot.unpack(self.own_weight, first, last)


class PackedLinear:
    """int4, nf4, fp8 or int8 weights, decoded or widened to float32 while they're multiplied.

    x isn't rounded.
    """

    __slots__ = ("_weight", "bias", "num_bytes", "out_features")

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, kernel: str) -> None:
        self._weight: PackedWeight = pack_quantized(weight, kernel)
        self.bias, self.out_features = bias, weight.out_features
        self.num_bytes = self._weight.num_bytes + bias_bytes(bias)

    @property
    def arithmetics(self) -> tuple[Arithmetic, ...]:
        kernel = self._weight.kernel
        isa = instructions.numba() if kernel == "numba" else instructions.onednn()
        return (Arithmetic(WEIGHT_ONLY[self._weight.format], kernel, isa),)

    @property
    def own_weight(self) -> DecodedWeight | None:
        """Weight as our own kernels multiply it.

        None where a library does, or where rows are rotated before, which no kernel does in floats.
        """
        return None if self._weight.rotation else self._weight.decoded

    def __call__(self, x: Tensor) -> Tensor:
        return packed_linear(x, self._weight, self.bias)

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        return self._weight.rows(start, end)
