"""Linears with their site and layer, so that adapters can be added to what they compute."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loraserve.model.layers.linears import Linear
from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan
from loraserve_kernels.ops import apply_lora


@dataclass(frozen=True, slots=True)
class LoraLinear:
    """The linears of one site, fused.

    There is one product for the base, and one launch for all adapters of the step.

    Attributes:
        base: the site's weights, its linears' outputs side by side.
        site: ``qkv``, ``o``, ``gate_up``, ``down`` or ``lm_head``.
        layer: 0 for ``lm_head``.
    """

    base: Linear
    site: str
    layer: int

    def __call__(self, x: Tensor, lora: LoraPlan | GpuLoraPlan | None) -> Tensor:
        """Compute the site's output [num_tokens, out_features], in memory of its own.

        It has x's dtype; rows without an adapter are the base's, bit for bit.
        """
        y = self.base(x)
        if lora is not None:
            apply_lora(x, y, lora, self.site, self.layer, self.base.bias)
        return y
