"""Weights in int4, int8 or mxfp4 for activations rounded to int8 in groups of 32 inputs.

A row's group has a scale of its own, so that an outlier takes precision from its group alone: what
codes need that can't be rotated, since a checkpoint stores them. A row's largest inputs may be
multiplied as they are, and take none. Needs numba.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.cpu import threads
from loraserve_kernels.cpu.linear import decoded
from loraserve_kernels.cpu.linear.widen import widen
from loraserve_kernels.errors import InvalidWeight, TensorMismatch

GROUP = 32
"""Inputs of a row that share a scale."""

_MIN_PARALLEL_BYTES = 128 << 10

_UNITS = {"mxfp4": 0.5}
"""Number that a code of 1 stands for, in the kernel's whole numbers: scales are multiplied by it.

A power of two, so that no scale is rounded.
"""


@dataclass(frozen=True, slots=True, eq=False)
class G32Weight:
    """A linear's weight in 4 or 8 bits for activations in int8 with a scale for each group of 32.

    Attributes:
        format: ``int4``, ``int8`` or ``mxfp4``.
        codes: int4 and mxfp4: [tiles, runs of eight inputs, channels of a tile] int32, as a
            `decoded.GroupDotWeight` has them. int8: [tiles, runs of four inputs, channels of a
            tile] int32: four codes, each plus 128 where the processor has VNNI. Filled up with
            zeros.
        scales: [groups, channels] bfloat16 or float16 where all of them are numbers of it, else
            float32.
        zeros: the same shape, as `QuantizedWeight` has them.
        group_size: inputs of a weight's group, a multiple of 32.
        in_features, out_features: of the linear.
    """

    format: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    in_features: int
    out_features: int

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zeros of the channels that there are."""
        group_bytes = self.scales.element_size() + (0 if self.zeros is None else self.zeros.element_size())
        code_bytes = self.in_features if self.format == "int8" else self.in_features // 2
        return self.out_features * (code_bytes + group_bytes * self.scales.shape[0])

    @property
    def kernel(self) -> str:
        """Name of the kernel that multiplies it."""
        zeros = "none" if self.zeros is None else _name(self.zeros)
        return f"g32-{self.format}-{_name(self.scales)}-{zeros}"


def can_round_groups(weight: QuantizedWeight) -> bool:
    """Check whether there is a kernel for this weight and activations in int8 in groups of 32."""
    from loraserve_kernels.cpu.linear.tiles.tile import HAS_BYTE_PAIRS

    is_whole = weight.in_features % GROUP == 0 and weight.group_size % GROUP == 0
    # a group's products, at most 255 · 127 · 32, add up to less than 2²⁴: float32 holds the sum
    return HAS_BYTE_PAIRS and weight.format in ("int4", "int8", "mxfp4") and not weight.rotation and is_whole


def pack(weight: QuantizedWeight) -> G32Weight:
    """Bring a weight into tiles; it's copied.

    Raises:
        InvalidWeight: `can_round_groups` is false of it.
    """
    from loraserve_kernels.cpu.linear.tiles.tile import HAS_VNNI

    if not can_round_groups(weight):
        raise InvalidWeight(
            f"{weight.format} with groups of {weight.group_size} of {weight.in_features} inputs, rotated by "
            f"{weight.rotation}; activations in groups of {GROUP} take int4, int8 and mxfp4, unrotated, in multiples "
            "of that"
        )
    codes = weight.codes.view(torch.uint8)
    if weight.format == "int8":
        packed = (codes ^ 0x80 if HAS_VNNI else codes).view(torch.int32)
    else:
        packed = decoded.byte_runs(codes)
    return G32Weight(
        weight.format,
        decoded.tiles_of(packed),
        decoded.filled(_narrowest(weight.scales * _UNITS.get(weight.format, 1.0)).t()),
        None if weight.zeros is None else decoded.filled(weight.zeros.t()),
        weight.group_size,
        weight.in_features,
        weight.out_features,
    )


def unpack(weight: G32Weight, start: int, end: int) -> Tensor:
    """Decode these rows of the weight as it is multiplied, [end - start, in_features] float32."""
    runs = decoded.channels_between(weight.codes, start, end)
    zeros = None if weight.zeros is None else weight.zeros[:, start:end]
    return _widened(weight, runs, weight.scales[:, start:end], zeros)


def look_up(weight: G32Weight, channels: Tensor) -> Tensor:
    """Decode the rows of the weight that these are the numbers of, [n, in_features] float32."""
    runs = decoded.channels_of(weight.codes, channels)
    zeros = None if weight.zeros is None else weight.zeros[:, channels]
    return _widened(weight, runs, weight.scales[:, channels], zeros)


def _widened(weight: G32Weight, runs: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Decode rows of the weight from their runs, and from scales and zeros [groups, n]."""
    from loraserve_kernels.cpu.linear.tiles.tile import HAS_VNNI

    if weight.format == "int8":
        codes = runs.view(torch.uint8)
        codes = (codes ^ 0x80 if HAS_VNNI else codes).view(torch.int8)
    else:
        codes = decoded.of_byte_runs(runs)
    return widen(
        QuantizedWeight(
            weight.format,
            codes,
            scales.t().float() / _UNITS.get(weight.format, 1.0),
            None if zeros is None else zeros.t(),
            weight.group_size,
            weight.in_features,
            runs.shape[0],
        )
    )


def linear(x: Tensor, weight: G32Weight, bias: Tensor | None = None, num_outliers: int = 0) -> Tensor:
    """Compute ``x W^T + bias`` with x rounded in groups of 32, [num_tokens, out_features] float32.

    A row's bits don't depend on the other rows, and are the same on every processor.

    Args:
        x: [num_tokens, in_features] float32. A row that isn't finite yields NaN in its own row
            only.
        bias: [out_features] float32.
        num_outliers: largest inputs of a row that aren't rounded.

    Raises:
        TensorMismatch: x isn't float32 of the weight's in_features.
    """
    from loraserve_kernels.cpu.linear.tiles import tile

    if x.dim() != 2 or x.shape[1] != weight.in_features or x.dtype != torch.float32:
        raise TensorMismatch(
            f"x is {tuple(x.shape)} {x.dtype}; this linear takes (num_tokens, {weight.in_features}) float32"
        )
    codes, scales, starts, outliers = quantize_groups(x, num_outliers)
    num_channels = weight.scales.shape[1]
    y = torch.empty(codes.shape[0], num_channels)
    full_bias = decoded.full_bias_of(bias, num_channels)
    args = np.zeros(tile.NUM_WORDS, dtype=np.int64)
    args[tile.X : tile.MAX_THREADS] = (
        codes.data_ptr(),
        codes.stride(0),
        codes.shape[0],
        y.data_ptr(),
        num_channels,
        weight.codes.data_ptr(),
        weight.codes.stride(0) * 4,
        weight.scales.data_ptr(),
        num_channels,
        scales.data_ptr(),
        starts.shape[1],
        full_bias.data_ptr(),
        weight.in_features,
        weight.group_size,
        weight.codes.shape[0],
        starts.data_ptr(),
        0 if weight.zeros is None else weight.zeros.data_ptr(),
        outliers.data_ptr(),
        num_outliers,
    )
    decoded.run(weight.kernel, args, weight.out_features * weight.in_features * codes.shape[0])
    return decoded.cut(y, weight.out_features)


def quantize_groups(x: Tensor, num_outliers: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round each group of 32 inputs of a row by its own largest magnitude.

    Args:
        num_outliers: inputs of a row with its largest magnitudes, which get codes of 0.

    Returns:
        Codes [num_tokens, in_features] int8 within ±127, scales and starts [num_tokens, groups]
        float32: the sum of each group's codes, negated. A group that isn't finite has zeros and the
        scale NaN. Outliers [num_tokens, num_outliers, 2] float32: number and value of each.
    """
    from loraserve_kernels.cpu.linear import row_quantization as k

    x = x if x.stride(1) == 1 else x.contiguous()
    call, address, _ = _rows_kernel()
    num_rows, width = x.shape
    codes = torch.empty((num_rows, width), dtype=torch.int8)
    scales, starts = torch.empty(num_rows, width // GROUP), torch.empty(num_rows, width // GROUP)
    args = np.zeros(k.NUM_WORDS, dtype=np.int64)
    args[k.X : k.WIDTH + 1] = x.data_ptr(), x.stride(0), num_rows, width
    args[k.CODES : k.SCALES + 1] = codes.data_ptr(), width, scales.data_ptr()
    outliers = torch.empty(num_rows, num_outliers, 2)
    args[k.STARTS], args[k.SCALE_GROUP] = starts.data_ptr(), GROUP
    args[k.OUTLIERS], args[k.NUM_OUTLIERS] = outliers.data_ptr(), num_outliers
    num_threads = threads.num_threads() if num_rows * width * 4 >= _MIN_PARALLEL_BYTES else 1
    threads.run(call, address, args.ctypes.data, num_threads)
    return codes, scales, starts, outliers


@functools.cache
def _rows_kernel() -> tuple[Callable[[int], None], int, Any]:
    from loraserve_kernels.cpu.linear import row_quantization

    handle = row_quantization.compiled()
    return handle.ctypes, handle.address, handle


def _narrowest(scales: Tensor) -> Tensor:
    """Store scales in 16 bits where that changes none of them."""
    for dtype in (torch.bfloat16, torch.float16):
        halves = scales.to(dtype)
        if torch.equal(halves.float(), scales):
            return halves
    return scales


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
