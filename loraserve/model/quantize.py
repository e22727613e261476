"""Linears by how their weights are kept: float32, bfloat16 or float16, or int8. One object per site, made once, called every step.

float32 weights are kept in oneDNN's blocked layout, the only copy. Measured on one core of a Sapphire Rapids, 4096 × 768: as fast as the best
other layout at every number of rows (2.0 × a row-major ``F.linear`` at 8 rows, 1.3 × at 32), and a row's result is the same bits whatever shares
its batch: a row-major product takes another path, with another order of additions, at 1, 2 to 8, and more rows. oneDNN does so at one row only,
so a single row is given a second.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.errors import ConfigError
from loraserve_kernels.gemm import Int8Weight, int8_linear, quantize_int8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Linear(Protocol):
    """``x W^T + bias`` for x [num_tokens, in_features] float32; the result [num_tokens, out_features] is float32, contiguous, and the caller's to change."""

    @property
    def num_bytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


def make_linear(weight: Tensor, bias: Tensor | None, *, quantize: str, dtype: torch.dtype) -> Linear:
    """Return the linear of these weights; it keeps neither tensor when it keeps another form of them.

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
    weight = weight.to(dtype).contiguous()
    return PackedLinear(weight, bias) if _can_pack(dtype) else PlainLinear(weight, bias)


def check_format(quantize: str, dtype: torch.dtype) -> None:
    """Return if this machine's CPU can keep weights so.

    Raises:
        ConfigError: it can't, or nothing can.
    """
    if quantize not in ("none", "int8"):
        raise ConfigError(f"Quantization {quantize!r} isn't available on the CPU; expected none or int8.")
    if dtype not in DTYPES:
        raise ConfigError(f"The dtype {dtype} isn't available; expected float32, bfloat16 or float16.")
    needs_fbgemm = quantize == "int8" or dtype == torch.float16
    if needs_fbgemm and "fbgemm" not in torch.backends.quantized.supported_engines:
        raise ConfigError(
            "int8 and float16 weights need fbgemm, which this build of torch hasn't got for this CPU.",
            hint="Use --dtype float32 or bfloat16 and --quantize none.",
        )


class PackedLinear:
    """float32 or bfloat16 weights in oneDNN's blocked layout. With bfloat16, x is rounded to it and sums are float32."""

    __slots__ = ("_bias", "_cast", "_packed", "num_bytes")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._cast = None if weight.dtype == torch.float32 else weight.dtype
        self._bias = None if bias is None else bias.to(weight.dtype)
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        num_tokens = x.shape[0]
        if num_tokens == 1:
            x = x.expand(2, -1).contiguous()
        if self._cast is not None:
            x = x.to(self._cast)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        if self._cast is not None:
            out = out.float()
        return out[:1] if num_tokens == 1 else out


class PlainLinear:
    """Row-major float32 or bfloat16 weights, where torch has no oneDNN."""

    __slots__ = ("_bias", "_weight", "num_bytes")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.to(weight.dtype)
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias).float()


class Float16Linear:
    """float16 weights packed for fbgemm; x and sums stay float32, and a row's result is the same bits whatever shares its batch."""

    __slots__ = ("_bias", "_packed", "num_bytes")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        with warnings.catch_warnings():
            # torch announces that the eager quantization API moves to torchao; the ops themselves stay
            warnings.simplefilter("ignore")
            self._packed: Any = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self._bias = bias
        self.num_bytes = 2 * weight.numel() + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return out if self._bias is None else out.add_(self._bias)


class Int8Linear:
    """int8 weights by output channel, x in int8 by row; a row's result is the same bits whatever shares its batch."""

    __slots__ = ("_bias", "_weight", "num_bytes")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight: Int8Weight = quantize_int8(weight)
        self._bias = bias
        self.num_bytes = self._weight.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return int8_linear(x, self._weight, self._bias)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
