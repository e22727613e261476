"""The types of GGUF's tensors, and what those that are read become. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """Format of a tensor's blocks.

    Attributes:
        name: as llama.cpp prints it.
        block: weights of a row that are stored together.
        num_bytes: of a block.
    """

    name: str
    block: int
    num_bytes: int


TYPES: Mapping[int, TensorType] = {
    number: TensorType(name, block, num_bytes)
    for number, name, block, num_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
    )
}
"""Types by their number in a file, which may hold others that aren't read."""


FLOAT_TYPES = ("F32", "F16", "BF16")
"""Types whose numbers are stored one by one, named as safetensors names their dtypes."""


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
        """Compute the bytes of a row; of a part of a block, those of a whole one."""
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
        ("MXFP4", "mxfp4", 32, False),
    )
}
"""Formats by the type's name."""
