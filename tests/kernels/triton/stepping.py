"""One site of one layer on the GPU's kernels, beside the reference in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from paged_pools import Fleet
from torch import Tensor

from loraserve_kernels import reference
from loraserve_kernels.cpu.lora.layout import LAYER_SITES, SITES
from loraserve_kernels.gpu.lora import apply as gpu_lora
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan


@dataclass
class Step:
    """x and y lie inside wider tensors full of NaN; base rows of x are NaN (token ids: nowhere),
    since nothing may read them.
    """

    fleet: Fleet
    plan: GpuLoraPlan
    row_slots: list[int]
    x: Tensor
    y: Tensor
    right_of_y: Tensor
    before: Tensor
    site: str
    bias: Tensor | None

    @property
    def is_base(self) -> Tensor:
        return torch.tensor(self.row_slots) == 0

    def run(self, layer: int = 1) -> Tensor:
        if self.site == "embed":
            gpu_lora.apply_embedding_lora(self.x, self.y, self.plan)
        else:
            layer = layer if self.site in LAYER_SITES else 0
            gpu_lora.apply_lora(self.x, self.y, self.plan, self.site, layer, self.bias)
        return self.y

    def expected(self, layer: int = 1) -> Tensor:
        y, plan = self.before.double(), self.fleet.reference_plan(self.row_slots)
        if self.site == "embed":
            reference.apply_embedding_lora(self.x.clamp(min=0), y, plan)
        else:
            layer = layer if self.site in LAYER_SITES else 0
            reference.apply_lora(self.x.double(), y, plan, self.site, layer, self.bias)
        return y

    def is_right(self, layer: int = 1) -> bool:
        """Base rows keep every bit, and the others are within a rounding of what is stored (the
        interpreter truncates to bf16).
        """
        y, expected = self.run(layer), self.expected(layer)
        # a float32 y holds what was summed exactly; the sums of a row's ranks were rounded, and
        # lost what a bf16 or fp16 holds
        tolerance = torch.finfo(self.fleet.dtype).eps * expected[~self.is_base].abs().max()
        error = (y.double() - expected)[~self.is_base].abs().max()
        bits_of_base_rows = [t[self.is_base].view(torch.int16) for t in (y, self.before)]
        return bool(error <= tolerance and torch.equal(*bits_of_base_rows) and self.right_of_y.isnan().all())


def make_step(
    fleet: Fleet,
    row_slots: Sequence[int],
    site: str,
    *,
    y_dtype: torch.dtype | None = None,
    block_m: int = 16,
    has_bias: bool = False,
) -> Step:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=128, max_work_items=400, block_m=block_m)
    plan.buffer.fill_(2**20)
    plan.scratch.fill_(float("nan"))
    plan.fill(np.array(row_slots, dtype=np.int32))
    in_features = fleet.shapes[SITES[site][0]][1]
    out_features = sum(fleet.shapes[module][0] for module in SITES[site])
    wide_y = torch.full((len(row_slots), out_features + 24), float("nan"), dtype=y_dtype or fleet.dtype)
    y = wide_y[:, :out_features]
    y.copy_(torch.randn(y.shape))
    is_base = torch.tensor(row_slots) == 0
    if site == "embed":
        # an address far outside, were it read
        x = torch.randint(in_features, (len(row_slots),)).masked_fill(is_base, -(2**40))
    else:
        x = torch.full((len(row_slots), in_features + 24), float("nan"), dtype=fleet.dtype)[:, :in_features]
        x.copy_(torch.randn(x.shape))
        x[is_base] = float("nan")
    bias = torch.randn(out_features).to(fleet.dtype) * 3 if has_bias else None
    return Step(fleet, plan, list(row_slots), x, y, wide_y[:, out_features:], y.clone(), site, bias)
