"""Weights in GGUF's blocks: the same codes, scales and zeros in the order that kernels read.

Nothing is rounded again. Where a block stores a minimum, ``w = d · q + m``, its zero is ``-m / d``,
a number of float32. Source: llama.cpp's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve.errors import ModelError
from loraserve.model.config.gguf_types import BLOCK_FORMATS
from loraserve_kernels.common.formats import PACKED_FORMATS
from loraserve_kernels.common.quantized import QuantizedWeight, pack_nibbles, powers_of_two

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Contents of blocks, ``w = scale · code + minimum``.

    Attributes:
        codes: [rows, groups, group_size], uint8 of mxfp4, of int4 and with minima, where int4's
            without are 8 more than their value; int8 else.
        scales, minima: [rows, groups] float32.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None


def unpack_blocks(raw: Tensor, type_name: str, in_features: int) -> QuantizedWeight:
    """Unpack rows of blocks to a weight.

    Args:
        raw: [out_features, bytes of a row] uint8.
        type_name: a key of `BLOCK_FORMATS`.
    """
    form = BLOCK_FORMATS[type_name]
    rows = raw.shape[0]
    groups = _UNPACK[type_name](raw.view(rows, -1, form.block_bytes))
    codes, scales, zeros = groups.codes, groups.scales, None
    if groups.minima is not None:
        scales, zeros = _scales_and_zeros(scales, groups.minima)
    codes = codes.view(rows, in_features)
    if form.format in PACKED_FORMATS:
        codes = pack_nibbles(codes)
    elif zeros is not None:
        # a code of int8 with zeros stands for its value and 128
        codes = (codes ^ 0x80).view(torch.int8)
    return QuantizedWeight(
        form.format,
        codes.contiguous(),
        scales.reshape(rows, -1).contiguous(),
        None if zeros is None else zeros.reshape(rows, -1).contiguous(),
        form.group_size,
        in_features,
        rows,
    )


def _scales_and_zeros(scales: Tensor, minima: Tensor) -> tuple[Tensor, Tensor]:
    """Convert scales and minima, ``w = scale · code + minimum``, to scales and zeros.

    A group whose scale is 0 is its minimum everywhere: it gets a scale so small that codes, times
    it, round to nothing compared with the minimum.
    """
    scales = torch.where(scales == 0, minima.abs() * 1e-12, scales)
    return scales, torch.where(scales == 0, 0.0, -minima / scales)


def _halves(blocks: Tensor, place: int) -> Tensor:
    """Read the float16 at a place of each block, [rows, blocks] float32."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16)[..., 0].float()


def _split(octets: Tensor, *shape: int) -> Tensor:
    """Split the last dimension into several."""
    return octets.reshape(*octets.shape[:-1], *shape)


def _nibbles(octets: Tensor) -> Tensor:
    """Unpack the low halves of bytes, then their high ones, along the last dimension."""
    return torch.cat((octets & 15, octets >> 4), dim=-1)


def _q4_0(blocks: Tensor) -> _Groups:
    return _Groups(_nibbles(blocks[..., 2:]), _halves(blocks, 0), None)


def _q4_1(blocks: Tensor) -> _Groups:
    return _Groups(_nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _fifth_bits(octets: Tensor) -> Tensor:
    """Unpack the bits of four bytes, the lowest first, as 16: [rows, blocks, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((octets[..., None] >> shifts & 1) << 4).flatten(-2)


def _q5_0(blocks: Tensor) -> _Groups:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _Groups(codes.view(torch.int8) - 16, _halves(blocks, 0), None)


def _q5_1(blocks: Tensor) -> _Groups:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _Groups(codes, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Tensor) -> _Groups:
    return _Groups(blocks[..., 2:].contiguous().view(torch.int8), _halves(blocks, 0), None)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the eight scales and minima of six bits in twelve bytes, [rows, blocks, 8] uint8."""
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=-1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=-1)
    return scales, minima


def _k_groups(codes: Tensor, blocks: Tensor, packed: Tensor) -> _Groups:
    scales, minima = _k_scales(packed)
    d, least = _halves(blocks, 0)[..., None], _halves(blocks, 2)[..., None]
    return _Groups(codes, d * scales, -(least * minima))


def _q4_k(blocks: Tensor) -> _Groups:
    octets = _split(blocks[..., 16:], 4, 32)
    # each 32 bytes hold a group in their low halves and the next in their high ones
    codes = torch.stack((octets & 15, octets >> 4), dim=-2)
    return _k_groups(codes, blocks, blocks[..., 4:16])


def _q5_k(blocks: Tensor) -> _Groups:
    octets, high = _split(blocks[..., 48:], 4, 32), blocks[..., 16:48]
    codes = torch.stack((octets & 15, octets >> 4), dim=-2).flatten(-3, -2)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    return _k_groups(codes | (high[..., None, :] >> shifts & 1) << 4, blocks, blocks[..., 4:16])


def _q6_k(blocks: Tensor) -> _Groups:
    low, high = _split(blocks[..., :128], 2, 2, 32), _split(blocks[..., 128:192], 2, 1, 32)
    # of each half of a block: 64 bytes of low halves, and 32 of four times two bits
    lows = torch.cat((low & 15, low >> 4), dim=-2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    codes = (lows | (high >> shifts & 3) << 4).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return _Groups(codes, _halves(blocks, 208)[..., None] * scales, None)


def _q3_k(blocks: Tensor) -> _Groups:
    bits, quarters = blocks[..., :32], _split(blocks[..., 32:96], 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    low = quarters >> shifts & 3
    high = bits[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    # the third bit is stored inverted: values are from -4 to 3
    codes = (low.flatten(-3, -2) | high << 2) + 4
    packed = blocks[..., 96:108]
    lows = torch.cat((packed[..., :8] & 15, packed[..., :8] >> 4), dim=-1)
    highs = torch.cat([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    scales = (lows | highs << 4).view(torch.int8) - 32
    return _Groups(codes, _halves(blocks, 108)[..., None] * scales, None)


def _q2_k(blocks: Tensor) -> _Groups:
    quarters = _split(blocks[..., 16:80], 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    packed = blocks[..., :16]
    d, least = _halves(blocks, 80)[..., None], _halves(blocks, 82)[..., None]
    return _Groups(quarters >> shifts & 3, d * (packed & 15), -(least * (packed >> 4)))


def _iq4_nl(blocks: Tensor) -> _Groups:
    table = torch.tensor(_IQ4_VALUES, dtype=torch.int8)
    return _Groups(table[_nibbles(blocks[..., 2:]).int()], _halves(blocks, 0), None)


def _iq4_xs(blocks: Tensor) -> _Groups:
    table = torch.tensor(_IQ4_VALUES, dtype=torch.int8)
    octets = _split(blocks[..., 8:], 8, 16)
    high = blocks[..., 2:4].contiguous().view(torch.int16).int() & 0xFFFF
    highs = (high >> torch.arange(0, 16, 2)) & 3
    low = blocks[..., 4:8]
    lows = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2).int()
    return _Groups(table[_nibbles(octets).int()], _halves(blocks, 0)[..., None] * (lows + (highs << 4) - 32), None)


def _mxfp4(blocks: Tensor) -> _Groups:
    scales = powers_of_two(blocks[..., 0])
    if not bool(scales.isfinite().all()):
        raise ModelError("A block of MXFP4 has the scale NaN.", hint="The file is damaged: download it again.")
    return _Groups(_nibbles(blocks[..., 1:]), scales, None)


_UNPACK: Mapping[str, Callable[[Tensor], _Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
