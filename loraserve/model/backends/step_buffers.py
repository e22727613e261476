"""Buffers of a step's rows between a CPU's kernels, and how they are rounded for linears."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve.model.backends.step_sizes import SMALLEST_GROUP
from loraserve.model.layers.linears import JoinedLinear, Linear, own_weight
from loraserve.model.layers.quantized_linears import G32Linear, Int8Linear
from loraserve_kernels.common.arithmetic import OUTLIERS
from loraserve_kernels.cpu.linear import g32_dot
from loraserve_kernels.cpu.linear.decoded import DotWeight, GroupDotWeight, code_offset


@dataclass(frozen=True, slots=True)
class RowRounding:
    """Form in which kernels read rows that are rounded to int8.

    Attributes:
        offset: what is added to the codes.
        is_wide: whether they are int16.
        group_size: inputs whose codes are summed too; 0: none are.
        rotation: inputs of a Hadamard block by which rows are rotated before; 0: they aren't.
        scale_group: inputs that share a scale, whose codes are summed too; 0: a row's do.
        num_outliers: inputs of a row with the largest magnitudes, whose codes are 0.
    """

    offset: int
    is_wide: bool
    group_size: int
    rotation: int
    scale_group: int = 0
    num_outliers: int = 0


@dataclass(slots=True, eq=False)
class InputRows:
    """Buffer of rows that linears read.

    Attributes:
        values: [capacity, width] float32.
        codes: [capacity, bytes] int8, the same rounded, for linears that take it so; filled up with
            zeros to what one instruction multiplies.
        scales: float32, of the codes: the first [capacity], or [capacity, groups].
        starts: [capacity, groups] float32, what int4's kernel multiplies the zero of each group
            with; as many groups as there may be.
        outliers: [capacity, outliers, 2] float32: number and value of what isn't rounded.
    """

    values: Tensor
    codes: Tensor
    scales: Tensor
    starts: Tensor
    outliers: Tensor

    @classmethod
    def make(cls, capacity: int, width: int) -> InputRows:
        from loraserve_kernels.cpu.linear.tiles.tile import DOT_INPUTS

        num_bytes = -(-width // DOT_INPUTS) * 4
        return cls(
            torch.zeros(capacity, width),
            torch.zeros(capacity, num_bytes, dtype=torch.int8),
            torch.ones(capacity, -(-width // SMALLEST_GROUP)),
            torch.zeros(capacity, -(-width // SMALLEST_GROUP)),
            torch.zeros(capacity, OUTLIERS, 2),
        )

    @property
    def width(self) -> int:
        return self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        parts = (self.values, self.codes, self.scales, self.starts, self.outliers)
        return sum(part.nbytes for part in parts)


@dataclass(slots=True, eq=False)
class OutputRows:
    """Buffer that linears write: [capacity, width] float32, the width filled up to whole tiles."""

    values: Tensor
    width: int

    @classmethod
    def make(cls, capacity: int, width: int) -> OutputRows:
        from loraserve_kernels.cpu.linear.tiles.tile import TILE

        # a joined linear's parts fill up their own channels, the last beyond the width
        return cls(torch.zeros(capacity, -(-width // TILE) * TILE + TILE), width)

    def rows(self, count: int) -> Tensor:
        return self.values[:count, : self.width]


def rounding_of(linear: Linear) -> RowRounding | None:
    """Find how a linear's kernels, or the first of its parts' that does, read rounded rows."""
    from loraserve_kernels.cpu.linear.tiles.tile import HAS_VNNI

    if isinstance(linear, JoinedLinear):
        return next((rounding for part in linear.parts if (rounding := rounding_of(part)) is not None), None)
    weight = own_weight(linear)
    if isinstance(linear, Int8Linear) and isinstance(weight, DotWeight):
        return RowRounding(code_offset(), not HAS_VNNI, 0, linear.rotation)
    if isinstance(weight, GroupDotWeight):
        return RowRounding(0, False, weight.group_size, weight.rotation)
    if isinstance(linear, G32Linear):
        return RowRounding(0, False, 0, 0, g32_dot.GROUP, linear.num_outliers)
    return None


def code_words(rows: InputRows, rounding: RowRounding | None) -> dict[int, int]:
    """Build the words that have a kernel round its rows."""
    from loraserve_kernels.cpu.linear import row_quantization as k

    if rounding is None:
        return {}
    return {
        k.CODES: rows.codes.data_ptr(),
        k.CODE_ROW_BYTES: rows.codes.stride(0),
        k.SCALES: rows.scales.data_ptr(),
        k.OFFSET: rounding.offset,
        k.IS_WIDE: int(rounding.is_wide),
        k.STARTS: rows.starts.data_ptr() if rounding.group_size or rounding.scale_group else 0,
        k.GROUP: rounding.group_size,
        k.ROTATION: rounding.rotation,
        k.SCALE_GROUP: rounding.scale_group,
        k.OUTLIERS: rows.outliers.data_ptr(),
        k.NUM_OUTLIERS: rounding.num_outliers,
    }
