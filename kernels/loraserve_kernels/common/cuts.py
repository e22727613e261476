"""Parts of an adapter, for a base of which several processes have a part each.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from loraserve_kernels.common.sites import EXPERT_INDEX, LAYER_MODULES


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


@dataclass(frozen=True, slots=True)
class PartCut:
    """Layers of an adapter that a part has, and its part of each module.

    Attributes:
        layers: range of the base's; the part counts its own from 0.
        modules: module → what the part has of it. It has nothing of a module that isn't here.
        has_last_norm: whether it has the norm before the head.
    """

    layers: tuple[int, int]
    modules: Mapping[str, ModuleCut]
    has_last_norm: bool = True

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]

    def module_layer(self, layer: int, module: str) -> int | None:
        """Look up the part's layer of a module; None where the part hasn't it.

        The head and the embedding, which belong to no layer, stand in the first one.
        """
        if module not in self.modules:
            return None
        return self._layer(layer) if module in LAYER_MODULES or module in EXPERT_INDEX else 0

    def norm_layer(self, layer: int, norm: str) -> int | None:
        """Look up the part's layer of a norm; None where the part hasn't it."""
        if norm == "norm":
            return 0 if self.has_last_norm else None
        return self._layer(layer)

    def _layer(self, layer: int) -> int | None:
        first, last = self.layers
        return layer - first if first <= layer < last else None
