"""The reference says what is right; here it is held against PEFT, which trains the adapters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loraserve_kernels import reference
from loraserve_kernels.common.plan import LoraPlan, make_plan
from loraserve_kernels.cpu.lora.layout import LoraModule, pack_adapter

peft = pytest.importorskip("peft")

SHAPES = {"o_proj": (24, 40), "lm_head": (90, 40), "embed_tokens": (40, 90)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(90, 40)
        self.o_proj = nn.Linear(40, 24)
        self.lm_head = nn.Linear(40, 90, bias=False)


def adapted(name: str, *, use_dora: bool) -> tuple[Any, LoraPlan]:
    """PEFT's layer in float64, and the plan of five rows,
    the last three of which have its adapter.
    """
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=[name], use_dora=use_dora, init_lora_weights=False)
    layer = getattr(peft.get_peft_model(Model(), config).base_model.model, name).double()
    weight = layer.base_layer.weight
    if name == "embed_tokens":
        a, b, weight = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"], weight.T
    else:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    delta = None
    if use_dora:
        magnitude = layer.lora_magnitude_vector["default"].weight
        with torch.no_grad():
            magnitude.mul_(torch.rand_like(magnitude) + 0.5)
        delta = (magnitude / (weight + 1.5 * b @ a).norm(dim=1) - 1).detach()
    module = LoraModule(0, name, a.detach(), b.detach(), 1.5, delta)
    packed = pack_adapter([module], num_layers=1, module_shapes=SHAPES, dtype=torch.float32)
    plan = make_plan([(packed, 2, 5)], 5)
    assert plan is not None
    return layer, plan


def assert_equal(y: Tensor, expected: Tensor, base: Tensor) -> None:
    assert torch.equal(y[:2], base[:2])
    # weights are packed in float32
    assert torch.allclose(y[2:], expected[2:], atol=1e-6)
    assert not torch.allclose(y[2:], base[2:], atol=1e-2)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("name", ["o_proj", "lm_head"])
@torch.no_grad()
def test_the_reference_of_linears_equals_peft(name: str, use_dora: bool) -> None:
    layer, plan = adapted(name, use_dora=use_dora)
    x = torch.randn(5, 40, dtype=torch.float64)
    base = layer.base_layer(x)
    y = base.clone()
    if name == "o_proj":
        reference.apply_lora(x, y, plan, "o", 0, layer.base_layer.bias)
    else:
        reference.apply_lora(x, y, plan, "lm_head", 0)
    assert_equal(y, layer(x), base)


@pytest.mark.parametrize("use_dora", [False, True])
@torch.no_grad()
def test_the_reference_of_the_embedding_equals_peft(use_dora: bool) -> None:
    layer, plan = adapted("embed_tokens", use_dora=use_dora)
    token_ids = torch.tensor([3, 3, 89, 0, 17])
    base = layer.base_layer(token_ids)
    y = base.clone()
    reference.apply_embedding_lora(token_ids, y, plan)
    assert_equal(y, layer(token_ids), base)
