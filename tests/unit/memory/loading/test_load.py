"""From blobs to packed weights, whatever the file's alignment and dtypes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from adapters_store import LocalStore
from loraserve.errors import AdapterTooLarge, InvariantViolation
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.loading.load import load_adapter
from loraserve.types import AdapterRef


def rewrite(make: Any, store: LocalStore, ref: AdapterRef, data: bytes) -> AdapterRef:
    with store.stage() as staged:
        staged.write(data)
        digest = staged.commit()
    return AdapterRef(
        tenant=ref.tenant, name=ref.name, version=1, digest=ref.digest, config_blob=ref.config_blob, weights_blob=digest
    )


@pytest.mark.parametrize("padding", [1, 2, 3])
def test_unaligned_tensors_load_unchanged(make: Any, store: LocalStore, padding: int) -> None:
    ref = make.publish(store, rank=3)
    data = bytes(store.read(ref.weights_blob))
    length = int.from_bytes(data[:8], "little")
    shifted = (length + padding).to_bytes(8, "little") + data[8 : 8 + length] + b" " * padding + data[8 + length :]
    expected = load_adapter(store, ref, make.base, make.cpu).host
    got = load_adapter(store, rewrite(make, store, ref, shifted), make.base, make.cpu).host
    assert torch.equal(got.data, expected.data)


def test_mixed_dtypes_are_packed_without_losing_a_bit(make: Any, store: LocalStore) -> None:
    from safetensors.torch import load, save

    ref = make.publish(store, rank=3)
    tensors = load(bytes(store.read(ref.weights_blob)))
    first, *_ = tensors
    tensors[first] = tensors[first].to(torch.bfloat16)
    packed = load_adapter(store, rewrite(make, store, ref, save(tensors)), make.base, make.cpu).host
    assert packed.data.dtype is torch.float32
    layer, side = int(first.split(".")[4]), first.split(".")[-2]
    got = packed.lora_a(layer, "q_proj") if side == "lora_A" else packed.lora_b(layer, "q_proj").T
    assert torch.equal(got, tensors[first].float())


def test_patterns_reach_the_packed_scalings(make: Any, store: LocalStore) -> None:
    ref = make.publish(store, rank=4, use_rslora=True, alpha_pattern={"layers.1.self_attn.q_proj": 10})
    packed = load_adapter(store, ref, make.base, make.cpu).host
    assert [packed.scaling(layer, "q_proj").tolist() for layer in range(2)] == [[4.0] * 4, [5.0] * 4]
    assert json.loads(bytes(store.read(ref.config_blob)))["use_rslora"] is True


def test_an_adapter_is_known_to_be_invoked(make: Any, store: LocalStore) -> None:
    ref = make.publish(store, alora_invocation_tokens=[5, 63], task_type="CAUSAL_LM")
    assert load_adapter(store, ref, make.base, make.cpu).metadata.invocation_token_ids == (5, 63)


class Weights:
    """A base whose weights are all ones, in blocks of five rows."""

    device = torch.device("cpu")

    def weight_rows(self, layer: int, module: str) -> Iterator[torch.Tensor]:
        yield from torch.ones(32, 32).split(5)


def add_magnitudes(make: Any, store: LocalStore, ref: AdapterRef) -> AdapterRef:
    from safetensors.torch import load, save

    tensors = load(bytes(store.read(ref.weights_blob)))
    magnitudes = {
        name.replace("lora_A.weight", "lora_magnitude_vector"): torch.arange(1.0, 33.0)
        for name in tensors
        if "lora_A" in name
    }
    return rewrite(make, store, ref, save(tensors | magnitudes))


def test_dora_rows_are_rescaled_to_magnitude(make: Any, store: LocalStore) -> None:
    ref = add_magnitudes(make, store, make.publish(store, rank=3, use_dora=True))
    packed = load_adapter(store, ref, make.base, make.cpu, Weights()).host
    for layer in range(2):
        update = 2 * packed.lora_b(layer, "q_proj").T @ packed.lora_a(layer, "q_proj")
        expected = torch.arange(1.0, 33.0) / (torch.ones(32, 32) + update).norm(dim=1) - 1
        torch.testing.assert_close(packed.dora_delta(layer, "q_proj"), expected)


def test_rounded_row_length_equals_magnitude(make: Any, store: LocalStore) -> None:
    ref = add_magnitudes(make, store, make.publish(store, rank=3, use_dora=True))
    packed = load_adapter(store, ref, make.base, CpuDevice(make.base, 1 << 20, torch.int8), Weights()).host
    for layer in range(2):
        update = (
            packed.lora_b(layer, "q_proj").T * packed.scaling(layer, "q_proj") @ packed.lora_a(layer, "q_proj").float()
        )
        lengths = (torch.ones(32, 32) + update).norm(dim=1) * (1 + packed.dora_delta(layer, "q_proj"))
        torch.testing.assert_close(lengths, torch.arange(1.0, 33.0))


def test_dora_is_not_loaded_without_the_bases_weights(make: Any, store: LocalStore) -> None:
    ref = add_magnitudes(make, store, make.publish(store, rank=3, use_dora=True))
    with pytest.raises(InvariantViolation, match="needs the base's weights"):
        load_adapter(store, ref, make.base, make.cpu)


def test_oversized_adapter_is_refused_before_reading_base_weights(make: Any, store: LocalStore) -> None:
    ref = add_magnitudes(make, store, make.publish(store, rank=3, use_dora=True))
    with pytest.raises(AdapterTooLarge):
        load_adapter(store, ref, make.base, CpuDevice(make.base, 2 * 3 * 64 * 4), None)
