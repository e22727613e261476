"""Weights of a linear in 8 or 4 bits, as the GPU's weight-only GEMM reads them.

`dequantize` defines what they mean. Plain tensors: no Triton here.

    int8   whole numbers from -127 to 127 (-128 is read too), one scale for each output channel, or
           for each group of 32, 64 or 128 inputs; groups may have zeros
    int4   whole numbers from -8 to 7, one scale for each group of 32, 64 or 128 inputs; with
           zeros, codes from 0 to 15 less the group's zero
    nf4    sixteen quantiles of the normal distribution, as QLoRA trains on them, one
           scale for each block of 64 inputs
    fp8    float8_e4m3fn, one scale for each output channel, or for each group of 32, 64 or 128
           inputs
    mxfp4  float4_e2m1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with either sign, one scale for each block of
           32 inputs; only read, on CPUs

A group's zero is a code, or any float32: a checkpoint that stores a group's smallest value instead
has the zero -minimum / scale, which isn't a whole number.

Errors are bounded by the largest magnitude of a group: a half step, amax / 254 for int8, amax / 15
for int4 (with zeros half of the range / 255 or / 15), 0.152 amax for nf4 (half of its widest gap),
and for fp8 a sixteenth of the weight itself or amax / 458752, whichever is more. Scales are float32
and rounding is to the nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraserve_kernels.common.formats import CPU_GROUP_SIZES as CPU_GROUP_SIZES
from loraserve_kernels.common.formats import FORMATS as FORMATS
from loraserve_kernels.common.formats import GROUP_SIZES as GROUP_SIZES
from loraserve_kernels.common.formats import MXFP4_GROUP_SIZE as MXFP4_GROUP_SIZE
from loraserve_kernels.common.formats import NF4_GROUP_SIZE as NF4_GROUP_SIZE
from loraserve_kernels.common.formats import PACKED_FORMATS
from loraserve_kernels.common.formats import STORED_FORMATS as STORED_FORMATS
from loraserve_kernels.common.rotation import check_rotation, rotate
from loraserve_kernels.common.row_blocks import GPU_BLOCK_WEIGHTS, row_blocks
from loraserve_kernels.errors import InvalidWeight, TensorMismatch

# the table that bitsandbytes prints, float32 numbers exactly
NF4_CODE: tuple[float, ...] = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

MXFP4_CODE: tuple[float, ...] = tuple(
    sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
)
"""Numbers of float4_e2m1 by their code; the last eight are the first ones negated."""
TABLES = {"nf4": NF4_CODE, "mxfp4": MXFP4_CODE}
"""Numbers that the sixteen codes of a format mean, where they lie on no line."""

_LARGEST_FP8 = 448.0
# a group of zeros must not divide by zero
_SMALLEST_SCALE = 1e-12
# the code that means 0 where no zeros are given, and the largest code with zeros
_MIDDLE = {"int8": 128, "int4": 8}
_TOP = {"int8": 255, "int4": 15}
_CODES_DTYPE = {
    "int8": torch.int8,
    "int4": torch.uint8,
    "nf4": torch.uint8,
    "fp8": torch.float8_e4m3fn,
    "mxfp4": torch.uint8,
}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A linear's weight [out_features, in_features] in one of `STORED_FORMATS`.

    Attributes:
        format: one of `STORED_FORMATS`.
        codes: int8 and fp8: [out_features, in_features] int8 or float8_e4m3fn. int4, nf4 and mxfp4:
            [out_features, in_features / 2] uint8, input 2j in the low nibble of byte j; int4's
            value is its code less 8, or less the group's zero. int8's is its code, or with zeros
            its code and 128 less the zero. Contiguous.
        scales: [out_features, in_features / group_size] float32, in any order of memory; `to`
            brings them into the one that kernels read fastest.
        zeros: the same shape in uint8, the codes that mean 0: int4's as they are, int8's with 128
            added. Or in float32: such codes that aren't whole numbers. None where that is 8, or
            128, everywhere; groups alone have them.
        group_size: inputs that share a scale: in_features or one of `CPU_GROUP_SIZES` for int8 and
            fp8, one of those for int4, `NF4_GROUP_SIZE`, `MXFP4_GROUP_SIZE`. A GPU's kernels have
            `GROUP_SIZES`.
        in_features, out_features: of the linear.
        rotation: inputs of a Hadamard block by which they are rotated (see `rotation`): codes are
            those of ``W H / rotation``. 0: they aren't.
        permutation: [in_features] int32: column j of the codes is input ``permutation[j]``, so that
            inputs that share a scale stand side by side. None: column j is input j. Kernels take
            weights without: a linear gathers its input by it (`without_permutation`).

    Raises:
        InvalidWeight: a format, group size, rotation or permutation that the kernels don't have.
        TensorMismatch: tensors whose shapes, dtypes or devices don't agree with it.
    """

    format: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    in_features: int
    out_features: int
    rotation: int = 0
    permutation: Tensor | None = None

    def __post_init__(self) -> None:
        _check_format(self.format, self.group_size, self.in_features, self.zeros is not None)
        check_rotation(self.rotation, self.in_features)
        width = self.in_features // 2 if self.is_packed else self.in_features
        grid = (self.out_features, self.in_features // self.group_size)
        _check("codes", self.codes, (self.out_features, width), _CODES_DTYPE[self.format])
        _check("scales", self.scales, grid, torch.float32)
        if self.zeros is not None:
            _check("zeros", self.zeros, grid, torch.float32 if self.has_float_zeros else torch.uint8)
        if self.permutation is not None:
            _check("permutation", self.permutation, (self.in_features,), torch.int32)
            if self.rotation:
                raise InvalidWeight("a weight is rotated and permuted; the kernels have either")
        if not self.codes.is_contiguous():
            raise TensorMismatch(
                f"codes have strides {self.codes.stride()}; they must be contiguous: pass codes.contiguous()"
            )
        if any(part is not None and part.device != self.codes.device for part in (self.scales, self.zeros)):
            raise TensorMismatch(f"codes are on {self.codes.device}, scales or zeros are not; expected one device")

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds two codes."""
        return self.format in PACKED_FORMATS

    @property
    def has_groups(self) -> bool:
        """Whether an output channel has scales for groups of its inputs, and not one alone."""
        return self.is_packed or self.zeros is not None or self.group_size < self.in_features

    @property
    def has_float_zeros(self) -> bool:
        """Whether zeros needn't be whole numbers."""
        return self.zeros is not None and self.zeros.dtype == torch.float32

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zeros, and of the permutation."""
        parts = (self.codes, self.scales, self.zeros, self.permutation)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @property
    def without_permutation(self) -> QuantizedWeight:
        """The weight of an input that is gathered by the permutation already."""
        return self if self.permutation is None else replace(self, permutation=None)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Move the weight to a device, with scales and zeros in the order read fastest.

        Neighbours in memory are output channels.
        """
        zeros = None if self.zeros is None else _by_channel(self.zeros.to(device))
        return QuantizedWeight(
            self.format,
            self.codes.to(device),
            _by_channel(self.scales.to(device)),
            zeros,
            self.group_size,
            self.in_features,
            self.out_features,
            self.rotation,
            None if self.permutation is None else self.permutation.to(device),
        )

    def rows(self, start: int, end: int) -> QuantizedWeight:
        """Slice the weight to these output channels, in the same memory."""
        return QuantizedWeight(
            self.format,
            self.codes[start:end],
            self.scales[start:end],
            None if self.zeros is None else self.zeros[start:end],
            self.group_size,
            self.in_features,
            end - start,
            self.rotation,
            self.permutation,
        )

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode the codes to numbers before they are scaled, [out_features, in_features].

        They are whole numbers save for nf4, fp8, mxfp4 and zeros in float32, exact in float32 but
        for the latter, and rotated or permuted where the weight is.
        """
        if not self.is_packed:
            values = self.codes.to(dtype)
            return values if self.zeros is None else values + 128 - self._spread_zeros(dtype)
        codes = unpack_nibbles(self.codes)
        if self.format in TABLES:
            return torch.tensor(TABLES[self.format], dtype=dtype, device=codes.device)[codes.int()]
        if self.zeros is None:
            return codes.to(dtype) - 8
        return codes.to(dtype) - self._spread_zeros(dtype)

    def _spread_zeros(self, dtype: torch.dtype) -> Tensor:
        """Repeat each group's zero for every weight of the group."""
        if self.zeros is None:
            raise InvalidWeight("this weight is symmetric: it has no zeros")
        return self.zeros.to(dtype).repeat_interleave(self.group_size, dim=1)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Decode the weight, [out_features, in_features]: ``value · scale``, rounded once.

        It is of `dtype`, computed in float32, or in float64 if that is requested. A rotated
        weight is rotated back, and a permuted one has its inputs in their order.
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = self.values(wide).view(self.out_features, -1, self.group_size)
        weight = (values * self.scales.to(wide)[:, :, None]).view(self.out_features, self.in_features)
        return unpermute(rotate(weight, self.rotation), self.permutation).to(dtype)


def unpermute(rows: Tensor, permutation: Tensor | None) -> Tensor:
    """Put the columns of rows into the order of the inputs.

    Args:
        rows: [n, in_features], column j for input ``permutation[j]``.
        permutation: [in_features] int32; None: `rows` is returned as it is.
    """
    return rows if permutation is None else torch.empty_like(rows).index_copy_(1, permutation.long(), rows)


def quantize(
    weight: Tensor,
    format: str,
    group_size: int | None = None,
    *,
    has_zeros: bool = False,
    is_searched: bool = False,
    rotation: int = 0,
) -> QuantizedWeight:
    """Round a float weight to 8 or 4 bits, each group by its own largest magnitude.

    Nothing of the float weight is kept.

    Args:
        weight: [out_features, in_features], any float dtype, on any device; the result is there
            too.
        format: one of `STORED_FORMATS`; of the kernels' formats, no base is rounded to mxfp4.
        group_size: for int4, one of `CPU_GROUP_SIZES` (None: the largest); for int8 and fp8, one of
            them or in_features (None: that); those of nf4 and mxfp4 are fixed, so None or that.
        has_zeros: groups of int8 and int4 alone: codes span each group's range instead of its
            largest magnitude both ways.
        is_searched: int4 with zeros alone: of several narrower ranges, each group gets the one of
            least squared error, and a scale that is a number of bfloat16.
        rotation: inputs of a Hadamard block by which the weight is rotated first; 0: it isn't.

    Raises:
        InvalidWeight: an unknown format, group size or rotation, in_features that no number of
            groups fills, or numbers that aren't finite.
        TensorMismatch: the weight isn't a float matrix.
    """
    if weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise TensorMismatch(f"the weight is {tuple(weight.shape)} {weight.dtype}; it must be a matrix of floats")
    out_features, in_features = weight.shape
    if group_size is None:
        sizes = {"int4": GROUP_SIZES[-1], "nf4": NF4_GROUP_SIZE, "mxfp4": MXFP4_GROUP_SIZE}
        group_size = sizes.get(format, in_features)
    _check_format(format, group_size, in_features, has_zeros)
    check_rotation(rotation, in_features)
    if is_searched and not (format == "int4" and has_zeros):
        raise InvalidWeight(f"{format}, zeros: {has_zeros}; scales are searched for int4 with zeros alone")
    is_packed = format in PACKED_FORMATS
    codes = weight.new_empty(out_features, in_features // 2 if is_packed else in_features, dtype=_CODES_DTYPE[format])
    all_scales, all_zeros = [], []
    floats, block_weights = weight.detach(), None if weight.device.type == "cpu" else GPU_BLOCK_WEIGHTS
    for first, end in row_blocks(0, out_features, in_features, block_weights):
        rows = floats[first:end].float()
        if rotation:
            rows = rotate(rows, rotation).mul_(1 / rotation)
        groups = rows.view(end - first, -1, group_size)
        amax = groups.abs().amax(2, keepdim=True)
        if not bool(torch.isfinite(amax).all()):
            raise _not_finite(floats)
        if not is_searched:
            rounded, scales, zeros = _rounded(groups, amax, format, has_zeros)
        else:
            rounded, scales, zeros = _searched(groups)
        rounded = rounded.view(end - first, in_features)
        if is_packed:
            rounded = pack_nibbles(rounded)
        codes[first:end] = rounded
        all_scales.append(scales.view(end - first, -1))
        if zeros is not None:
            all_zeros.append(zeros.view(end - first, -1))
    return QuantizedWeight(
        format,
        codes,
        _by_channel(torch.cat(all_scales)),
        _by_channel(torch.cat(all_zeros)) if all_zeros else None,
        group_size,
        in_features,
        out_features,
        rotation,
    )


def _rounded(groups: Tensor, amax: Tensor, format: str, has_zeros: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round the groups to codes, one a byte, with their scales and zeros [rows, groups, 1].

    Args:
        groups: [rows, groups, group_size], float32.
        amax: [rows, groups, 1], the largest magnitudes.
    """
    if has_zeros:
        low, high = groups.amin(2, keepdim=True).clamp_max_(0), groups.amax(2, keepdim=True).clamp_min_(0)
        scales = ((high - low) / _TOP[format]).clamp_min_(_SMALLEST_SCALE)
        zero = (-low / scales).round_()
        codes = (groups / scales).round_().add_(zero).clamp_(0, _TOP[format]).to(torch.uint8)
        if format == "int8":
            codes = (codes ^ 0x80).view(torch.int8)
        return codes, scales, zero.to(torch.uint8)
    if format == "int8":
        scales = (amax / 127).clamp_min_(_SMALLEST_SCALE)
        codes = (groups / scales).round_().clamp_(-127, 127).to(torch.int8)
    elif format == "fp8":
        scales = (amax / _LARGEST_FP8).clamp_min_(_SMALLEST_SCALE)
        # beyond the largest number the conversion makes NaN
        codes = (groups / scales).clamp_(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
    elif format == "nf4":
        scales = amax.clamp_min(_SMALLEST_SCALE)
        table = torch.tensor(NF4_CODE, device=groups.device)
        codes = torch.bucketize(groups / scales, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)
    elif format == "mxfp4":
        # a power of two by which the largest magnitude, if it isn't cut, is 4 or more
        scales = torch.exp2(amax.clamp_min(_SMALLEST_SCALE).log2().floor() - 2)
        table = torch.tensor(MXFP4_CODE[:8], device=groups.device)
        codes = torch.bucketize(groups.abs() / scales, (table[1:] + table[:-1]) / 2, out_int32=True)
        codes = (codes + 8 * (groups < 0)).to(torch.uint8)
    else:
        # 7.5 and not 7: what lies beyond 7 is at most a half step away
        scales = (amax / 7.5).clamp_min_(_SMALLEST_SCALE)
        codes = (groups / scales).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    return codes, scales, None


_SHRINKS = (1.0, 0.93, 0.86)
"""Parts of a group's range that are tried."""


def _searched(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Search int4's codes, scales and zeros of least squared error, as `_rounded` returns them."""
    low, high = groups.amin(2, keepdim=True).clamp_max_(0), groups.amax(2, keepdim=True).clamp_min_(0)
    least, scales, zeros = torch.full_like(low, torch.inf), torch.ones_like(low), torch.zeros_like(low)
    for shrink in _SHRINKS:
        scale = ((high - low) * (shrink / 15)).clamp_min_(_SMALLEST_SCALE).bfloat16().float()
        zero = (low * -shrink / scale).round_().clamp_(0, 15)
        wrong = (groups / scale).round_().add_(zero).clamp_(0, 15).sub_(zero).mul_(scale).sub_(groups)
        error = wrong.square_().sum(2, keepdim=True)
        is_less = error < least
        least = torch.where(is_less, error, least)
        scales, zeros = torch.where(is_less, scale, scales), torch.where(is_less, zero, zeros)
    codes = (groups / scales).round_().add_(zeros).clamp_(0, 15).to(torch.uint8)
    return codes, scales, zeros.to(torch.uint8)


def _not_finite(weight: Tensor) -> InvalidWeight:
    rows = torch.nonzero(~torch.isfinite(weight).all(1)).flatten()
    return InvalidWeight(
        f"{len(rows)} of {len(weight)} output channels hold numbers that aren't finite, the first is {int(rows[0])}"
    )


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack two neighbouring codes into a byte, the first in the low half.

    Args:
        codes: [rows, width] uint8 from 0 to 15.
    """
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_nibbles(octets: Tensor) -> Tensor:
    """Unpack the codes that `pack_nibbles` packed, [rows, 2 · bytes] uint8."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).view(octets.shape[0], -1)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Convert float8_e8m0, exponents plus 127 in uint8, to the float32 that they mean.

    255 means NaN, and becomes infinity.
    """
    bits = exponents.to(torch.int32)
    # the smallest, 2⁻¹²⁷, is no normal number of float32
    return torch.where(bits == 0, 1 << 22, bits << 23).to(torch.int32).view(torch.float32)


def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate the parts' output channels, in order, into one weight.

    It is for linears that share their input. Parts with zeros, in any dtype, and without may be
    mixed; nothing is rounded again.

    Raises:
        TensorMismatch: no parts, or parts of several formats, group sizes, in_features, rotations,
            permutations or devices.
    """
    kinds = {(part.format, part.group_size, part.in_features, part.device, part.rotation) for part in parts}
    if len(kinds) != 1:
        found = "; ".join(
            f"{f}, groups of {g}, {k} inputs, rotated by {r}, on {d}" for f, g, k, d, r in sorted(kinds, key=str)
        )
        raise TensorMismatch(f"weights to concatenate must be of one kind; these are: {found or 'none'}")
    ((format, group_size, in_features, _, rotation),) = kinds
    permutation = parts[0].permutation
    if not all(is_same_permutation(permutation, part.permutation) for part in parts):
        raise TensorMismatch("weights to concatenate must have one permutation of their inputs; these have several")
    # not every device can join float8 tensors
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(_CODES_DTYPE[format])
    zeros = None
    if any(part.zeros is not None for part in parts):
        middle, dtype = _MIDDLE[format], torch.float32 if any(part.has_float_zeros for part in parts) else torch.uint8
        every = [
            torch.full_like(part.scales, middle, dtype=dtype) if part.zeros is None else part.zeros.to(dtype)
            for part in parts
        ]
        zeros = _by_channel(torch.cat(every))
    scales = _by_channel(torch.cat([part.scales for part in parts]))
    out_features = sum(part.out_features for part in parts)
    return QuantizedWeight(format, codes, scales, zeros, group_size, in_features, out_features, rotation, permutation)


def is_same_permutation(first: Tensor | None, second: Tensor | None) -> bool:
    """Check whether two weights have their inputs in one order."""
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _by_channel(grid: Tensor) -> Tensor:
    """Copy [channels, groups] so that neighbouring channels lie side by side in memory.

    Tiles of channels read them so. Bytes are padded to a multiple of four channels for each group,
    so that they can be read in words.
    """
    if grid.element_size() > 1:
        return grid.t().contiguous().t()
    padded = grid.new_zeros(grid.shape[1], -(-grid.shape[0] // 4) * 4)
    padded[:, : grid.shape[0]] = grid.t()
    return padded[:, : grid.shape[0]].t()


def zero_words(zeros: Tensor) -> Tensor:
    """View zeros as kernels read them: [groups, channels / 4] int32.

    The same memory when `QuantizedWeight.to` or `quantize` made them.
    """
    channels, groups = zeros.shape
    width = -(-channels // 4) * 4
    if zeros.stride() != (1, width) or zeros.storage_offset() % 4:
        zeros = _by_channel(zeros)
    return zeros.as_strided((groups, width), (width, 1)).view(torch.int32)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise TensorMismatch(f"{name} are {tuple(tensor.shape)} {tensor.dtype}; they must be {shape} {dtype}")


def _check_format(format: str, group_size: int, in_features: int, has_zeros: bool) -> None:
    if format not in STORED_FORMATS:
        raise InvalidWeight(f"the weight's format is {format}; expected one of {', '.join(STORED_FORMATS)}")
    if has_zeros and format not in _MIDDLE:
        raise InvalidWeight(f"{format} with zeros; only int8 and int4 have them")
    fixed = {"int4": CPU_GROUP_SIZES, "nf4": (NF4_GROUP_SIZE,), "mxfp4": (MXFP4_GROUP_SIZE,)}
    sizes: tuple[int, ...] = fixed.get(format, (in_features,))
    if format in ("int8", "fp8"):
        sizes = CPU_GROUP_SIZES if has_zeros else (*CPU_GROUP_SIZES, in_features)
    if group_size not in sizes:
        zeros = " and zeros" if has_zeros else ""
        raise InvalidWeight(
            f"{format} with groups of {group_size}{zeros}; the kernels have {', '.join(map(str, sizes))}"
        )
    if in_features < 1 or in_features % group_size:
        raise InvalidWeight(
            f"{in_features} inputs can't be cut into groups of {group_size}; keep this weight in 16 bits"
        )
