"""The block types of GGUF that are read, and what each becomes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loraserve.model.gguf.gguf_file import TYPES


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Format that a type's blocks become: the smallest of the kernels' that holds their codes.

    Attributes:
        format: of `QuantizedWeight`.
        group_size: inputs that share a scale.
        has_zeros: whether codes have minima.
        block: inputs of a block.
        block_bytes: of it.
    """

    format: str
    group_size: int
    has_zeros: bool
    block: int
    block_bytes: int

    def row_bytes(self, in_features: int) -> int:
        """Return the bytes of a row; of a part of a block, those of a whole one."""
        return -(-in_features // self.block) * self.block_bytes


_SIZES = {type_.name: (type_.block, type_.num_bytes) for type_ in TYPES.values()}
BLOCK_FORMATS: Mapping[str, BlockFormat] = {
    name: BlockFormat(format, group_size, has_zeros, *_SIZES[name])
    for name, format, group_size, has_zeros in (
        ("Q4_0", "int4", 32, False),
        ("Q4_1", "int4", 32, True),
        ("Q5_0", "int8", 32, False),
        ("Q5_1", "int8", 32, True),
        ("Q8_0", "int8", 32, False),
        ("Q2_K", "int4", 16, True),
        ("Q3_K", "int4", 16, False),
        ("Q4_K", "int4", 32, True),
        ("Q5_K", "int8", 32, True),
        ("Q6_K", "int8", 16, False),
        ("IQ4_NL", "int8", 32, False),
        ("IQ4_XS", "int8", 32, False),
    )
}
"""By the type's name."""
