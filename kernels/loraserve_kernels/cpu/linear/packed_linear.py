"""Linears on the CPU whose weights stay in 4 bits, in fp8 or in int8.

Activations stay float32. With numba the codes are decoded in registers while they're multiplied
(`decoded`): reading fewer bytes than float32, as fast or faster. Without it weights are widened to
float32 a few output channels at a time, which costs a core a few nanoseconds for each weight in
each step, however few the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.common.rotation import rotate
from loraserve_kernels.cpu.linear import decoded
from loraserve_kernels.cpu.linear.decoded import DecodedWeight
from loraserve_kernels.cpu.linear.gemm import float_linear, pack_float
from loraserve_kernels.cpu.linear.widen import widen
from loraserve_kernels.errors import TensorMismatch

_BLOCK_WEIGHTS = 1 << 20
"""Number of weights that are wide at a time: 4 MiB, twice (oneDNN has an order of its own), and
half of that for indices.
"""

_CHANNEL_MULTIPLE = 16

_ROWS_WEIGHTS = 1 << 18
"""Elements of a weight's rows that are float32 at a time: 1 MiB, memory that the allocator has at
hand.
"""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A linear's weight in one of `quantized.STORED_FORMATS`, cut into blocks of output channels.

    Attributes:
        blocks: in order, none with more than about a million weights; empty where `decoded` is
            there.
        decoded: in the order of numba's kernel; None: the kernel is ``widened``.
        format: one of `quantized.STORED_FORMATS`.
        in_features, out_features: of the linear.
        rotation: inputs of a Hadamard block by which the weight is rotated, and rows before they
            are multiplied; 0: neither is.
    """

    blocks: tuple[QuantizedWeight, ...]
    decoded: DecodedWeight | None
    format: str
    in_features: int
    out_features: int
    rotation: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        if self.decoded is not None:
            return self.decoded.num_bytes
        return sum(block.num_bytes for block in self.blocks)

    @property
    def kernel(self) -> str:
        """``numba`` or ``widened``."""
        return "widened" if self.decoded is None else "numba"

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        """Yield these rows of the weight, float32, some at a time, in order."""
        for block in self._stored_rows(start, end):
            yield rotate(block, self.rotation)

    def _stored_rows(self, start: int, end: int) -> Iterator[Tensor]:
        """Yield these rows as they are multiplied, rotated where the weight is."""
        if self.decoded is not None:
            step = max(1, _ROWS_WEIGHTS // self.in_features)
            for first in range(start, end, step):
                yield decoded.unpack(self.decoded, first, min(first + step, end))
            return
        first = 0
        for block in self.blocks:
            last = first + block.out_features
            if first < end and last > start:
                yield widen(block)[max(start - first, 0) : end - first]
            first = last


def pack_quantized(weight: QuantizedWeight, kernel: str) -> PackedWeight:
    """Bring a weight into the order that its kernel reads.

    ``widened`` takes blocks of its codes, which aren't copied.

    Args:
        kernel: ``numba`` or ``widened``. What numba's kernel can't decode, NaN in fp8, is widened.
    """
    rotation, weight = weight.rotation, replace(weight, rotation=0)
    if kernel == "numba" and decoded.can_decode(weight):
        packed = decoded.pack(weight)
        return PackedWeight((), packed, weight.format, weight.in_features, weight.out_features, rotation)
    num_channels = _BLOCK_WEIGHTS // weight.in_features // _CHANNEL_MULTIPLE * _CHANNEL_MULTIPLE
    num_channels = max(num_channels, _CHANNEL_MULTIPLE)
    zeros = None if weight.zeros is None else weight.zeros.contiguous()
    weight = replace(weight, scales=weight.scales.contiguous(), zeros=zeros)
    channels = range(0, weight.out_features, num_channels)
    blocks = tuple(weight.rows(first, min(first + num_channels, weight.out_features)) for first in channels)
    return PackedWeight(blocks, None, weight.format, weight.in_features, weight.out_features, rotation)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute ``x W^T + bias``, [num_tokens, out_features] float32.

    W is as `QuantizedWeight.dequantize` gives it. A row's bits don't depend on the other rows
    (widened: with oneDNN).

    Args:
        x: [num_tokens, in_features] float32.
        bias: [out_features] float32.

    Raises:
        TensorMismatch: x isn't float32 of the weight's in_features.
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.dtype != torch.float32:
        raise TensorMismatch(
            f"x is {tuple(x.shape)} {x.dtype}; this linear takes (num_tokens, {weight.in_features}) float32"
        )
    x = rotate(x, weight.rotation)
    if weight.decoded is not None:
        return decoded.linear(x, weight.decoded, bias)
    y = torch.empty(x.shape[0], weight.out_features)
    first = 0
    for block in weight.blocks:
        end = first + block.out_features
        # each block is summed as a whole linear is, in one order for any number of rows
        y[:, first:end] = float_linear(x, pack_float(widen(block)), None if bias is None else bias[first:end])
        first = end
    return y
