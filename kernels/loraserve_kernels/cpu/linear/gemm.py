"""The base's linears on the CPU, in int8, in 16 bits and in float32.

No row's result depends on what shares its batch. int8: weights by output channel, activations by
row. Integer products and sums are exact, so that a row's bits can't depend on the other rows; what
must be avoided is a scale taken over the whole batch, where one tenant's outlier spoils the others'
answers. `chooser` tries these kernels on the processor and takes one:

* ``onednn-s8``: oneDNN multiplies int8 by int8 where it has instructions for it (AMX, VNNI on
  some). Elsewhere it computes element by element, a thousand times slower than float32, or adds
  pairs of products in 16 bits that overflow, silently.
* ``onednn-u8``: the same codes plus 128, with a zero point of 128: what VNNI multiplies. Without
  VNNI pairs of products overflow too.
* ``numba-dot``: our own sums in 32 bits, of pairs, or of fours where the processor has VNNI, on any
  machine (`tiles.dot_kernel`). The three give the same bits.
* ``fbgemm``: any x86 machine, activations of 7 bits. Its linear for a fixed activation scale gets
  rows divided by their own largest magnitude, so that one scale fits every row. Elsewhere torch's
  reference of the same operator runs.

float32: oneDNN with weights in its own blocked order, which adds the products of a row in one order
for any number of rows but one; a single row is computed twice.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve_kernels.common.rotation import check_rotation, rotate
from loraserve_kernels.cpu import instructions, threads
from loraserve_kernels.cpu.linear import decoded
from loraserve_kernels.cpu.lora.apply import HAS_NUMBA
from loraserve_kernels.errors import TensorMismatch

_MIN_PARALLEL_BYTES = 128 << 10
_LARGEST_FLOAT16 = 65504.0


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A linear's weight in int8, in the order that its library reads.

    Attributes:
        packed: oneDNN's tensor, fbgemm's object, or a `decoded.DotWeight`.
        scales: [out_features] float32: a channel's weights are its codes times this.
        kernel: ``onednn-s8``, ``onednn-u8``, ``numba-dot`` or ``fbgemm``.
        in_features, out_features: of the linear.
        rotation: inputs of a Hadamard block by which the weight is rotated, and rows before they
            are rounded; 0: neither is.
    """

    packed: Any
    scales: Tensor
    kernel: str
    in_features: int
    out_features: int
    rotation: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and of the scale per output channel."""
        return self.out_features * (self.in_features + 4)


@dataclass(frozen=True, slots=True, eq=False)
class FloatWeight:
    """A linear's float32 weight.

    Attributes:
        packed: oneDNN's tensor, or where torch lacks oneDNN the weight as it is, [out_features,
            in_features].
        is_blocked: which of the two.
        in_features, out_features: of the linear.
    """

    packed: Tensor
    is_blocked: bool
    in_features: int
    out_features: int

    @property
    def num_bytes(self) -> int:
        return self.out_features * self.in_features * 4


def pack_int8(codes: Tensor, scales: Tensor, kernel: str, rotation: int = 0) -> Int8Weight:
    """Bring a weight that is in int8 already into the order that its library reads.

    Codes and scales are used as they are, and not kept.

    Args:
        codes: [out_features, in_features] int8, from -128 to 127.
        scales: [out_features] float32: a channel's weights are its codes times this.
        kernel: one of those that `Int8Weight` names.
        rotation: as `Int8Weight` has it.

    Raises:
        TensorMismatch: codes and scales of other shapes or dtypes.
    """
    if codes.dim() != 2 or codes.dtype != torch.int8 or scales.dtype != torch.float32:
        raise TensorMismatch(
            f"codes are {tuple(codes.shape)} {codes.dtype}, scales {scales.dtype}; "
            "they must be a matrix in int8, and float32"
        )
    out_features, in_features = codes.shape
    if scales.shape != (out_features,):
        raise TensorMismatch(f"scales are {tuple(scales.shape)}; they must be ({out_features},)")
    packed: Any
    if kernel == "numba-dot":
        packed = decoded.pack_dot(codes, scales)
    elif kernel == "fbgemm":
        packed = _pack_fbgemm(codes, scales)
    else:
        packed = torch.ops.onednn.qlinear_prepack(codes, None)
    return Int8Weight(packed, scales.clone(), kernel, in_features, out_features, rotation)


def unpack_int8(weight: Int8Weight) -> Tensor:
    """Unpack the codes that `pack_int8` packed, [out_features, in_features] int8."""
    if weight.kernel == "numba-dot":
        return decoded.unpack_dot(weight.packed)
    codes: Tensor
    if weight.kernel == "fbgemm":
        codes = torch.ops.quantized.linear_unpack(weight.packed)[0].int_repr()
    else:
        codes = weight.packed.to_dense().t()
    return codes


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None, tops: Tensor | None = None) -> Tensor:
    """Compute ``x W^T + bias`` with x rounded row by row, [num_tokens, out_features] float32.

    A row's bits don't depend on the other rows.

    Args:
        x: [num_tokens, in_features] float32. A row that isn't finite yields NaN in its own row
            only.
        bias: [out_features] float32.
        tops: [num_tokens, 1] float32, the largest magnitude of each whole row, as `row_tops` has
            it, where x has a part of it; None: rows are whole.

    Raises:
        TensorMismatch: x isn't float32 of the weight's in_features.
    """
    _check(x, weight.in_features)
    y: Tensor
    if weight.kernel == "fbgemm":
        units, scales = _unit_rows(rotate(x, weight.rotation), tops)
        # 7 bits: fbgemm adds pairs of products in 16 bits on machines without VNNI
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(units, 1 / 63, 64, weight.packed)
    else:
        if weight.kernel == "numba-dot":
            x = x if x.stride(1) == 1 else x.contiguous()
            codes, scales = _quantize_rows_numba(x, decoded.code_offset(), tops=tops, rotation=weight.rotation)
            # scaled where the bias is added, in one rounding, as after other kernels
            return decoded.dot(codes, scales, weight.packed, bias)
        codes, scales = quantize_rows(x, tops, weight.rotation)
        y = _onednn_linear(codes, weight.packed, weight.scales, is_unsigned=weight.kernel == "onednn-u8")
    return y.mul_(scales) if bias is None else torch.addcmul(bias, y, scales)


def int4_linear(
    x: Tensor, weight: decoded.GroupDotWeight, bias: Tensor | None = None, tops: Tensor | None = None
) -> Tensor:
    """Compute ``x W^T + bias`` with x rounded row by row, [num_tokens, out_features] float32.

    A row's bits don't depend on the other rows.

    Args:
        x: [num_tokens, in_features] float32. A row that isn't finite yields NaN in its own row
            only.
        bias: [out_features] float32.
        tops: as for `int8_linear`.

    Raises:
        TensorMismatch: x isn't float32 of the weight's in_features.
    """
    _check(x, weight.in_features)
    starts = torch.empty(x.shape[0], weight.scales.shape[0])
    x = x if x.stride(1) == 1 else x.contiguous()
    codes, scales = _quantize_rows_numba(x, 0, starts, tops, weight.rotation)
    return decoded.group_dot(codes, scales, starts, weight, bias)


def quantize_rows(x: Tensor, tops: Tensor | None = None, rotation: int = 0) -> tuple[Tensor, Tensor]:
    """Round each row of x by its own largest magnitude; ``x ≈ codes · scales``.

    Codes are [num_tokens, in_features] int8 within ±127, and scales [num_tokens, 1]. A row that
    isn't finite gets zeros and the scale NaN.

    Args:
        tops: as for `int8_linear`.
        rotation: inputs of a Hadamard block: codes are those of ``x H``; 0: of x.
    """
    if HAS_NUMBA and x.stride(1) == 1:
        return _quantize_rows_numba(x, tops=tops, rotation=rotation)
    units, scales = _unit_rows(rotate(x, rotation), tops)
    return units.mul_(127).round_().to(torch.int8), scales.div_(127)


def row_tops(x: Tensor, rotation: int) -> Tensor:
    """Find the largest magnitude of each row as it is rounded, [num_tokens, 1]."""
    return rotate(x, rotation).abs().amax(1, keepdim=True)


def pack_float(weight: Tensor) -> FloatWeight:
    """Bring a float32 weight into the order that oneDNN reads fastest for few rows.

    The given tensor, [out_features, in_features], isn't kept.
    """
    weight = weight.detach()
    if weight.dtype != torch.float32:
        raise TensorMismatch(f"the weight is {weight.dtype}; it must be float32")
    out_features, in_features = weight.shape
    if not torch._C._has_mkldnn:
        return FloatWeight(weight.clone(), False, in_features, out_features)
    # the order is chosen for about as many rows as a decode step has
    return FloatWeight(torch.ops.mkldnn._reorder_linear_weight(weight, 32), True, in_features, out_features)


_BLOCK_ROWS = (64, 48, 32)
"""Products of fewer at a time would take longer than unpacking."""


def blocks_in_place(packed: FloatWeight, weight: Tensor) -> Tensor | None:
    """View a packed weight's own memory as blocks of its rows, each transposed.

    They are [num_blocks, in_features, rows of a block] float32; None where it is in another order.
    oneDNN gives back whole matrices only, in new memory. It doesn't document in which order it
    keeps them; on machines with AVX2 or AVX512 a block's rows are side by side, and whether they
    are is seen by comparing all of them. Valid as long as `packed`.

    Args:
        weight: what was packed.
    """
    if not packed.is_blocked or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return None
    if torch.ops.mkldnn._nbytes(packed.packed) != weight.nbytes:
        return None
    address = ctypes.cast(torch.ops.mkldnn.data_ptr(packed.packed), ctypes.POINTER(ctypes.c_float))
    memory = torch.from_numpy(np.ctypeslib.as_array(address, (weight.numel(),)))
    rows, width = weight.shape
    for size in _BLOCK_ROWS:
        if rows % size == 0:
            blocks = memory.view(rows // size, width, size)
            if torch.equal(blocks, weight.view(rows // size, size, width).mT):
                return blocks
    return None


def float_linear(x: Tensor, weight: FloatWeight, bias: Tensor | None = None) -> Tensor:
    """Compute ``x W^T + bias``, [num_tokens, out_features] float32.

    With oneDNN a row's bits don't depend on the other rows.

    Args:
        x: [num_tokens, in_features] float32.
        bias: [out_features] float32.

    Raises:
        TensorMismatch: x isn't float32 of the weight's in_features.
    """
    _check(x, weight.in_features)
    if not weight.is_blocked:
        return F.linear(x, weight.packed, bias)
    # one row alone would be summed in another order (as a matrix times a vector)
    rows = torch.cat((x, x)) if x.shape[0] == 1 else _with_few_heights(x)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight.packed, bias, "none", [], "")
    return y[: x.shape[0]]


@dataclass(frozen=True, slots=True, eq=False)
class HalfWeight:
    """A linear's weight in bfloat16 or float16.

    Attributes:
        packed: oneDNN's tensor, fbgemm's object, a `decoded.DecodedWeight`, or the weight as it is.
        kernel: ``onednn``, ``numba`` or ``torch`` for bfloat16, ``numba`` or ``fbgemm`` for
            float16.
        in_features, out_features: of the linear.
    """

    packed: Any
    kernel: str
    in_features: int
    out_features: int

    @property
    def num_bytes(self) -> int:
        return 2 * self.out_features * self.in_features


def pack_half(weight: Tensor, dtype: torch.dtype, kernel: str) -> HalfWeight:
    """Bring a weight into the order that its kernel reads, in bfloat16 or float16.

    The given tensor, [out_features, in_features], isn't kept. A weight beyond float16's range,
    which no model is known to have, is the largest there is.
    """
    weight = weight.detach()
    out_features, in_features = weight.shape
    packed: Any
    if kernel == "fbgemm":
        with warnings.catch_warnings():
            # torch announces that its eager quantization moves to torchao one day, and warns of
            # weights beyond the range
            warnings.simplefilter("ignore", UserWarning)
            packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
    else:
        if dtype == torch.float16:
            weight = weight.float().clamp(-_LARGEST_FLOAT16, _LARGEST_FLOAT16)
        half = weight.to(dtype).contiguous()
        if kernel == "onednn":
            packed = torch.ops.mkldnn._reorder_linear_weight(half, None)
        else:
            packed = decoded.pack_half(half) if kernel == "numba" else half.clone()
    return HalfWeight(packed, kernel, in_features, out_features)


def half_linear(x: Tensor, weight: HalfWeight, bias: Tensor | None = None) -> Tensor:
    """Compute ``x W^T + bias``, [num_tokens, out_features] float32.

    With numba a row's bits don't depend on the other rows.

    oneDNN and torch round x, the bias and the result to bfloat16; numba rounds nothing.

    Args:
        x: [num_tokens, in_features] float32.
        bias: [out_features] float32.
    """
    _check(x, weight.in_features)
    if weight.kernel == "numba":
        return decoded.linear(x, weight.packed, bias)
    y: Tensor
    if weight.kernel == "fbgemm":
        y = torch.ops.quantized.linear_dynamic_fp16(x, weight.packed)
        return y if bias is None else y.add_(bias)
    half_bias = None if bias is None else bias.bfloat16()
    if weight.kernel == "onednn":
        rows = _with_few_heights(x.bfloat16())
        y = torch.ops.mkldnn._linear_pointwise(rows, weight.packed, half_bias, "none", [], "")[: x.shape[0]]
    else:
        y = F.linear(x.bfloat16(), weight.packed, half_bias)
    return y.float()


def half_rows(weight: HalfWeight, start: int, end: int) -> Tensor:
    """Read these rows of the weight, in whatever float dtype they're at hand."""
    rows: Tensor
    if weight.kernel == "numba":
        return decoded.unpack(weight.packed, start, end)
    if weight.kernel == "fbgemm":
        rows = torch.ops.quantized.linear_unpack_fp16(weight.packed)[0]
    else:
        rows = weight.packed.to_dense() if weight.kernel == "onednn" else weight.packed
    return rows[start:end]


def warm_up() -> None:
    """Compile what rounds rows to int8, or read it from numba's cache."""
    if HAS_NUMBA:
        _rows_kernel()


def has_onednn() -> bool:
    """Check whether torch has oneDNN and its int8 linear."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.onednn, "qlinear_pointwise")


def has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def has_native_bfloat16() -> bool:
    """Check whether oneDNN may use instructions for bfloat16.

    It computes bfloat16 without them too, several times slower than float32.
    """
    return has_onednn() and instructions.onednn() in ("avx512_core_bf16", "avx512_core_amx", "aarch64")


def _check(x: Tensor, in_features: int) -> None:
    if x.dim() != 2 or x.shape[1] != in_features or x.dtype != torch.float32:
        raise TensorMismatch(f"x is {tuple(x.shape)} {x.dtype}; this linear takes (num_tokens, {in_features}) float32")


def _pack_fbgemm(codes: Tensor, scales: Tensor) -> Any:
    with warnings.catch_warnings():
        # torch announces at the first call that its eager quantization moves to torchao one day.
        # There's no other way yet to make the tensor that fbgemm packs;
        # constraints.txt and the range in pyproject.toml hold the versions where this works.
        warnings.filterwarnings(
            "ignore", message="torch.quantize_per_tensor, torch.quantize_per_channel", category=UserWarning
        )
        zeros = torch.zeros(codes.shape[0], dtype=torch.int64)
        quantized = torch._make_per_channel_quantized_tensor(codes, scales.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(quantized, None)


def _onednn_linear(codes: Tensor, packed: Any, scales: Tensor, *, is_unsigned: bool) -> Tensor:
    if is_unsigned:
        codes = codes.view(torch.uint8) ^ 128
    rows = _with_few_heights(codes)
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        rows,
        1.0,
        128 if is_unsigned else 0,
        packed,
        scales,
        _zero_points(scales.shape[0]),
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
    return y[: codes.shape[0]]


_HEIGHT_STEP = 16
"""Products of more rows have a multiple of it."""


def _with_few_heights(x: Tensor) -> Tensor:
    """Pad x with rows of zeros, where it has more than `_HEIGHT_STEP` rows.

    Fewer than `_HEIGHT_STEP` are added. oneDNN compiles a product for each number of rows that it
    meets (1 to 8 ms) and keeps a thousand of them, up to 0.7 MiB each: with some hundred numbers of
    rows the process grew by hundreds of MiB over its first hours, with tens it stays level.
    """
    num_more = -x.shape[0] % _HEIGHT_STEP if x.shape[0] > _HEIGHT_STEP else 0
    return F.pad(x, (0, 0, 0, num_more)) if num_more else x


@functools.lru_cache(maxsize=64)
def _zero_points(out_features: int) -> Tensor:
    return torch.zeros(out_features, dtype=torch.int32)


def _unit_rows(x: Tensor, tops: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Divide each row by its largest magnitude; return that magnitude too, [num_tokens, 1].

    Both are zeros and NaN for a row that isn't finite.
    """
    top = x.abs().amax(1, keepdim=True)
    if tops is not None:
        top = torch.maximum(top, tops)
    is_finite = torch.isfinite(top)
    units = torch.where(is_finite & (top > 1e-36), x / top, 0.0)
    return units, torch.where(is_finite, top, torch.nan)


@functools.cache
def _rows_kernel() -> tuple[Callable[[int], None], int, Any]:
    from loraserve_kernels.cpu.linear import row_quantization

    handle = row_quantization.compiled()
    return handle.ctypes, handle.address, handle


def _quantize_rows_numba(
    x: Tensor, offset: int = 0, starts: Tensor | None = None, tops: Tensor | None = None, rotation: int = 0
) -> tuple[Tensor, Tensor]:
    """Round rows to codes, each plus `offset` as a byte, and scales, as `quantize_rows` does.

    Args:
        starts: [num_tokens, groups] float32, where the sum of each group's codes, negated, goes.
        tops: [num_tokens, 1] float32, contiguous; as for `int8_linear`.
        rotation: as for `quantize_rows`.
    """
    from loraserve_kernels.cpu.linear import row_quantization as k

    call, address, _ = _rows_kernel()
    num_rows, width = x.shape
    check_rotation(rotation, width)
    codes, scales = torch.empty((num_rows, width), dtype=torch.int8), torch.empty((num_rows, 1))
    args = np.zeros(k.NUM_WORDS, dtype=np.int64)
    args[k.X : k.WIDTH + 1] = x.data_ptr(), x.stride(0), num_rows, width
    args[k.CODES : k.OFFSET + 1] = codes.data_ptr(), width, scales.data_ptr(), offset
    if starts is not None:
        args[k.STARTS], args[k.GROUP] = starts.data_ptr(), width // starts.shape[1]
    if tops is not None:
        args[k.TOPS] = tops.data_ptr()
    args[k.ROTATION] = rotation
    num_threads = threads.num_threads() if num_rows * width * 4 >= _MIN_PARALLEL_BYTES else 1
    threads.run(call, address, args.ctypes.data, num_threads)
    return codes, scales
