"""Weights in several files are those of one, and an index that disagrees is refused by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from loraserve.adapters.format.shards import read_shards
from loraserve.errors import AdapterFormatError

TENSORS = {f"layer.{i}": np.full((2, 3), i, np.float32) for i in range(4)}
FIRST, SECOND = "adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"
PLACES = {"layer.0": FIRST, "layer.1": FIRST, "layer.2": SECOND, "layer.3": SECOND}


def shard(*numbers: int) -> bytes:
    return save({f"layer.{i}": TENSORS[f"layer.{i}"] for i in numbers})


def index(places: dict[str, Any] | Any = PLACES) -> bytes:
    return json.dumps({"metadata": {"total_size": 96}, "weight_map": places}).encode()


@pytest.mark.parametrize("weights", [shard(0, 1) + shard(2, 3), shard(2, 3) + shard(1, 0)])
def test_shards_are_merged_in_any_order(weights: bytes) -> None:
    found = read_shards(weights, index())
    assert found.keys() == TENSORS.keys()
    assert all(np.array_equal(found[name].array, TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize(
    ("weights", "given", "words"),
    [
        (shard(0, 1), index(), f"names '{SECOND}', which isn't among"),
        (shard(0, 1) + shard(0, 1), index(), f"tensor 'layer.0' is in two .* {FIRST}"),
        (shard(0, 1) + shard(2), index(), f"places 'layer.3' in {SECOND}, which doesn't hold it"),
        (shard(0, 1, 2) + shard(3), index(), "holds 'layer.0' and 'layer.2'"),
        (shard(0, 1) + shard(2, 3)[:-1], index(), "ends after"),
        (shard(0, 1) + b"rest", index(), "ends after"),
        (shard(0), index({"layer.1": FIRST}), "'layer.0', which .* doesn't list"),
        (shard(0), index({"layer.0": "../a.safetensors"}), r"names the file '\.\./a\.safetensors'"),
        (shard(0), index({"layer.0": "/etc/a.safetensors"}), "names the file '/etc/a"),
        (shard(0), index({"layer.0": "adapter_model.bin"}), "expected the name of a .safetensors file"),
        (shard(0), index({"layer.0": 1}), "isn't an object of names"),
        (shard(0), index({}), "isn't an object of names"),
        (shard(0), b"[]", "isn't an object of names"),
        (shard(0), b"{}", "no weight_map"),
        (shard(0), b"{", "isn't an index"),
        (shard(0), b"[" * 100_000, "isn't an index"),
        (shard(0), index({f"layer.{i}": f"{i}.safetensors" for i in range(300)}), "names 300 files"),
    ],
)
def test_shards_are_refused_by_name(weights: bytes, given: bytes, words: str) -> None:
    with pytest.raises(AdapterFormatError, match=words):
        read_shards(weights, given)
