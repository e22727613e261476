"""A layer's MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from loraserve.model.layers.lora_linear import LoraLinear
from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan


class Mlp(Protocol):
    """Part of a layer behind its attention."""

    def __call__(self, x: Tensor, lora: LoraPlan | GpuLoraPlan | None, /) -> Tensor:
        """Compute the normed rows' outputs [num_tokens, hidden_size], in memory of their own."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """``down(activation(gate) * up)``.

    Attributes:
        gated: the backend's product of the two.
    """

    gate_up: LoraLinear
    down: LoraLinear
    gated: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, lora: LoraPlan | GpuLoraPlan | None, /) -> Tensor:
        return self.down(self.gated(self.gate_up(x, lora)), lora)
