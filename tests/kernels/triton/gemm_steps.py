"""One linear of one layer with LoRA, by the kernel that does both at once, beside the reference in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from paged_pools import Fleet
from torch import Tensor

from loraserve_kernels import reference
from loraserve_kernels.common.quantized import QuantizedWeight, quantize
from loraserve_kernels.cpu.lora.layout import SITES
from loraserve_kernels.gpu.gemm import gemm as gpu_gemm
from loraserve_kernels.gpu.lora import apply as gpu_lora
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan

LAYER = 1


@dataclass
class LoraStep:
    fleet: Fleet
    plan: GpuLoraPlan
    row_slots: list[int]
    site: str
    x: Tensor
    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    # whether the last run was shrink and one launch
    is_fused: bool = False

    @property
    def is_base(self) -> Tensor:
        return torch.tensor(self.row_slots) == 0

    def run(self) -> Tensor:
        """New memory and the plan's scratch memory are NaN."""
        self.plan.scratch.fill_(float("nan"))
        self.is_fused = True
        empty, apply_lora = torch.empty, gpu_lora.apply_lora

        def apply(*args: Any) -> None:
            self.is_fused = False
            apply_lora(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu_gemm, "apply_lora", apply)
            patch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
            return gpu_gemm.weight_only_linear_lora(self.x, self.weight, self.bias, self.plan, self.site, LAYER)

    def two_steps(self) -> Tensor:
        y = gpu_gemm.weight_only_linear(self.x, self.weight, self.bias)
        gpu_lora.apply_lora(self.x, y, self.plan, self.site, LAYER, self.bias)
        return y

    def is_right(self, *, roundings: float = 1) -> bool:
        """Base rows have the linear's bits, and all rows are within so many roundings of the output (the interpreter truncates to bf16)."""
        y = self.run()
        exact = self.weight.double() if isinstance(self.weight, Tensor) else self.weight.dequantize(torch.float64)
        right = self.x.double() @ exact.T + (0 if self.bias is None else self.bias.double())
        reference.apply_lora(
            self.x.double(), right, self.fleet.reference_plan(self.row_slots), self.site, LAYER, self.bias
        )
        linear = gpu_gemm.weight_only_linear(self.x, self.weight, self.bias)
        bits = [t[self.is_base].view(torch.int16) for t in (y, linear)]
        error = (y.double() - right).abs().max()
        return bool(error <= roundings * torch.finfo(y.dtype).eps * right.abs().max() and torch.equal(*bits))


def make_lora_step(
    fleet: Fleet, row_slots: Sequence[int], site: str, format: str, *, block_m: int = 16, has_bias: bool = False
) -> LoraStep:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=128, max_work_items=400, block_m=block_m)
    plan.buffer.fill_(2**20)
    plan.fill(np.array(row_slots, dtype=np.int32))
    in_features = fleet.shapes[SITES[site][0]][1]
    out_features = sum(fleet.shapes[module][0] for module in SITES[site])
    weight = torch.randn(out_features, in_features) / in_features**0.5
    # "int8-64": in groups
    name, _, group_size = format.partition("-")
    return LoraStep(
        fleet,
        plan,
        list(row_slots),
        site,
        torch.randn(len(row_slots), in_features).to(fleet.dtype),
        weight.to(fleet.dtype)
        if format == "plain"
        else quantize(weight, name, int(group_size) if group_size else None),
        torch.randn(out_features).to(fleet.dtype) if has_bias else None,
    )
