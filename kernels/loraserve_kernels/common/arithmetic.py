"""Arithmetic of a linear, as a value that others show.

It names which kernel does it, and which instructions the kernel was built from. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

W8A8_ROW = "w8a8-row"
"""int8 weights by output channel, activations rounded to int8 by row."""
W8A7_ROW = "w8a7-row"
"""int8 weights by output channel, activations rounded to 7 bits by row."""
W4A8_ROW = "w4a8-row"
"""int4 weights in groups, activations rounded to int8 by row."""
W8A8_G32 = "w8a8-g32"
"""int8 weights by output channel or in groups, activations rounded to int8 in groups of 32."""
W4A8_G32 = "w4a8-g32"
"""int4 weights in groups, activations rounded to int8 in groups of 32."""
MXFP4A8_G32 = "mxfp4a8-g32"
"""mxfp4 weights, activations rounded to int8 in groups of 32."""
WEIGHT_ONLY = {
    "int8": "w8a16",
    "int4": "w4a16",
    "nf4": "w4a16-nf4",
    "fp8": "w8a16-fp8",
    "mxfp4": "w4a16-mxfp4",
}
"""Format of the weights → the name where activations aren't rounded to integers: they have 16 bits
on a GPU and 32 on a CPU.
"""
FLOATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Dtype of the weights → the name where neither is quantized."""

BF16_WEIGHTS = "bf16-weights"
"""bfloat16 weights, activations and results in float32."""

LEVELS = {W8A8_ROW: 127, W8A7_ROW: 63, W4A8_ROW: 127, W8A8_G32: 127, W4A8_G32: 127, MXFP4A8_G32: 127}
"""The largest code of activations, by the name without a rotation."""
GROUPS = {W8A8_G32: 32, W4A8_G32: 32, MXFP4A8_G32: 32}
"""Inputs of a row that are rounded together, by name; other names': the whole row."""

OUTLIERS = 2
"""Inputs of a row that aren't rounded, where groups of it are and its linear has all of the row."""

_ROTATED, _OUTLIERS = "-h", "-o"


def rotated_name(name: str, block: int) -> str:
    """Format the name of an arithmetic whose rows and weights are rotated by Hadamard blocks.

    Args:
        block: inputs of a block; 0: they aren't rotated.
    """
    return f"{name}{_ROTATED}{block}" if block else name


def outliers_name(name: str, count: int) -> str:
    """Format the name of an arithmetic in which `count` inputs of a row aren't rounded."""
    return f"{name}{_OUTLIERS}{count}" if count else name


@dataclass(frozen=True, slots=True)
class ActivationRounding:
    """Rounding of a row of activations, or of groups of its inputs, by the largest magnitude.

    Attributes:
        levels: the largest code.
        rotation: inputs of a Hadamard block by which the row is rotated before; 0: it isn't.
        group: inputs of a group; 0: the whole row is one.
        num_outliers: inputs of the row with the largest magnitudes, which aren't rounded.
    """

    levels: int
    rotation: int
    group: int = 0
    num_outliers: int = 0


def activation_rounding(name: str) -> ActivationRounding | None:
    """Parse how an arithmetic of this name rounds rows; None: to no integers."""
    rest, _, count = name.partition(_OUTLIERS)
    plain, _, block = rest.partition(_ROTATED)
    if plain not in LEVELS:
        return None
    return ActivationRounding(LEVELS[plain], int(block or 0), GROUPS.get(plain, 0), int(count or 0))


@dataclass(frozen=True, slots=True, order=True)
class Arithmetic:
    """Way in which a linear's products are computed.

    Attributes:
        name: ``w8a8-row``, ``w8a7-row``, ``w4a8-row``, ``w8a8-g32``, ``w4a8-g32``,
            ``mxfp4a8-g32``, ``w8a16``, ``w8a16-fp8``, ``w4a16``, ``w4a16-nf4``, ``w4a16-mxfp4``,
            ``fp32``, ``bf16``, ``bf16-weights`` or ``fp16``: equal names round equally. ``-h64``,
            ``-h32`` or ``-h16`` follows the first three where rows and weights are rotated by
            Hadamard blocks of that many inputs, and ``-o2`` those with groups where two inputs of a
            row aren't rounded.
        kernel: the library and its way, such as ``onednn-u8``, ``fbgemm``, ``numba-dot`` (int8 or
            int4 by int8), ``numba`` (codes decoded in registers) or ``widened`` (to float32, some
            channels at a time).
        instructions: the widest instruction set that the kernel may use here, such as
            ``avx512_vnni``, or a GPU's ``sm_90``.
    """

    name: str
    kernel: str
    instructions: str

    def __str__(self) -> str:
        return f"{self.name} ({self.kernel}, {self.instructions})"
