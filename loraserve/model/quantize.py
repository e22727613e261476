"""Linears by how their weights are kept: float32, bfloat16 or float16, or int8. One object per site, made once, called every step.

Activations and sums are float32. With float32, float16 and int8 weights a row's result is the same bits whatever shares its batch, so that a
greedy answer doesn't depend on the batch either; with bfloat16 weights it is so only nearly.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.errors import ConfigError
from loraserve_kernels.gemm import Int8Weight, float_linear, int8_linear, pack_float, quantize_int8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Linear(Protocol):
    """``x W^T + bias`` for x [num_tokens, in_features] float32; the result [num_tokens, out_features] is float32, contiguous, and the caller's to change."""

    @property
    def num_bytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


def make_linear(weight: Tensor, bias: Tensor | None, *, quantize: str, dtype: torch.dtype) -> Linear:
    """Return the linear of these weights, in a form of its own: the given weight isn't kept.

    Args:
        weight: [out_features, in_features], any float dtype.
        bias: [out_features] float32.
        quantize: ``none`` or ``int8``.
        dtype: what the weights are kept in, when not quantized.
    """
    if quantize == "int8":
        return Int8Linear(weight, bias)
    if dtype == torch.float16:
        return Float16Linear(weight, bias)
    return BFloat16Linear(weight, bias) if dtype == torch.bfloat16 else Float32Linear(weight, bias)


def check_format(quantize: str, dtype: torch.dtype) -> None:
    """Return if weights can be kept so on this machine.

    Raises:
        ConfigError: they can't, or nowhere.
    """
    if quantize not in ("none", "int8"):
        raise ConfigError(f"Quantization {quantize!r} isn't available on the CPU; expected none or int8.")
    if dtype not in DTYPES:
        raise ConfigError(f"The dtype {dtype} isn't available; expected float32, bfloat16 or float16.")
    if dtype == torch.float16 and quantize == "none" and "fbgemm" not in torch.backends.quantized.supported_engines:
        raise ConfigError(
            "float16 weights need fbgemm, which this build of torch hasn't got for this CPU.",
            hint="Use --dtype float32 or bfloat16.",
        )


class Float32Linear:
    """float32 weights in oneDNN's blocked order.

    Measured on one core of a Sapphire Rapids at 4096 × 768: twice a row-major `F.linear` at 8 rows, 1.3 times at 32, equal at 1 and 512.
    """

    __slots__ = ("_bias", "_weight", "num_bytes")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = pack_float(weight.float())
        self._bias = bias
        self.num_bytes = self._weight.num_bytes + _num_bytes(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return float_linear(x, self._weight, self._bias)


class BFloat16Linear:
    """bfloat16 weights; x is rounded to bfloat16 and so is the result. Fast with AMX, half the memory anywhere."""

    __slots__ = ("_bias", "_is_packed", "_weight", "num_bytes")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.to(torch.bfloat16).contiguous()
        self.num_bytes = weight.nbytes + _num_bytes(bias)
        self._bias = None if bias is None else bias.to(torch.bfloat16)
        self._is_packed = torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._is_packed else weight.clone()

    def __call__(self, x: Tensor) -> Tensor:
        x = x.bfloat16()
        if not self._is_packed:
            return F.linear(x, self._weight, self._bias).float()
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y.float()


class Float16Linear:
    """float16 weights packed for fbgemm. A weight beyond float16's range, which no model is known to have, is the largest there is."""

    __slots__ = ("_bias", "_packed", "num_bytes")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        with warnings.catch_warnings():
            # torch announces that its eager quantization moves to torchao one day, and warns of weights beyond the range
            warnings.simplefilter("ignore", UserWarning)
            self._packed: Any = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self._bias = bias
        self.num_bytes = 2 * weight.numel() + _num_bytes(bias)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return y if self._bias is None else y.add_(self._bias)


class Int8Linear:
    """int8 weights by output channel, x in int8 by row."""

    __slots__ = ("_bias", "_weight", "num_bytes")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight: Int8Weight = quantize_int8(weight)
        self._bias = bias
        self.num_bytes = self._weight.num_bytes + _num_bytes(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return int8_linear(x, self._weight, self._bias)


def _num_bytes(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.nbytes
