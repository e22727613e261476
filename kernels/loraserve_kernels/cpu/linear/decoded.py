"""Weights in the order that the kernels of `tiles` read, and their products; needs numba."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve_kernels.common.quantized import QuantizedWeight, pack_nibbles, unpack_nibbles
from loraserve_kernels.common.rotation import rotate
from loraserve_kernels.cpu import threads
from loraserve_kernels.cpu.linear.widen import widen

_MIN_PARALLEL_WEIGHTS = 1 << 15
"""Products of a smaller weight with one row aren't worth waking a second thread for."""

_RUNS = {2: torch.int16, 4: torch.int32}
"""Dtype as wide as that many codes of int8."""

_SUMMED_ROWS = 256
"""Rows of a weight whose codes are summed at a time."""

GROUP = 256
"""Inputs that are summed before they're added to the total, where a channel has one scale."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedWeight:
    """A linear's weight whose codes are decoded while they're multiplied.

    Attributes:
        kind: ``int8``, ``int8z``, ``int8f``, ``int4``, ``int4z``, ``int4f`` (z: with zeros, f: with
            zeros in float32), ``nf4``, ``mxfp4``, ``fp8``, ``bf16`` or ``f16``.
        codes: [tiles, inputs or bytes of two inputs, channels of a tile], the channels filled up
            with zeros to whole tiles.
        scales: [groups, channels] float32; zeros: the same in uint8 or float32, or None.
        group_size: inputs that share a scale.
        in_features, out_features: of the linear.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    in_features: int
    out_features: int

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zeros of the channels that there are."""
        per_channel = self.codes.shape[1] * self.codes.element_size()
        if self.kind not in ("bf16", "f16"):
            zero_bytes = 0 if self.zeros is None else self.zeros.element_size()
            per_channel += self.scales.shape[0] * (4 + zero_bytes)
        return self.out_features * per_channel


@dataclass(frozen=True, slots=True, eq=False)
class DotWeight:
    """A linear's weight in int8 by output channel, for activations in int8.

    Attributes:
        codes: [tiles, runs of inputs, channels of a tile, `DOT_INPUTS`] int8, filled up with zeros.
        scales: [channels] float32.
        sum_starts: [channels] int32: -128 times the sum of a channel's codes where activations are
            codes plus 128, elsewhere 0.
        in_features, out_features: of the linear.
    """

    codes: Tensor
    scales: Tensor
    sum_starts: Tensor
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, eq=False)
class GroupDotWeight:
    """A linear's weight in int4 with a scale for each group, for activations in int8.

    Attributes:
        codes: [tiles, runs of eight inputs, channels of a tile] int32: four bytes, each with the
            code, plus 8, of one of the first four inputs in its low half and of the next four in
            its high half; filled up with zeros.
        scales: [groups, channels] bfloat16 where all of them are numbers of it, else float32.
        zeros: the same shape in uint8, the codes that mean 0.
        group_size: inputs that share a scale.
        in_features, out_features: of the linear.
        rotation: inputs of a Hadamard block by which the weight is rotated, and rows before they
            are rounded; 0: neither is.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    in_features: int
    out_features: int
    rotation: int

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zeros of the channels that there are."""
        group_bytes = self.scales.element_size() + 1
        return self.out_features * (self.in_features // 2 + group_bytes * self.scales.shape[0])

    @property
    def kernel(self) -> str:
        """Name of the kernel that multiplies it."""
        return "int4-dot-half" if self.scales.dtype == torch.bfloat16 else "int4-dot"


def can_round_activations(weight: QuantizedWeight) -> bool:
    """Check whether there is a kernel for this weight in int4 and activations in int8."""
    from loraserve_kernels.cpu.linear.tiles.tile import HAS_BYTE_PAIRS

    # a group's products, at most 15 · 127 · 128, add up to less than 2²⁴: float32 holds the sum
    return HAS_BYTE_PAIRS and weight.format == "int4"


def can_decode(weight: QuantizedWeight) -> bool:
    """Check whether the kernels decode each code as `QuantizedWeight.dequantize` does.

    They don't for fp8's NaN.
    """
    if weight.format != "fp8":
        return True
    return not bool((weight.codes.view(torch.uint8) & 0x7F == 0x7F).any())


def pack(weight: QuantizedWeight) -> DecodedWeight:
    """Bring a quantized weight's codes into tiles; they're copied."""
    from loraserve_kernels.cpu.linear.tiles.decoded_kernel import FP8_SCALE

    scales = weight.scales.t() * (FP8_SCALE if weight.format == "fp8" else 1.0)
    zeros_letter = "" if weight.zeros is None else "f" if weight.has_float_zeros else "z"
    return DecodedWeight(
        weight.format + zeros_letter,
        tiles_of(weight.codes.view(torch.uint8)),
        filled(scales),
        None if weight.zeros is None else filled(weight.zeros.t()),
        weight.group_size,
        weight.in_features,
        weight.out_features,
    )


def pack_half(weight: Tensor) -> DecodedWeight:
    """Bring a bfloat16 or float16 weight [out_features, in_features] into tiles; it's copied."""
    out_features, in_features = weight.shape
    kind = "bf16" if weight.dtype == torch.bfloat16 else "f16"
    scales = filled(torch.ones(1, out_features))
    return DecodedWeight(kind, tiles_of(weight.view(torch.int16)), scales, None, in_features, in_features, out_features)


def unpack(weight: DecodedWeight, start: int, end: int) -> Tensor:
    """Decode these rows of the weight as it is multiplied, [end - start, in_features] float32.

    The kernels scale the sum of a group, so a product differs from this by the rounding of the sums
    alone.
    """
    codes = channels_between(weight.codes, start, end)
    zeros = None if weight.zeros is None else weight.zeros[:, start:end]
    return _widened(weight, codes, weight.scales[:, start:end], zeros)


def look_up(weight: DecodedWeight, channels: Tensor) -> Tensor:
    """Decode the rows of the weight that these are the numbers of, [n, in_features] float32."""
    zeros = None if weight.zeros is None else weight.zeros[:, channels]
    return _widened(weight, channels_of(weight.codes, channels), weight.scales[:, channels], zeros)


def _widened(weight: DecodedWeight, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Decode rows of the weight from their codes, and from scales and zeros [groups, n]."""
    from loraserve_kernels.cpu.linear.tiles.decoded_kernel import FP8_SCALE

    if weight.kind in ("bf16", "f16"):
        return codes.view(torch.bfloat16 if weight.kind == "bf16" else torch.float16).float()
    format = weight.kind.rstrip("zf") if weight.zeros is not None else weight.kind
    dtypes = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
    rows = QuantizedWeight(
        format,
        codes.view(dtypes.get(format, torch.uint8)),
        scales.t() / (FP8_SCALE if format == "fp8" else 1.0),
        None if zeros is None else zeros.t(),
        weight.group_size,
        weight.in_features,
        codes.shape[0],
    )
    return widen(rows)


def linear(x: Tensor, weight: DecodedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute ``x W^T + bias``, [num_tokens, out_features] float32.

    A row's bits don't depend on the other rows.

    Args:
        x: [num_tokens, in_features] float32; taken as checked.
    """
    from loraserve_kernels.cpu.linear.tiles import tile

    x = x if x.stride(1) == 1 else x.contiguous()
    num_channels = weight.scales.shape[1]
    y = torch.empty(x.shape[0], num_channels)
    has_groups = weight.scales.shape[0] > 1
    full_bias = full_bias_of(bias, num_channels)
    args = np.zeros(tile.NUM_WORDS, dtype=np.int64)
    args[tile.X : tile.NUM_TILES + 1] = (
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        y.data_ptr(),
        num_channels,
        weight.codes.data_ptr(),
        weight.codes.stride(0) * weight.codes.element_size(),
        weight.scales.data_ptr(),
        num_channels if has_groups else 0,
        0 if weight.zeros is None else weight.zeros.data_ptr(),
        num_channels if has_groups else 0,
        full_bias.data_ptr(),
        weight.in_features,
        weight.group_size if has_groups else GROUP,
        weight.codes.shape[0],
    )
    run(weight.kind, args, weight.codes.numel() * x.shape[0])
    return cut(y, weight.out_features)


def pack_dot(codes: Tensor, scales: Tensor) -> DotWeight:
    """Bring a weight in int8 into tiles of runs of inputs; codes and scales are copied.

    Args:
        codes: [out_features, in_features] int8; scales: [out_features] float32.
    """
    from loraserve_kernels.cpu.linear.tiles.tile import DOT_INPUTS, HAS_VNNI

    out_features, in_features = codes.shape
    num_more = -in_features % DOT_INPUTS
    padded = F.pad(codes, (0, num_more)) if num_more else codes.contiguous()
    tiles = tiles_of(padded.view(_RUNS[DOT_INPUTS])).view(torch.int8)
    # a sum of int8 makes a wider copy first
    sums = torch.cat([part.sum(1, dtype=torch.int32) for part in torch.split(codes, _SUMMED_ROWS)])
    sums *= -128 if HAS_VNNI else 0
    return DotWeight(tiles, filled(scales[None])[0], filled(sums[None])[0], in_features, out_features)


def unpack_dot(weight: DotWeight) -> Tensor:
    """Unpack the codes that `pack_dot` packed."""
    from loraserve_kernels.cpu.linear.tiles.tile import DOT_INPUTS

    tiles = weight.codes.view(_RUNS[DOT_INPUTS])
    codes = tiles.mT.reshape(-1, tiles.shape[1])[: weight.out_features].contiguous()
    return codes.view(torch.int8)[:, : weight.in_features].contiguous()


def byte_runs(codes: Tensor) -> Tensor:
    """Pack int4's codes as runs of eight inputs, [out_features, in_features / 8] int32.

    A run is four bytes, each with one of the first four inputs in its low half and of the next four
    in its high half.

    Args:
        codes: [out_features, in_features / 2] uint8, neighbours in a byte.
    """
    nibbles = unpack_nibbles(codes).view(codes.shape[0], -1, 2, 4)
    return (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).contiguous().view(torch.int32)[..., 0]


def of_byte_runs(runs: Tensor) -> Tensor:
    """Unpack the codes that `byte_runs` packed."""
    codes = _unpacked(runs.contiguous().view(torch.uint8))
    return pack_nibbles(codes)


def _unpacked(runs: Tensor) -> Tensor:
    """Unpack the codes of runs, given as bytes, one a byte."""
    runs = runs.view(runs.shape[0], -1, 1, 4)
    return torch.cat((runs & 15, runs >> 4), -2).view(runs.shape[0], -1)


def pack_group_dot(weight: QuantizedWeight) -> GroupDotWeight:
    """Bring a weight in int4, which `can_round_activations`, into tiles; it's copied."""
    packed = byte_runs(weight.codes.view(torch.uint8))
    halves = weight.scales.bfloat16()
    scales = halves if torch.equal(halves.float(), weight.scales) else weight.scales
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8) if weight.zeros is None else weight.zeros
    return GroupDotWeight(
        tiles_of(packed),
        filled(scales.t()),
        filled(zeros.t()),
        weight.group_size,
        weight.in_features,
        weight.out_features,
        weight.rotation,
    )


def unpack_group_dot(weight: GroupDotWeight, start: int, end: int) -> Tensor:
    """Decode these rows of the weight as it is multiplied, [end - start, in_features] float32."""
    runs = channels_between(weight.codes, start, end)
    codes = _unpacked(runs.view(torch.uint8)).float()
    groups = codes.view(end - start, -1, weight.group_size) - weight.zeros[:, start:end].t()[..., None]
    scales = weight.scales[:, start:end].t().float()
    rows = (groups * scales[..., None]).view(end - start, weight.in_features)
    return rotate(rows, weight.rotation)


def group_dot(
    codes: Tensor, scales: Tensor, starts: Tensor, weight: GroupDotWeight, bias: Tensor | None = None
) -> Tensor:
    """Compute ``Σ_group scale · sum((code − zero) · x) · row's scale + bias`` for each row.

    It is [num_tokens, out_features] float32.

    A group's sum is exact; groups are added in order; the end is rounded once.

    Args:
        codes: [num_tokens, in_features] int8.
        scales: [num_tokens, 1] float32.
        starts: [num_tokens, groups] float32: the sum of each group's codes, negated.
        bias: [out_features] float32.
    """
    from loraserve_kernels.cpu.linear.tiles import tile

    num_channels, num_groups = weight.scales.shape[1], weight.scales.shape[0]
    y = torch.empty(codes.shape[0], num_channels)
    full_bias = full_bias_of(bias, num_channels)
    args = np.zeros(tile.NUM_WORDS, dtype=np.int64)
    args[tile.X : tile.OUTLIERS] = (
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
        num_groups,
        full_bias.data_ptr(),
        weight.in_features,
        weight.group_size,
        weight.codes.shape[0],
        starts.data_ptr(),
        weight.zeros.data_ptr(),
    )
    run(weight.kernel, args, weight.codes.numel() * 8 * codes.shape[0])
    return cut(y, weight.out_features)


def code_offset() -> int:
    """Choose what is added to the codes of activations that `dot` takes."""
    from loraserve_kernels.cpu.linear.tiles.tile import HAS_VNNI

    return 128 if HAS_VNNI else 0


def dot(codes: Tensor, scales: Tensor, weight: DotWeight, bias: Tensor | None = None) -> Tensor:
    """Compute ``sum(code · x) · scale · row's scale + bias``, [num_tokens, out_features] float32.

    The sums are exact, each converted and scaled once; the last product and sum are rounded once.

    Args:
        codes: [num_tokens, in_features] int8, each plus `code_offset` as a byte.
        scales: [num_tokens, 1] float32.
        bias: [out_features] float32.
    """
    from loraserve_kernels.cpu.linear.tiles import tile

    num_more = -weight.in_features % tile.DOT_INPUTS
    # what fills up meets codes of 0
    x = F.pad(codes, (0, num_more)) if num_more else codes
    x = x if tile.HAS_VNNI else x.short()
    num_channels, width = weight.scales.shape[0], x.shape[1]
    y = torch.empty(x.shape[0], num_channels)
    args = np.zeros(tile.NUM_WORDS, dtype=np.int64)
    args[tile.X : tile.SCALES + 1] = (
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        y.data_ptr(),
        num_channels,
        weight.codes.data_ptr(),
        weight.codes.stride(0),
        weight.scales.data_ptr(),
    )
    full_bias = full_bias_of(bias, num_channels)
    args[tile.SUM_STARTS], args[tile.ROW_SCALES] = weight.sum_starts.data_ptr(), scales.data_ptr()
    args[tile.DOT_BIAS] = full_bias.data_ptr()
    args[tile.WIDTH], args[tile.NUM_TILES] = width, weight.codes.shape[0]
    run("dot", args, weight.codes.numel() * x.shape[0])
    return cut(y, weight.out_features)


def warm_up(kind: str) -> None:
    """Compile a kernel, as `compiled_handle` names it, or read it from numba's cache."""
    _compiled(kind)


def full_bias_of(bias: Tensor | None, num_channels: int) -> Tensor:
    """Pad a bias with zeros up to whole tiles: zeros alone where there is none."""
    return _no_bias(num_channels) if bias is None else filled(bias[None])[0]


@functools.cache
def compiled_handle(kind: str) -> Any:
    """Load the kernel of a `DecodedWeight.kind`, ``dot``, or the `kernel` of another weight."""
    from loraserve_kernels.cpu.linear.tiles import decoded_kernel, dot_kernel, g32_kernel, group_dot_kernel

    if kind == "dot":
        return dot_kernel.compiled()
    if kind == "int4-dot":
        return group_dot_kernel.compiled()
    if kind == "int4-dot-half":
        return group_dot_kernel.compiled_half()
    return g32_kernel.compiled(kind) if kind.startswith("g32-") else decoded_kernel.compiled(kind)


@functools.cache
def _compiled(kind: str) -> tuple[Callable[[int], None], int, Any]:
    handle = compiled_handle(kind)
    return handle.ctypes, handle.address, handle


def run(kernel: str, args: Any, num_products: int) -> None:
    """Run a kernel, by its name, on an argument block; small ones on this thread alone."""
    from loraserve_kernels.cpu.linear.tiles import tile

    call, address, _ = _compiled(kernel)
    num_threads = threads.num_threads() if num_products >= _MIN_PARALLEL_WEIGHTS else 1
    args[tile.MAX_THREADS] = num_threads
    threads.run(call, address, args.ctypes.data, num_threads)


def tiles_of(codes: Tensor) -> Tensor:
    """Arrange rows [channels, width] as [tiles, width, channels of a tile]."""
    from loraserve_kernels.cpu.linear.tiles.tile import TILE

    channels, width = codes.shape
    tiles = codes.new_zeros(-(-channels // TILE), width, TILE)
    whole = channels // TILE
    tiles[:whole] = codes[: whole * TILE].view(whole, TILE, width).mT
    if channels > whole * TILE:
        tiles[whole, :, : channels - whole * TILE] = codes[whole * TILE :].t()
    return tiles


def channels_between(tiles: Tensor, start: int, end: int) -> Tensor:
    """Copy neighbouring channels, [end - start, width], of [tiles, width, channels of a tile]."""
    from loraserve_kernels.cpu.linear.tiles.tile import TILE

    first = start // TILE
    some = tiles[first : -(-end // TILE)]
    return some.mT.reshape(-1, some.shape[1])[start - first * TILE : end - first * TILE].contiguous()


def channels_of(tiles: Tensor, channels: Tensor) -> Tensor:
    """Copy the channels with these numbers, [n, width], of [tiles, width, channels of a tile]."""
    from loraserve_kernels.cpu.linear.tiles.tile import TILE

    return tiles[channels // TILE, :, channels % TILE].contiguous()


def filled(grid: Tensor) -> Tensor:
    """Pad [groups, channels] with zeros up to whole tiles, in that order of memory."""
    from loraserve_kernels.cpu.linear.tiles.tile import TILE

    groups, channels = grid.shape
    whole = grid.new_zeros(groups, -(-channels // TILE) * TILE)
    whole[:, :channels] = grid
    return whole


@functools.lru_cache(maxsize=64)
def _no_bias(num_channels: int) -> Tensor:
    return torch.zeros(num_channels)


def cut(y: Tensor, out_features: int) -> Tensor:
    """Cut off the channels that fill up a product's last tile."""
    return y if y.shape[1] == out_features else y[:, :out_features].contiguous()
