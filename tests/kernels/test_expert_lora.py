"""LoRA on a mixture's experts: each expert's rows are changed by their own adapters, as the formula
says, in every dtype, with numba and without; what an adapter leaves alone takes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loraserve_kernels.common.modules import ReplacedRows
from loraserve_kernels.common.plan import make_plan
from loraserve_kernels.cpu.lora import apply
from loraserve_kernels.cpu.lora.experts import LayerExperts, apply_expert_lora_torch
from loraserve_kernels.cpu.lora.layout import LoraModule, PackedAdapter, pack_adapter, packed_num_bytes
from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.ops import apply_expert_lora

NUM_LAYERS = 2
SHAPES = {
    "q_proj": (24, 36),
    "experts.gate_proj": (20, 36),
    "experts.up_proj": (20, 36),
    "experts.down_proj": (36, 20),
    "router": (4, 36),
}
RANKS = (1, 8, 12, 64)


def make_module(layer: int, module: str, expert: int, rank: int, **more: Any) -> LoraModule:
    generator = torch.Generator().manual_seed(layer * 100 + expert * 10 + rank)
    out_features, in_features = SHAPES[module]
    a, b = (torch.randn(*shape, generator=generator) for shape in ((rank, in_features), (out_features, rank)))
    return LoraModule(layer, module, a, b, 0.5, expert=expert, **more)


def pack(modules: list[LoraModule], dtype: torch.dtype = torch.float32) -> PackedAdapter:
    packed = pack_adapter(modules, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=dtype)
    expected = packed_num_bytes(modules, num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=dtype)
    assert packed.num_bytes == expected
    return packed


def held(adapter: PackedAdapter, layer: int, module: str, expert: int) -> Tensor:
    """Return what a module's update is, of the numbers that the adapter holds."""
    a, b = (view.double() for view in (adapter.lora_a(layer, module, expert), adapter.lora_b(layer, module, expert)))
    return b.T @ (adapter.scaling(layer, module, expert).double()[:, None] * a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("has_numba", [True, False])
def test_rows_of_expert_get_matching_adapters(
    dtype: torch.dtype, has_numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "HAS_NUMBA", has_numba and apply.HAS_NUMBA)
    shift, delta = torch.linspace(-1, 1, 20), torch.linspace(0, 0.5, 20)
    adapters = [
        pack(
            [
                make_module(1, "experts.gate_proj", expert, rank, bias_delta=shift, dora_delta=delta),
                make_module(1, "experts.up_proj", expert, 3),
                make_module(0, "experts.up_proj", expert, 2),
                make_module(1, "q_proj", 0, 5),
            ],
            dtype,
        )
        for expert, rank in zip((2, 2, 1, 2), RANKS, strict=True)
    ]
    bounds = [(0, 5), (7, 8), (8, 20), (20, 63)]
    plan = make_plan([(adapter, *span) for adapter, span in zip(adapters, bounds, strict=True)], 70)
    assert plan is not None
    assert plan.has_experts
    rows = torch.arange(70)[torch.rand(70, generator=torch.Generator().manual_seed(1)) < 0.6]
    x = torch.randn(len(rows), 36, generator=torch.Generator().manual_seed(2))
    before = torch.randn(len(rows), 40, generator=torch.Generator().manual_seed(3))
    y = before.clone()
    apply_expert_lora(x, y, LayerExperts(plan, 1).segments(2, rows.numpy()), "experts.gate_up")
    expected = before.double()
    for adapter, (start, end) in zip(adapters, bounds, strict=True):
        mine = (rows >= start) & (rows < end)
        gate, up = held(adapter, 1, "experts.gate_proj", 2), held(adapter, 1, "experts.up_proj", 2)
        if adapter is adapters[2]:
            assert not gate.any()
            continue
        expected[mine, :20] = (expected[mine, :20] + x[mine].double() @ gate.T) * (1 + delta.double()) + shift
        expected[mine, 20:] += x[mine].double() @ up.T
    torch.testing.assert_close(y.double(), expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    of_others = ~((rows < 5) | (rows == 7) | ((rows >= 20) & (rows < 63)))
    assert torch.equal(y[of_others], before[of_others])


def test_bits_of_a_row_are_the_same_alone() -> None:
    adapters = [pack([make_module(0, "experts.down_proj", 3, rank)]) for rank in RANKS]
    plan = make_plan([(adapter, 9 * i, 9 * i + 9) for i, adapter in enumerate(adapters)], 36)
    assert plan is not None
    x, y = torch.randn(36, 20), torch.zeros(36, 36)
    apply_expert_lora(x, y, LayerExperts(plan, 0).segments(3, np.arange(36)), "experts.down")
    for row in range(36):
        one = make_plan([(adapters[row // 9], 0, 1)], 1)
        assert one is not None
        alone = torch.zeros(1, 36)
        apply_expert_lora(x[row : row + 1], alone, LayerExperts(one, 0).segments(3, np.arange(1)), "experts.down")
        assert torch.equal(alone[0], y[row])
    again = torch.zeros(36, 36)
    apply_expert_lora_torch(x, again, LayerExperts(plan, 0).segments(3, np.arange(36)), "experts.down")
    torch.testing.assert_close(again, y, atol=1e-4, rtol=1e-5)


def test_layer_without_changed_experts_has_no_segments() -> None:
    plan = make_plan([(pack([make_module(1, "router", 0, 2)]), 0, 3)], 4)
    assert plan is not None
    assert not LayerExperts(plan, 0)
    [segment] = LayerExperts(plan, 1).segments()
    assert (segment.row_start, segment.row_end) == (0, 3)
    assert not LayerExperts(plan, 1).segments(1)
    plain = make_plan([(pack([make_module(1, "q_proj", 0, 2)]), 0, 3)], 4)
    assert plain is not None
    assert not plain.has_experts


REFUSED = {
    "of expert 4; this base has 0 to 3": [make_module(0, "experts.up_proj", 4, 1)],
    "given twice": [make_module(0, "experts.up_proj", 3, 1), make_module(0, "experts.up_proj", 3, 2)],
    "layers 0 to 1": [make_module(2, "experts.up_proj", 3, 1)],
    "takes": [LoraModule(0, "experts.up_proj", torch.zeros(1, 35), torch.zeros(20, 1), 1.0)],
    "experts don't": [
        make_module(
            0, "experts.up_proj", 1, 1, row_overrides=ReplacedRows(torch.zeros(1, dtype=torch.int32), torch.ones(1, 36))
        )
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_misfit_module_is_refused(message: str) -> None:
    with pytest.raises(TensorMismatch, match=message):
        pack_adapter(REFUSED[message], num_layers=NUM_LAYERS, module_shapes=SHAPES, dtype=torch.float32)


def test_rows_of_wrong_width_are_refused() -> None:
    plan = make_plan([(pack([make_module(1, "router", 0, 2)]), 0, 3)], 3)
    assert plan is not None
    segments = LayerExperts(plan, 1).segments()
    with pytest.raises(TensorMismatch, match="site router of these segments takes"):
        apply_expert_lora(torch.zeros(3, 36), torch.zeros(3, 5), segments, "router")
    with pytest.raises(TensorMismatch, match="site router of these segments takes"):
        apply_expert_lora(torch.zeros(2, 36), torch.zeros(2, 4), segments, "router")
