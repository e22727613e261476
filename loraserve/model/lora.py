"""Linears that know where they stand, so that adapters can be added to what they compute."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from loraserve.model.quantize import Linear
from loraserve_kernels.launch import apply_lora
from loraserve_kernels.plan import LoraPlan, make_plan


@dataclass(frozen=True, slots=True)
class LoraLinear:
    """The linears of one site of one layer, fused: one product for the base, one launch for all adapters of the step.

    Attributes:
        base: the site's weights, its linears' outputs side by side.
        site: ``qkv``, ``o``, ``gate_up`` or ``down``.
    """

    base: Linear
    site: str
    layer: int

    def __call__(self, x: Tensor, lora: LoraPlan | None) -> Tensor:
        """Return the site's output [num_tokens, out_features] float32, in memory of its own; rows without an adapter are the base's, bit for bit."""
        y = self.base(x)
        if lora is not None:
            apply_lora(x, y, lora, self.site, self.layer)
        return y


def select_rows(lora: LoraPlan, rows: Sequence[int]) -> LoraPlan | None:
    """Return the plan of a step that goes on with these rows only, ascending; None when no adapter's row is among them."""
    segments = []
    for segment in lora.segments:
        start, end = bisect_left(rows, segment.row_start), bisect_left(rows, segment.row_end)
        if start < end:
            segments.append((segment.adapter, start, end))
    return make_plan(segments, len(rows))
