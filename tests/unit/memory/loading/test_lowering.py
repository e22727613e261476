"""What an adapter has in the place of what is the base's becomes what kernels add to it; checked
against the IR's own formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loraserve.adapters.ir import AdapterIR, ModuleIR, NormIR, TensorView
from loraserve.errors import InvariantViolation
from loraserve.memory.loading.base_weights import dora_delta
from loraserve.memory.loading.lowering import lower
from loraserve_kernels.cpu.lora.layout import LoraModule

OUT, IN = 32, 32


class Weights:
    """A base of random weights, in blocks of five rows; q_proj has a bias, v_proj has none."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.matrix = torch.randn(OUT, IN, generator=generator)
        self.vector = torch.randn(OUT, generator=generator)

    def weight_rows(self, layer: int, module: str) -> Iterator[Tensor]:
        yield from self.matrix.split(5)

    def bias(self, layer: int, module: str) -> Tensor | None:
        return self.vector if module == "q_proj" else None


class Untouched(Weights):
    """A base that nobody may ask for anything."""

    def __init__(self) -> None:
        pass

    @property
    def device(self) -> torch.device:
        raise AssertionError("the base was asked for its device")


def view(tensor: Tensor) -> TensorView:
    if tensor.dtype == torch.bfloat16:
        return TensorView("BF16", tuple(tensor.shape), tensor.view(torch.int16).numpy().view(np.uint16))
    return TensorView("F32" if tensor.dtype == torch.float32 else "F16", tuple(tensor.shape), tensor.numpy())


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_ir(m: ModuleIR, x: Tensor, weights: Weights) -> Tensor:
    """The formula of `ModuleIR`."""
    t = {name: torch.from_numpy(np.array(tensor.array)) for name, tensor in m.tensors.items()}
    weight = t.get("weight", weights.matrix)
    bias = t.get("bias", weights.bias(m.layer, m.module))
    update = m.scaling * t["lora_b"] @ t["lora_a"] if "lora_a" in t else torch.zeros_like(weight)
    y = x @ (weight + update).T
    if "magnitude" in t:
        y = y * t["magnitude"] / (weight + update).norm(dim=1)
    for added in (bias, m.scaling * t["lora_bias"] if "lora_bias" in t else None):
        y = y if added is None else y + added
    return y * t["output_scale"] if "output_scale" in t else y


def by_kernels(m: LoraModule | None, module: str, x: Tensor, weights: Weights, magnitude: Tensor | None) -> Tensor:
    """The formula of `LoraModule`."""
    bias = weights.bias(0, module)
    base_bias = torch.zeros(OUT) if bias is None else bias
    if m is None:
        return x @ weights.matrix.T + base_bias
    weight = weights.matrix.clone()
    if m.row_overrides is not None:
        weight[m.row_overrides.ids.long()] = m.row_overrides.weight.float()
    delta = m.dora_delta if magnitude is None else dora_delta(m, magnitude, weights)
    y = (x @ weight.T + x @ m.lora_a.T * m.scaling @ m.lora_b.T) * (1 if delta is None else 1 + delta)
    return y + base_bias + (0 if m.bias_delta is None else m.bias_delta)


LORA = {"rank": 3, "scaling": 0.7, "lora_a": view(randn(3, IN)), "lora_b": view(randn(OUT, 3))}
VECTOR = {
    name: view(randn(OUT, seed=seed)) for seed, name in enumerate(("magnitude", "lora_bias", "bias", "output_scale"))
}
KINDS: dict[str, dict[str, Any]] = {
    "trained bias": {"bias": VECTOR["bias"]},
    "lora and both biases": {**LORA, "bias": VECTOR["bias"], "lora_bias": VECTOR["lora_bias"]},
    "lora_bias alone": {**LORA, "lora_bias": VECTOR["lora_bias"]},
    "ia3": {"output_scale": VECTOR["output_scale"]},
    "all that may be scaled": {**LORA, **VECTOR},
    "dora with a trained bias": {**LORA, "magnitude": VECTOR["magnitude"], "bias": VECTOR["bias"]},
    "trained weight": {"weight": view(randn(OUT, IN, seed=9)), "bias": VECTOR["bias"]},
}  # fmt: skip


@pytest.mark.parametrize("module", ["q_proj", "v_proj"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_lowered_kind_matches_formula(make: Any, kind: str, module: str) -> None:
    weights, x = Weights(), randn(4, IN, seed=5)
    base = make.base_of({"q_proj": (OUT, IN), "v_proj": (OUT, IN)})
    ir = ModuleIR(0, module, **KINDS[kind])
    lowered = lower(AdapterIR((ir,), "F32"), base, weights)
    magnitude = lowered.magnitudes.get((0, module, 0))
    got = by_kernels(next(iter(lowered.modules), None), module, x, weights, magnitude)
    torch.testing.assert_close(got, by_ir(ir, x, weights), atol=1e-5, rtol=1e-5)


def test_output_scale_without_bias_adds_no_shift(make: Any) -> None:
    base = make.base_of({"v_proj": (OUT, IN)})
    ir = AdapterIR((ModuleIR(0, "v_proj", output_scale=VECTOR["output_scale"]),), "F32")
    (m,) = lower(ir, base, Weights()).modules
    assert m.bias_delta is None
    assert m.lora_a.shape == (0, IN)
    assert m.lora_b.shape == (OUT, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_changed_rows_of_trained_weight_are_kept(make: Any, dtype: torch.dtype) -> None:
    weights = Weights()
    weights.matrix = weights.matrix.to(dtype).float()
    trained = weights.matrix.to(dtype, copy=True)
    trained[[4, 31]] *= 2
    trained[5, 7] += 1
    base = make.base_of({"q_proj": (OUT, IN)})
    (m,) = lower(AdapterIR((ModuleIR(1, "q_proj", weight=view(trained)),), "F32"), base, weights).modules
    assert m.row_overrides is not None
    assert m.row_overrides.ids.dtype == torch.int32
    assert m.row_overrides.ids.tolist() == [4, 5, 31]
    assert torch.equal(m.row_overrides.weight, trained[[4, 5, 31]])


def test_trained_weight_equal_to_base_costs_no_memory(make: Any) -> None:
    weights = Weights()
    base = make.base_of({"q_proj": (OUT, IN)})
    modules = (ModuleIR(0, "q_proj", weight=view(weights.matrix)), ModuleIR(1, "q_proj", **LORA))
    assert [m.layer for m in lower(AdapterIR(modules, "F32"), base, weights).modules] == [1]


def test_trained_weight_rounded_unlike_base_is_kept(make: Any) -> None:
    weights = Weights()
    base = make.base_of({"q_proj": (OUT, IN)})
    ir = AdapterIR((ModuleIR(0, "q_proj", weight=view(weights.matrix.half())),), "F16")
    (m,) = lower(ir, base, weights).modules
    assert m.row_overrides is not None
    assert m.row_overrides.ids.shape[0] == OUT


def test_token_rows_are_kept_exactly(make: Any) -> None:
    base = make.base_of({"embed_tokens": (IN, 64)})
    rows = randn(2, IN)
    ir = AdapterIR((ModuleIR(0, "embed_tokens", token_ids=(7, 63), token_rows=view(rows)),), "F32")
    (m,) = lower(ir, base, Untouched()).modules
    assert m.row_overrides is not None
    assert m.row_overrides.ids.tolist() == [7, 63]
    assert torch.equal(m.row_overrides.weight, rows)
    assert m.lora_a.shape == (0, 64)


def test_a_norms_weight_has_the_bases_offset_added(make: Any) -> None:
    base = make.base_of({"q_proj": (OUT, IN)}, norm_offset=1.0)
    (norm,) = lower(AdapterIR((), "F32", norms=(NormIR(1, "mlp_norm", view(randn(IN).half())),)), base, None).norms
    assert (norm.layer, norm.norm) == (1, "mlp_norm")
    torch.testing.assert_close(norm.weight, randn(IN).half().float() + 1)


def test_lowering_needs_base_weights_where_used(make: Any) -> None:
    base = make.base_of({"q_proj": (OUT, IN)})
    for field in ({"bias": VECTOR["bias"]}, {"weight": view(randn(OUT, IN))}, {"output_scale": VECTOR["bias"]}):
        with pytest.raises(InvariantViolation, match="needs the base's weights"):
            lower(AdapterIR((ModuleIR(0, "q_proj", **field),), "F32"), base, None)
