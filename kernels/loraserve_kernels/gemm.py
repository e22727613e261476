"""int8 linears on the CPU: weights by output channel, activations by row, so that no row's result depends on who shares its batch.

fbgemm's dynamic linear takes one activation scale for the whole batch: one tenant's outlier would spoil the others' answers. So each row is divided
by its own absolute maximum first, and two columns, +1 and −1, are appended against zero weights: every batch then spans exactly [−1, 1], and the
one scale is always the same.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A linear's weight in int8, packed for fbgemm.

    Attributes:
        packed: fbgemm's own object.
        in_features, out_features: of the linear, without the two columns.
    """

    packed: Any
    in_features: int
    out_features: int

    @property
    def num_bytes(self) -> int:
        """Bytes of codes (columns included) and of the scale per output channel."""
        return self.out_features * (self.in_features + 2) + 4 * self.out_features


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Round a weight [out_features, in_features] to int8 by output channel; the float weight isn't kept."""
    weight = weight.detach().float()
    out_features, in_features = weight.shape
    # a channel of zeros must not divide by zero
    scales = weight.abs().amax(1).clamp_min(1e-12).double() / 127
    with warnings.catch_warnings():
        # torch announces that the whole eager quantization API moves to torchao; the ops themselves stay
        warnings.filterwarnings("ignore", message=".*quantize_per_channel.*")
        warnings.filterwarnings("ignore", message=".*quantization.*deprecated.*")
        codes = torch.quantize_per_channel(
            F.pad(weight, (0, 2)), scales, torch.zeros(out_features, dtype=torch.int64), 0, torch.qint8
        )
    return Int8Weight(torch.ops.quantized.linear_prepack(codes, None), in_features, out_features)


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + bias`` [num_tokens, out_features] float32, x rounded to 7 bits by row; a row's result is the same bits whatever shares the batch.

    Args:
        x: [num_tokens, in_features] float32. A row that isn't finite yields a row that isn't, and harms no other.
        bias: [out_features] float32.
    """
    scale = x.abs().amax(1, keepdim=True)
    bad = ~torch.isfinite(scale)
    safe = torch.where(bad | (scale == 0), torch.ones_like(scale), scale)
    unit = torch.empty(x.shape[0], x.shape[1] + 2)
    torch.div(x, safe, out=unit[:, :-2])
    unit[:, -2] = 1
    unit[:, -1] = -1
    unit = torch.where(bad, torch.zeros_like(unit), unit)
    unit[:, -2] = 1
    unit[:, -1] = -1
    out: Tensor = torch.ops.quantized.linear_dynamic(unit, weight.packed, reduce_range=True)
    out.mul_(torch.where(bad, torch.full_like(scale, float("nan")), scale))
    return out if bias is None else out.add_(bias)
