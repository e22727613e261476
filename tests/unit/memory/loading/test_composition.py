"""A weighted sum of adapters: their updates and biases add up, the base counts once, and what
doesn't add up is refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load, save

from adapters_store import LocalStore
from loraserve.adapters.composition import composition_digest
from loraserve.errors import AdapterCorrupt, InvalidRequest
from loraserve.memory.loading.composition import Composer
from loraserve.memory.loading.load import load_adapter
from loraserve.memory.loading.lowering import LoweredAdapter
from loraserve.types import AdapterPart, AdapterRef
from loraserve_kernels.cpu.lora.layout import LoraModule, ReplacedNorm, ReplacedRows


def composition(*parts: tuple[AdapterRef, float]) -> AdapterRef:
    terms = tuple(AdapterPart(adapter=ref, weight=weight) for ref, weight in parts)
    first = parts[0][0]
    return msgspec.structs.replace(
        first, name="sum", digest=composition_digest(terms), config_blob="", weights_blob="", parts=terms
    )


def updates(packed: Any, module: str = "q_proj") -> list[torch.Tensor]:
    return [
        packed.lora_b(layer, module).T.float() * packed.scaling(layer, module) @ packed.lora_a(layer, module).float()
        for layer in range(2)
    ]


def test_sum_update_equals_weighted_part_updates(make: Any, store: LocalStore) -> None:
    a = make.publish(store, rank=3, seed=1)
    b = make.publish(store, rank=5, seed=2, use_rslora=True, dtype=torch.bfloat16)
    packed = load_adapter(store, composition((a, 0.75), (b, -2.0)), make.base, make.cpu).host
    assert packed.max_rank == 8
    assert packed.data.dtype == torch.float32
    of_a, of_b = (updates(load_adapter(store, ref, make.base, make.cpu).host) for ref in (a, b))
    for got, first, second in zip(updates(packed), of_a, of_b, strict=True):
        torch.testing.assert_close(got, 0.75 * first - 2 * second, atol=1e-4, rtol=1e-5)


def test_parts_with_equal_dtype_keep_dtype(make: Any, store: LocalStore) -> None:
    refs = [make.publish(store, rank=3, seed=seed, dtype=torch.bfloat16) for seed in range(2)]
    packed = load_adapter(store, composition(*((ref, 1.0) for ref in refs)), make.base, make.cpu).host
    assert packed.data.dtype == torch.bfloat16


def test_parts_with_mixed_dtypes_use_wider_dtype(make: Any) -> None:
    composer = Composer()
    for dtype in (torch.bfloat16, torch.float16):
        composer.add(part(make), LoweredAdapter((module(),), (), dtype, {}))
    assert composer.compose().stored is torch.float32


def test_the_order_of_the_parts_changes_no_bit(make: Any, store: LocalStore) -> None:
    a, b = (make.publish(store, rank=3, seed=seed) for seed in range(2))
    first, second = composition((a, 0.1), (b, 0.5), (a, 0.2)), composition((a, 0.2), (a, 0.1), (b, 0.5))
    assert first.digest == second.digest
    one, other = (load_adapter(store, ref, make.base, make.cpu).host for ref in (first, second))
    assert torch.equal(one.data, other.data)
    assert torch.equal(one.floats, other.floats)
    assert one.max_rank == 6


def test_a_damaged_part_is_found(make: Any, store: LocalStore) -> None:
    a, b = (make.publish(store, rank=3, seed=seed) for seed in range(2))
    make.damage(store, b.weights_blob)
    with pytest.raises(AdapterCorrupt):
        load_adapter(store, composition((a, 0.5), (b, 0.5)), make.base, make.cpu)


def part(make: Any, weight: float = 1.0) -> AdapterPart:
    return AdapterPart(
        adapter=AdapterRef(
            tenant="t", name="secret", version=1, digest=make.digest("a"), config_blob="", weights_blob=""
        ),
        weight=weight,
    )


def lowered(*modules: LoraModule, **fields: Any) -> LoweredAdapter:
    return LoweredAdapter(modules, fields.pop("norms", ()), torch.float32, fields.pop("magnitudes", {}), **fields)


def module(rank: int = 2, **fields: Any) -> LoraModule:
    return LoraModule(1, "q_proj", torch.ones(rank, 32), torch.ones(32, rank), fields.pop("scaling", 2.0), **fields)


def test_shifts_add_up_by_weight(make: Any) -> None:
    composer = Composer()
    for weight, shift in ((0.5, torch.arange(32.0)), (3.0, None), (-2.0, torch.ones(32))):
        composer.add(part(make, weight), lowered(module(bias_delta=shift)))
    (m,) = composer.compose().modules
    assert m.bias_delta is not None
    torch.testing.assert_close(m.bias_delta, 0.5 * torch.arange(32.0) - 2)
    assert torch.as_tensor(m.scaling).tolist() == [1.0, 1.0, 6.0, 6.0, -4.0, -4.0]


ROWS = ReplacedRows(torch.arange(2, dtype=torch.int32), torch.ones(2, 32))
WRONG: dict[str, LoweredAdapter] = {
    "DoRA": lowered(module(dora_delta=torch.ones(32)), magnitudes={(1, "q_proj", 0): torch.ones(32)}),
    "IA3": lowered(module(dora_delta=torch.ones(32))),
    "trained weight": lowered(module(row_overrides=ROWS)),
    "trained norm": lowered(module(), norms=(ReplacedNorm(0, "mlp_norm", torch.ones(32)),)),
    "aLoRA": lowered(module(), invocation_token_ids=(5,)),
}


@pytest.mark.parametrize("what", WRONG)
def test_incompatible_parts_are_refused_without_adapter_details(make: Any, what: str) -> None:
    composer = Composer()
    composer.add(part(make), lowered(module()))
    with pytest.raises(InvalidRequest, match=what) as caught:
        composer.add(part(make), WRONG[what])
    assert caught.value.param == "model"
    assert part(make).adapter.digest[:12] in str(caught.value)
    assert "secret" not in str(caught.value)


def test_excessive_rank_total_is_refused_with_number(make: Any) -> None:
    composer = Composer()
    for _ in range(2):
        composer.add(part(make), lowered(module(256)))
    with pytest.raises(InvalidRequest, match=r"513 or more on Layer 1 q_proj; at most 512"):
        composer.add(part(make), lowered(module(1)))


def test_weight_causing_excessive_scaling_is_refused(make: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"weight of 5001 makes its scaling 10002"):
        Composer().add(part(make, 5001.0), lowered(module()))


def test_stored_dora_part_is_refused(make: Any, store: LocalStore) -> None:
    a = make.publish(store, rank=3)
    b = make.publish(store, rank=3, seed=1, use_dora=True)
    tensors = load(bytes(store.read(b.weights_blob)))
    magnitudes = {
        name.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(32) for name in tensors if "lora_A" in name
    }
    with store.stage() as staged:
        staged.write(save(tensors | magnitudes))
        b = msgspec.structs.replace(b, weights_blob=staged.commit())
    with pytest.raises(InvalidRequest, match="DoRA"):
        load_adapter(store, composition((a, 0.5), (b, 0.5)), make.base, make.cpu)
