"""A linear that rows of any adapter pass together: one base GEMM for all rows, then each row's own B·A."""

from __future__ import annotations

from torch import Tensor

from loraserve.model.quantize import Linear
from loraserve_kernels.launch import apply_lora
from loraserve_kernels.plan import LoraPlan


def lora_linear(linear: Linear, x: Tensor, plan: LoraPlan | None, site: str, layer: int) -> Tensor:
    """Return ``linear(x)`` plus, for rows that have an adapter, ``scaling · (x A^T) B^T``.

    Args:
        x: [num_tokens, in_features].
        plan: None when the whole step is the base's: no LoRA code runs then.
        site: which linears share the input: ``qkv``, ``o``, ``gate_up`` or ``down``.
    """
    y = linear(x)
    if plan is not None:
        apply_lora(x, y, plan, site, layer)
    return y
