"""Parts of an adapter's modules, for a base whose linears are cut into parts.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Axis(Enum):
    OUT = "outputs: a column-parallel linear"
    IN = "inputs: a row-parallel linear, whose parts' outputs are summed"


@dataclass(frozen=True, slots=True)
class ModuleCut:
    """Range of a linear's features along one axis.

    Attributes:
        start, end: the range.
        width: features that the part has; past the range they are zero.
        has_bias: whether the part adds the bias: of parts that are summed one alone does.
    """

    axis: Axis
    start: int
    end: int
    width: int
    has_bias: bool = True
