"""One site of one layer on the GPU's kernels, beside the reference in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from paged_pools import Fleet
from torch import Tensor

from loraserve_kernels import gpu_lora, reference
from loraserve_kernels.gpu_plan import GpuLoraPlan
from loraserve_kernels.layout import SITES


@dataclass
class Step:
    """x and y lie inside wider tensors full of NaN; base rows of x are NaN, since nothing may read them."""

    fleet: Fleet
    plan: GpuLoraPlan
    row_slots: list[int]
    x: Tensor
    y: Tensor
    right_of_y: Tensor
    before: Tensor
    site: str

    @property
    def is_base(self) -> Tensor:
        return torch.tensor(self.row_slots) == 0

    def run(self, layer: int = 1) -> Tensor:
        gpu_lora.apply_lora(self.x, self.y, self.plan, self.site, layer)
        return self.y

    def expected(self, layer: int = 1) -> Tensor:
        y = self.before.double()
        reference.apply_lora(self.x.double(), y, self.fleet.reference_plan(self.row_slots), self.site, layer)
        return y

    def is_right(self, layer: int = 1) -> bool:
        """Base rows keep every bit, and the others are within a rounding of the output (the interpreter truncates to bf16)."""
        y, expected = self.run(layer), self.expected(layer)
        tolerance = torch.finfo(y.dtype).eps * expected[~self.is_base].abs().max()
        error = (y.double() - expected)[~self.is_base].abs().max()
        bits_of_base_rows = [t[self.is_base].view(torch.int16) for t in (y, self.before)]
        return bool(error <= tolerance and torch.equal(*bits_of_base_rows) and self.right_of_y.isnan().all())


def make_step(fleet: Fleet, row_slots: Sequence[int], site: str, dtype: torch.dtype, *, block_m: int = 16) -> Step:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=128, max_work_items=400, block_m=block_m)
    plan.buffer.fill_(2**20)
    plan.scratch.fill_(float("nan"))
    plan.fill(np.array(row_slots, dtype=np.int32))
    in_features = fleet.shapes[SITES[site][0]][1]
    out_features = sum(fleet.shapes[module][0] for module in SITES[site])
    wide = [
        torch.full((len(row_slots), width + 24), float("nan"), dtype=dtype) for width in (in_features, out_features)
    ]
    x, y = wide[0][:, :in_features], wide[1][:, :out_features]
    x.copy_(torch.randn(x.shape))
    y.copy_(torch.randn(y.shape))
    x[torch.tensor(row_slots) == 0] = float("nan")
    return Step(fleet, plan, list(row_slots), x, y, wide[1][:, out_features:], y.clone(), site)
