"""Steps for the tests of LoRA on a CPU, the paths that they compare and the comparison."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loraserve_kernels import ops, reference
from loraserve_kernels.common.plan import LoraPlan, make_plan
from loraserve_kernels.cpu.lora import apply as cpu_lora
from loraserve_kernels.cpu.lora.layout import LAYER_SITES, SITES, PackedAdapter

from .conftest import SHAPES

Apply = Callable[..., None]


def entry(linear: Callable[..., None], embedding: Callable[[Tensor, Tensor, LoraPlan], None]) -> Apply:
    """Both entries of a path as one: x is token ids at the embedding."""

    def apply(x: Tensor, y: Tensor, plan: LoraPlan, site: str, layer: int, bias: Tensor | None = None) -> None:
        if site == "embed":
            embedding(x, y, plan)
        else:
            linear(x, y, plan, site, layer, bias)

    return apply


launched = entry(ops.apply_lora, ops.apply_embedding_lora)
expected_by = entry(reference.apply_lora, reference.apply_embedding_lora)
PATHS = [
    pytest.param(entry(cpu_lora.apply_lora_torch, cpu_lora.apply_embedding_lora_torch), id="torch"),
    pytest.param(launched, id="numba", marks=pytest.mark.skipif(not cpu_lora.HAS_NUMBA, reason="needs numba")),
]
# float32 sums of up to 2100 products, next to outputs of about 1
TOLERANCE = 2e-6


def make_step(adapters: list[PackedAdapter | None], rows: list[int]) -> LoraPlan:
    segments, start = [], 0
    for adapter, count in zip(adapters, rows, strict=True):
        if adapter is not None:
            segments.append((adapter, start, start + count))
        start += count
    plan = make_plan(segments, start)
    assert plan is not None
    return plan


def make_io(num_tokens: int, site: str) -> tuple[Tensor, Tensor]:
    modules = SITES[site]
    width, y = SHAPES[modules[0]][1], torch.randn(num_tokens, sum(SHAPES[m][0] for m in modules))
    return torch.randint(width, (num_tokens,)) if site == "embed" else torch.randn(num_tokens, width), y


def assert_equals_reference(apply: Apply, plan: LoraPlan, site: str, layer: int, *, bias: Tensor | None = None) -> None:
    x, y = make_io(plan.num_tokens, site)
    expected = y.double()
    layer = layer if site in LAYER_SITES else 0
    expected_by(x if site == "embed" else x.double(), expected, plan, site, layer, bias)
    apply(x, y, plan, site, layer, bias)
    assert (y - expected).abs().max() / expected.abs().max() < TOLERANCE
