"""The base's linears on the CPU, in int8 and in float32, so that no row's result depends on who shares its batch.

int8: weights by output channel, activations by row. Integer products and sums are exact, so that a row's bits can't depend on the other rows; what must be
avoided is a scale taken over the whole batch, where one tenant's outlier spoils the others' answers. Two libraries come with torch:

* oneDNN multiplies int8 by int8 on machines that have instructions for it (VNNI, AMX). On others it adds pairs of products in 16 bits that can overflow, silently;
  so it's tried once on the largest numbers there are, and taken only when every sum is exact.
* fbgemm works on any x86 machine with activations of 7 bits. Its linear for a fixed activation scale gets rows divided by their own largest magnitude, so that
  one scale fits every row. Elsewhere torch's reference of the same operator runs.

float32: oneDNN with weights in its own blocked order, which adds the products of a row in one order for any number of rows but one; a single row is computed twice.
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

from loraserve_kernels import threads
from loraserve_kernels.cpu import HAS_NUMBA
from loraserve_kernels.errors import ShapeMismatch
from loraserve_kernels.quantized import quantize

_MIN_PARALLEL_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A linear's weight in int8, in the order that its library reads.

    Attributes:
        packed: oneDNN's tensor or fbgemm's object.
        scales: [out_features] float32: a channel's weights are its codes times this. None with fbgemm, whose object holds them.
        in_features, out_features: of the linear.
    """

    packed: Any
    scales: Tensor | None
    in_features: int
    out_features: int

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and of the scale per output channel."""
        return self.out_features * (self.in_features + 4)


@dataclass(frozen=True, slots=True, eq=False)
class FloatWeight:
    """A linear's float32 weight.

    Attributes:
        packed: oneDNN's tensor, or where torch lacks oneDNN the weight as it is, [out_features, in_features].
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


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Round a weight [out_features, in_features] to int8 by output channel; nothing of the float weight is kept."""
    rounded = quantize(weight.detach(), "int8")
    return pack_int8(rounded.codes, rounded.scales[:, 0].contiguous())


def pack_int8(codes: Tensor, scales: Tensor) -> Int8Weight:
    """Bring a weight that is in int8 already into the order that its library reads; codes and scales are used as they are, and not kept.

    Args:
        codes: [out_features, in_features] int8, from -128 to 127.
        scales: [out_features] float32: a channel's weights are its codes times this.

    Raises:
        ShapeMismatch: codes and scales of other shapes or dtypes.
    """
    if codes.dim() != 2 or codes.dtype != torch.int8 or scales.dtype != torch.float32:
        raise ShapeMismatch(
            f"codes are {tuple(codes.shape)} {codes.dtype}, scales {scales.dtype}; they must be a matrix in int8, and float32"
        )
    out_features, in_features = codes.shape
    if scales.shape != (out_features,):
        raise ShapeMismatch(f"scales are {tuple(scales.shape)}; they must be ({out_features},)")
    if _onednn_is_exact():
        return Int8Weight(torch.ops.onednn.qlinear_prepack(codes, None), scales.clone(), in_features, out_features)
    with warnings.catch_warnings():
        # torch announces at the first call that its eager quantization moves to torchao one day. There's no other way yet to make the tensor that fbgemm packs;
        # constraints.txt and the range in pyproject.toml hold the versions where this works.
        warnings.filterwarnings(
            "ignore", message="torch.quantize_per_tensor, torch.quantize_per_channel", category=UserWarning
        )
        zeros = torch.zeros(out_features, dtype=torch.int64)
        quantized = torch._make_per_channel_quantized_tensor(codes, scales.double(), zeros, 0)
    return Int8Weight(torch.ops.quantized.linear_prepack(quantized, None), None, in_features, out_features)


def unpack_int8(weight: Int8Weight) -> Tensor:
    """Return the codes that `pack_int8` was given, [out_features, in_features] int8."""
    codes: Tensor
    if weight.scales is not None:
        codes = weight.packed.to_dense().t()
    else:
        codes = torch.ops.quantized.linear_unpack(weight.packed)[0].int_repr()
    return codes


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + bias`` with x rounded row by row, [num_tokens, out_features] float32; a row's bits don't depend on the other rows.

    Args:
        x: [num_tokens, in_features] float32. A row that isn't finite yields NaN in its own row only.
        bias: [out_features] float32.

    Raises:
        ShapeMismatch: x isn't float32 of the weight's in_features.
    """
    _check(x, weight.in_features)
    if weight.scales is None:
        units, scales = _unit_rows(x)
        # 7 bits: fbgemm adds pairs of products in 16 bits on machines without VNNI
        y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(units, 1 / 63, 64, weight.packed)
    else:
        codes, scales = quantize_rows(x)
        y = _onednn_linear(codes, weight.packed, weight.scales)
    return y.mul_(scales) if bias is None else torch.addcmul(bias, y, scales)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of x by its own largest magnitude: codes [num_tokens, in_features] int8 within ±127, and scales [num_tokens, 1]; ``x ≈ codes · scales``.

    A row that isn't finite gets zeros and the scale NaN.
    """
    if HAS_NUMBA and x.stride(1) == 1:
        return _quantize_rows_numba(x)
    units, scales = _unit_rows(x)
    return units.mul_(127).round_().to(torch.int8), scales.div_(127)


def pack_float(weight: Tensor) -> FloatWeight:
    """Bring a float32 weight [out_features, in_features] into the order that oneDNN reads fastest for few rows; the given tensor isn't kept."""
    weight = weight.detach()
    if weight.dtype != torch.float32:
        raise ShapeMismatch(f"the weight is {weight.dtype}; it must be float32")
    out_features, in_features = weight.shape
    if not torch._C._has_mkldnn:
        return FloatWeight(weight.clone(), False, in_features, out_features)
    # the order is chosen for about as many rows as a decode step has
    return FloatWeight(torch.ops.mkldnn._reorder_linear_weight(weight, 32), True, in_features, out_features)


_BLOCK_ROWS = (64, 48, 32)
"""Products of fewer at a time would take longer than unpacking."""


def blocks_in_place(packed: FloatWeight, weight: Tensor) -> Tensor | None:
    """Return a packed weight's own memory as blocks of its rows, each transposed: [num_blocks, in_features, rows of a block] float32; None where it is in another order.

    oneDNN gives back whole matrices only, in new memory. It doesn't say in which order it keeps them; on machines with AVX2 or AVX512 so many rows are side by side, and whether they
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
    """Return ``x W^T + bias``, [num_tokens, out_features] float32. With oneDNN a row's bits don't depend on the other rows.

    Args:
        x: [num_tokens, in_features] float32.
        bias: [out_features] float32.

    Raises:
        ShapeMismatch: x isn't float32 of the weight's in_features.
    """
    _check(x, weight.in_features)
    if not weight.is_blocked:
        return F.linear(x, weight.packed, bias)
    # one row alone would be summed in another order (as a matrix times a vector)
    rows = torch.cat((x, x)) if x.shape[0] == 1 else x
    y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight.packed, bias, "none", [], "")
    return y[: x.shape[0]]


def warm_up() -> None:
    """Compile what int8 linears need, or read it from numba's cache."""
    _onednn_is_exact()
    if HAS_NUMBA:
        _rows_kernel()


def _check(x: Tensor, in_features: int) -> None:
    if x.dim() != 2 or x.shape[1] != in_features or x.dtype != torch.float32:
        raise ShapeMismatch(f"x is {tuple(x.shape)} {x.dtype}; this linear takes (num_tokens, {in_features}) float32")


def _onednn_linear(codes: Tensor, packed: Any, scales: Tensor) -> Tensor:
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, 0, packed, scales, _zero_points(scales.shape[0]), None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


@functools.lru_cache(maxsize=64)
def _zero_points(out_features: int) -> Tensor:
    return torch.zeros(out_features, dtype=torch.int32)


@functools.cache
def _onednn_is_exact() -> bool:
    """Whether oneDNN's int8 linear exists here and sums the largest products without overflow, for few rows and many."""
    try:
        signs = torch.tensor([1, -1, -1, 1], dtype=torch.int8).repeat(64)
        weight = torch.stack((torch.full_like(signs, 127), 127 * signs, torch.full_like(signs, -128))).repeat(22, 1)
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        for num_rows in (1, 3, 32, 200):
            codes = torch.stack((torch.full_like(signs, 127), 127 * signs, torch.full_like(signs, -127))).repeat(67, 1)[
                :num_rows
            ]
            y = _onednn_linear(codes, packed, torch.ones(weight.shape[0]))
            if not torch.equal(y.double(), codes.double() @ weight.double().T):
                return False
    except (RuntimeError, AttributeError):
        # built without oneDNN, or a processor that it has no int8 kernel for
        return False
    return True


def _unit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row divided by its largest magnitude, and that magnitude, [num_tokens, 1]; zeros and NaN for a row that isn't finite."""
    top = x.abs().amax(1, keepdim=True)
    is_finite = torch.isfinite(top)
    units = torch.where(is_finite & (top > 1e-36), x / top, 0.0)
    return units, torch.where(is_finite, top, torch.nan)


@functools.cache
def _rows_kernel() -> tuple[Callable[[int], None], int, Any]:
    from loraserve_kernels import cpu_rows

    handle = cpu_rows.compiled()
    return handle.ctypes, handle.address, handle


def _quantize_rows_numba(x: Tensor) -> tuple[Tensor, Tensor]:
    call, address, _ = _rows_kernel()
    num_rows, width = x.shape
    codes, scales = torch.empty((num_rows, width), dtype=torch.int8), torch.empty((num_rows, 1))
    args = np.array(
        (0, 0, 0, 0, 0, 0, 0, 0, x.data_ptr(), x.stride(0), codes.data_ptr(), scales.data_ptr(), num_rows, width),
        dtype=np.int64,
    )
    num_threads = threads.num_threads() if num_rows * width * 4 >= _MIN_PARALLEL_BYTES else 1
    threads.run(call, address, args.ctypes.data, num_threads)
    return codes, scales
