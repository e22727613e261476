"""The formats that a base's weights can be quantized to. Imports no torch."""

from __future__ import annotations

FORMATS = ("int8", "int4", "nf4", "fp8")
GROUP_SIZES = (32, 64, 128)
"""Group sizes of int4, and of int8 where it has groups."""
NF4_GROUP_SIZE = 64
