"""Number of inputs that share a scale, or a block of a rotation.

Weights are quantized while they're loaded, or stored so. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from loraserve.errors import ModelError
from loraserve_kernels.common.formats import GROUP_SIZES, NF4_GROUP_SIZE, rotation_block

INT4_GROUP_SIZE = 32
"""Inputs that share a scale where we round to int4: four times the error of 8 bits is worth it."""


def group_size(format: str, in_features: int) -> int:
    """Choose how many inputs share a scale when a float weight is rounded to `format`.

    Raises:
        ModelError: in_features isn't a multiple of it.
    """
    size = {"int4": INT4_GROUP_SIZE, "nf4": NF4_GROUP_SIZE}.get(format, in_features)
    if in_features % size:
        raise ModelError(
            f"A linear with {in_features} inputs can't be quantized to {format}, whose groups have {size} inputs.",
            hint="Use --quantize int8.",
        )
    return size


def kernels_group_size(size: int) -> int | None:
    """Find the largest group that kernels have, of those that cut a stored group evenly.

    None: there's none.
    """
    return max((small for small in GROUP_SIZES if size % small == 0), default=None)


@dataclass(frozen=True, slots=True)
class Rotations:
    """Choice of the Hadamard blocks by which a base's linears are rotated.

    Attributes:
        formats: formats of float weights that are rotated when they are rounded: those whose
            activations are rounded too. A row that stays in floats would be rotated for nothing.
        num_ranks: ranks that share the inputs of a row-parallel linear, each in whole blocks.
    """

    formats: frozenset[str] = frozenset()
    num_ranks: int = 1

    def block(self, format: str, in_features: int, *, is_row_parallel: bool = False) -> int:
        """Choose the inputs of a block of a float weight that is rounded to `format`.

        0: it isn't rotated.
        """
        width = in_features // self.num_ranks if is_row_parallel else in_features
        return rotation_block(width) if format in self.formats else 0
