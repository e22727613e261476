"""Rotation of a linear's inputs by Hadamard blocks: outliers are spread before numbers are rounded.

A weight is kept as ``W H / n`` and multiplied with ``H x``, where H has blocks of n inputs, whose
elements are 1 and −1. ``H H = n``, so that the product is ``W x``: n is a power of two, and nothing
but the sums of a rotation is rounded.

Source: QuaRot (arXiv:2404.00456).
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraserve_kernels.common.formats import ROTATION_BLOCKS as ROTATION_BLOCKS
from loraserve_kernels.errors import InvalidWeight

_BLOCKS_AT_ONCE = 4096
"""Blocks that a core's own cache holds in float32."""


def rotate(x: Tensor, block: int) -> Tensor:
    """Compute ``x H``, each block of the last dimension for itself; twice is ``block · x``.

    The order of its sums is fixed: a float32 result has the same bits as the CPU's kernels give.

    Args:
        x: [..., in_features], any float dtype, on any device.
        block: one of `ROTATION_BLOCKS`, which divides in_features; 0: x is returned as it is.

    Raises:
        InvalidWeight: no such block, or it doesn't divide in_features.
    """
    if block == 0:
        return x
    check_rotation(block, x.shape[-1])
    blocks = x.reshape(-1, block)
    out = torch.empty_like(blocks)
    for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
        # one below the other, blocks are added as long vectors
        turned = blocks[first : first + _BLOCKS_AT_ONCE].t().clone(memory_format=torch.contiguous_format)
        distance = block // 2
        while distance:
            pairs = turned.view(block // (2 * distance), 2, distance, -1)
            upper, lower = pairs[:, 0], pairs[:, 1]
            difference = upper - lower
            upper.add_(lower)
            lower.copy_(difference)
            distance //= 2
        out[first : first + _BLOCKS_AT_ONCE] = turned.t()
    return out.view(x.shape)


def check_rotation(block: int, in_features: int) -> None:
    """Raise an error unless a weight's inputs can be rotated by blocks of this size, or 0.

    Raises:
        InvalidWeight: they can't.
    """
    if block != 0 and (block not in ROTATION_BLOCKS or in_features % block != 0):
        raise InvalidWeight(
            f"{in_features} inputs rotated by blocks of {block}; expected a divisor of them among "
            f"{', '.join(map(str, ROTATION_BLOCKS))}, or 0"
        )
