"""Linears on the CPU whose weights stay in 4 bits, in fp8 or in int8 by groups: they're widened to float32 a few output channels at a time, while they're multiplied.

That saves memory, not time: each weight costs a core a few nanoseconds in each step, however few the rows. int8 by output channel is the fast format on CPUs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve_kernels.errors import InvalidWeight, ShapeMismatch
from loraserve_kernels.gemm import float_linear, pack_float
from loraserve_kernels.quantized import NF4_CODE, QuantizedWeight

_BLOCK_WEIGHTS = 1 << 20
"""How many weights are wide at a time: 4 MiB, twice (oneDNN has an order of its own), and half of that for indices."""

_CHANNEL_MULTIPLE = 16


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A linear's weight in int4, nf4, fp8 or int8 with groups, cut into blocks of output channels.

    Attributes:
        blocks: in order, none with more than about a million weights.
        in_features, out_features: of the linear.
    """

    blocks: tuple[QuantizedWeight, ...]
    in_features: int
    out_features: int

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return sum(block.num_bytes for block in self.blocks)


def pack_quantized(weight: QuantizedWeight) -> PackedWeight:
    """Cut a weight into blocks; its codes aren't copied.

    Raises:
        InvalidWeight: it's int8 by output channel, which `gemm.pack_int8` takes.
    """
    if weight.format == "int8" and not weight.has_groups:
        raise InvalidWeight("a weight in int8 by output channel; gemm.pack_int8 takes its codes and scales")
    num_channels = _BLOCK_WEIGHTS // weight.in_features // _CHANNEL_MULTIPLE * _CHANNEL_MULTIPLE
    num_channels = max(num_channels, _CHANNEL_MULTIPLE)
    scales = weight.scales.contiguous()
    zeros = None if weight.zeros is None else weight.zeros.contiguous()
    blocks = []
    for first in range(0, weight.out_features, num_channels):
        end = min(first + num_channels, weight.out_features)
        blocks.append(
            QuantizedWeight(
                weight.format,
                weight.codes[first:end],
                scales[first:end],
                None if zeros is None else zeros[first:end],
                weight.group_size,
                weight.in_features,
                end - first,
            )
        )
    return PackedWeight(tuple(blocks), weight.in_features, weight.out_features)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + bias``, [num_tokens, out_features] float32, W as `QuantizedWeight.dequantize` gives it. With oneDNN a row's bits don't depend on the other rows.

    Args:
        x: [num_tokens, in_features] float32.
        bias: [out_features] float32.

    Raises:
        ShapeMismatch: x isn't float32 of the weight's in_features.
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features or x.dtype != torch.float32:
        raise ShapeMismatch(
            f"x is {tuple(x.shape)} {x.dtype}; this linear takes (num_tokens, {weight.in_features}) float32"
        )
    y = torch.empty(x.shape[0], weight.out_features)
    first = 0
    for block in weight.blocks:
        end = first + block.out_features
        # each block is summed as a whole linear is, in one order for any number of rows
        y[:, first:end] = float_linear(x, pack_float(widen(block)), None if bias is None else bias[first:end])
        first = end
    return y


def widen(weight: QuantizedWeight) -> Tensor:
    """Return what ``weight.dequantize(torch.float32)`` returns, bit for bit, several times sooner: a byte's codes are looked up together."""
    codes = weight.codes.view(torch.uint8).view(-1).int()
    values = _table(weight.format, weight.zeros is not None).index_select(0, codes).view(torch.float32)
    groups = values.view(weight.out_features, -1, weight.group_size)
    if weight.zeros is not None:
        groups.sub_(weight.zeros[:, :, None])
    return groups.mul_(weight.scales[:, :, None]).view(weight.out_features, weight.in_features)


@functools.cache
def _table(format: str, has_zeros: bool) -> Tensor:
    """What each byte of codes means, 256 of them: a float32 for fp8 and int8, and for two codes of 4 bits two, held as one float64."""
    codes = torch.arange(256, dtype=torch.uint8)
    if format == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if format == "int8":
        return codes.view(torch.int8).float() + (128 if has_zeros else 0)
    meanings = torch.tensor(NF4_CODE) if format == "nf4" else torch.arange(16.0) - (0 if has_zeros else 8)
    return torch.stack((meanings[(codes & 15).int()], meanings[(codes >> 4).int()]), dim=1).view(torch.float64).view(-1)
