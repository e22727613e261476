"""Rounding to int4 that makes up for its own errors.

Inputs are rounded one by one; each one's error is spread over those that are still to come, as far
as the inputs of calibration text are correlated. Source: GPTQ (arXiv:2210.17323).
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraserve.errors import ModelError
from loraserve.model.config.formats import INT4_GROUP_SIZE
from loraserve_kernels.common.quantized import QuantizedWeight, pack_nibbles
from loraserve_kernels.common.rotation import rotate
from loraserve_kernels.cpu import threads

_BLOCK = 128
"""Inputs whose errors are spread at once over all inputs behind them."""
_DAMPING = 0.01
_MAX_DAMPING = 1.0
_SHRINKS = (1.0, 0.93, 0.86)
"""Parts of a group's range that are tried."""


def compensate(weight: Tensor, inverse: Tensor, rotation: int) -> QuantizedWeight:
    """Round a weight to int4 in groups with zeros for the least error of its products.

    Args:
        weight: [out_features, in_features] float32, unrotated.
        inverse: `inverse_factor` of the inputs' products.
        rotation: inputs of a Hadamard block by which the inputs were rotated, and the weight is;
            0: neither.

    Raises:
        ModelError: the weight holds numbers that aren't finite.
    """
    out_features, in_features = weight.shape
    if not bool(torch.isfinite(weight).all()):
        raise ModelError("A weight holds numbers that aren't finite.")
    columns = rotate(weight, rotation).mul(1 / max(rotation, 1)).t().contiguous()
    codes = torch.empty(in_features, out_features, dtype=torch.uint8)
    num_groups = in_features // INT4_GROUP_SIZE
    scales, zeros = torch.empty(num_groups, out_features), torch.empty(num_groups, out_features)
    for first in range(0, in_features, _BLOCK):
        last = min(first + _BLOCK, in_features)
        part, factors = columns[first:last], inverse[first:last, first:last]
        errors = torch.empty_like(part)
        # each of these takes microseconds: a second thread would only be waited for
        with threads.alone():
            for i in range(last - first):
                group, place = divmod(first + i, INT4_GROUP_SIZE)
                if place == 0:
                    scales[group], zeros[group] = _range_of(part[i : i + INT4_GROUP_SIZE])
                scale, zero, column = scales[group], zeros[group], part[i]
                code = (column / scale).round_().add_(zero).clamp_(0, 15)
                codes[first + i] = code
                errors[i] = (column - (code - zero) * scale) / factors[i, i]
                part[i + 1 :].addr_(factors[i, i + 1 :], errors[i], alpha=-1)
        columns[last:].addmm_(inverse[first:last, last:].t(), errors, alpha=-1)
    packed = codes.t().contiguous()
    return QuantizedWeight(
        "int4",
        pack_nibbles(packed),
        scales.t(),
        zeros.t().to(torch.uint8),
        INT4_GROUP_SIZE,
        in_features,
        out_features,
        rotation,
    )


def inverse_factor(x: Tensor) -> Tensor:
    """Compute the upper Cholesky factor of the inverse of ``x^T x``, damped.

    It is [in_features, in_features] float32.

    Args:
        x: [num_rows, in_features] float32: a linear's inputs on calibration text, rotated.

    Raises:
        ModelError: the inputs hold numbers that aren't finite, or can't be inverted.
    """
    gram = x.t() @ x
    if not bool(torch.isfinite(gram).all()):
        raise ModelError("The inputs of a linear on the calibration text hold numbers that aren't finite.")
    wide, damping = gram.double(), _DAMPING
    mean = float(wide.diagonal().mean()) or 1.0
    while damping <= _MAX_DAMPING:
        damped = wide.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                factor: Tensor = upper.float()
                return factor
        damping *= 10
    raise ModelError("The inputs of a linear on the calibration text can't be inverted: give a longer text.")


def _range_of(group: Tensor) -> tuple[Tensor, Tensor]:
    """Search each output's scale, a number of bfloat16, and the code of its 0, [out_features]."""
    low, high = group.amin(0).clamp_max_(0), group.amax(0).clamp_min_(0)
    least, scales, zeros = torch.full_like(low, torch.inf), torch.ones_like(low), torch.zeros_like(low)
    for shrink in _SHRINKS:
        scale = ((high - low) * (shrink / 15)).clamp_min_(1e-12).bfloat16().float()
        zero = (low * -shrink / scale).round_().clamp_(0, 15)
        error = (((group / scale).round_() + zero).clamp_(0, 15) - zero).mul_(scale).sub_(group).square_().sum(0)
        is_less = error < least
        least = torch.where(is_less, error, least)
        scales, zeros = torch.where(is_less, scale, scales), torch.where(is_less, zero, zeros)
    return scales, zeros
