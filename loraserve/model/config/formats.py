"""Number of inputs that share a scale.

Weights are quantized while they're loaded, or stored so. Imports no torch.
"""

from __future__ import annotations

from loraserve.errors import ModelError
from loraserve_kernels.common.formats import GROUP_SIZES, NF4_GROUP_SIZE


def group_size(format: str, in_features: int) -> int:
    """Return how many inputs share a scale when a float weight is rounded to `format`.

    It depends on the weight's width.

    Raises:
        ModelError: no groups that the format has fill in_features.
    """
    sizes = {"int4": GROUP_SIZES, "nf4": (NF4_GROUP_SIZE,)}.get(format, (in_features,))
    fitting = [size for size in sizes if in_features % size == 0]
    if not fitting:
        raise ModelError(
            f"A linear with {in_features} inputs can't be quantized to {format}, "
            f"whose groups have {' or '.join(map(str, sizes))} inputs.",
            hint="Use --quantize int8.",
        )
    return max(fitting)


def kernels_group_size(size: int) -> int | None:
    """Return the largest group that kernels have, of those that cut a stored group evenly.

    None: there's none.
    """
    return max((small for small in GROUP_SIZES if size % small == 0), default=None)
