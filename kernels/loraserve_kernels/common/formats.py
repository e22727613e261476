"""The formats that a base's weights can be quantized to, or stored in. Imports no torch."""

from __future__ import annotations

FORMATS = ("int8", "int4", "nf4", "fp8")
STORED_FORMATS = (*FORMATS, "mxfp4")
"""Formats that a checkpoint may hold; weights aren't rounded to the last."""
PACKED_FORMATS = ("int4", "nf4", "mxfp4")
"""Formats of which a byte holds two codes."""
GROUP_SIZES = (32, 64, 128)
"""Group sizes of int4, and of int8 and fp8 where they have groups."""
CPU_GROUP_SIZES = (16, *GROUP_SIZES)
"""Group sizes of a CPU's kernels."""
NF4_GROUP_SIZE = 64
MXFP4_GROUP_SIZE = 32
ROUNDED_BY_ROW = frozenset({"int8", "int4"})
"""Formats of weights whose activations a CPU rounds to int8 by row."""
ROUNDED_IN_GROUPS = frozenset({"int8-g32", "int4-g32", "mxfp4-g32"})
"""Formats, as kernels name them, whose activations it rounds in groups of 32 inputs."""
ROTATION_BLOCKS = (64, 32, 16)
"""Inputs of a block that is rotated before numbers are rounded, those first that are preferred."""


def rotation_block(width: int) -> int:
    """Choose the block by which this many inputs are rotated; 0: no block divides them."""
    return next((block for block in ROTATION_BLOCKS if width % block == 0), 0)
