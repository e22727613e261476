"""From blobs to packed weights, whatever the file's alignment and dtypes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from adapters_store import LocalStore
from loraserve.memory.load import load_adapter
from loraserve.types import AdapterRef


def rewrite(make: Any, store: LocalStore, ref: AdapterRef, data: bytes) -> AdapterRef:
    with store.stage() as staged:
        staged.write(data)
        digest = staged.commit()
    return AdapterRef(
        tenant=ref.tenant, name=ref.name, version=1, digest=ref.digest, config_blob=ref.config_blob, weights_blob=digest
    )


@pytest.mark.parametrize("padding", [1, 2, 3])
def test_a_header_that_leaves_the_tensors_unaligned_changes_nothing(make: Any, store: LocalStore, padding: int) -> None:
    ref = make.publish(store, rank=3)
    data = bytes(store.read(ref.weights_blob))
    length = int.from_bytes(data[:8], "little")
    shifted = (length + padding).to_bytes(8, "little") + data[8 : 8 + length] + b" " * padding + data[8 + length :]
    expected = load_adapter(store, ref, make.base, make.cpu)
    got = load_adapter(store, rewrite(make, store, ref, shifted), make.base, make.cpu)
    assert torch.equal(got.data, expected.data)


def test_mixed_dtypes_are_packed_without_losing_a_bit(make: Any, store: LocalStore) -> None:
    from safetensors.torch import load, save

    ref = make.publish(store, rank=3)
    tensors = load(bytes(store.read(ref.weights_blob)))
    first, *_ = tensors
    tensors[first] = tensors[first].to(torch.bfloat16)
    packed = load_adapter(store, rewrite(make, store, ref, save(tensors)), make.base, make.cpu)
    assert packed.data.dtype is torch.float32
    layer, side = int(first.split(".")[4]), first.split(".")[-2]
    got = packed.lora_a(layer, "q_proj") if side == "lora_A" else packed.lora_b(layer, "q_proj").T
    assert torch.equal(got, tensors[first].float())


def test_patterns_reach_the_packed_scalings(make: Any, store: LocalStore) -> None:
    ref = make.publish(store, rank=4, use_rslora=True, alpha_pattern={"layers.1.self_attn.q_proj": 10})
    packed = load_adapter(store, ref, make.base, make.cpu)
    assert packed.scalings[:, 0].tolist() == [4.0, 5.0]
    assert json.loads(bytes(store.read(ref.config_blob)))["use_rslora"] is True
