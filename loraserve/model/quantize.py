"""The base's linears as they stand in memory: float, or int8 by output channel. Each is built slice by slice while weights stream in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.errors import ConfigError
from loraserve_kernels.gemm import Int8Weight, int8_linear, quantize_int8

QUANTIZATIONS = ("none", "int8")


class Linear(Protocol):
    """Maps [num_tokens, in_features] to a new [num_tokens, out_features]."""

    def __call__(self, x: Tensor) -> Tensor: ...

    @property
    def num_bytes(self) -> int: ...


class FloatLinear:
    """Weights kept transposed, [in_features, out_features]: with few rows BLAS reads them faster so (2.5 × at 8 rows)."""

    def __init__(self, weight_t: Tensor, bias: Tensor | None) -> None:
        self._weight_t = weight_t
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self._weight_t if self._bias is None else torch.addmm(self._bias, x, self._weight_t)

    @property
    def num_bytes(self) -> int:
        return self._weight_t.nbytes + (0 if self._bias is None else self._bias.nbytes)


class TiedLinear:
    """A head that shares the embedding's rows, [vocab_size, hidden_size]; takes no memory of its own."""

    num_bytes = 0

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight)


class Int8Linear:
    """int8 weights by output channel, activations rounded row by row: a row's result doesn't depend on the rows beside it."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return int8_linear(x, self._weight, self._bias)

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes + (0 if self._bias is None else self._bias.nbytes)


class LinearBuilder:
    """Collects the slices of one linear (q, k and v of ``qkv``), in any order, and builds it once all are there.

    Float slices go straight to their place in the result; int8 needs them together, so at most one linear's float
    weights exist beside the finished ones.
    """

    def __init__(self, slices: Sequence[tuple[int, int]], *, has_bias: bool, dtype: torch.dtype, quantize: str) -> None:
        if quantize not in QUANTIZATIONS:
            raise ConfigError(
                f"--quantize {quantize} is not implemented on this device; choose {' or '.join(QUANTIZATIONS)}."
            )
        self._quantize = quantize
        self._dtype = dtype
        outs = [out for out, _ in slices]
        self._starts = [sum(outs[:i]) for i in range(len(outs) + 1)]
        self._in_features = slices[0][1]
        self._num_missing = len(slices) * (2 if has_bias else 1)
        self._bias = torch.empty(self._starts[-1], dtype=dtype) if has_bias else None
        self._weight: Tensor | None = None

    def put_weight(self, index: int, weight: Tensor) -> None:
        """Take slice ``index``: [out_features, in_features] in any float dtype; copied."""
        start, end = self._starts[index], self._starts[index + 1]
        if self._weight is None:
            # Only now: linears that haven't begun take no memory yet.
            shape = (self._in_features, self._starts[-1])
            self._weight = torch.empty(shape, dtype=torch.float32 if self._quantize == "int8" else self._dtype)
        self._weight[:, start:end].copy_(weight.T)
        self._num_missing -= 1

    def put_bias(self, index: int, bias: Tensor) -> None:
        if self._bias is None:
            raise ValueError("this linear has no bias")
        self._bias[self._starts[index] : self._starts[index + 1]].copy_(bias)
        self._num_missing -= 1

    @property
    def is_complete(self) -> bool:
        return self._num_missing == 0

    def build(self) -> Linear:
        """Return the finished linear and let go of what it was made from."""
        weight, self._weight = self._weight, None
        if weight is None or not self.is_complete:
            raise ValueError("a slice of this linear is missing")
        if self._quantize == "int8":
            return Int8Linear(quantize_int8(weight.T), None if self._bias is None else self._bias.float())
        return FloatLinear(weight, self._bias)
