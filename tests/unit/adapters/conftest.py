from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from loraserve.types import BaseSpec, Digest

MODULES = {
    "q_proj": (32, 32),
    "k_proj": (16, 32),
    "v_proj": (16, 32),
    "o_proj": (32, 32),
    "gate_proj": (48, 32),
    "up_proj": (48, 32),
    "down_proj": (32, 48),
}
OUTSIDE = {"lm_head": (64, 32), "embed_tokens": (32, 64)}


def _make_base(**changes: Any) -> BaseSpec:
    values: dict[str, Any] = {
        "id": "tiny",
        "digest": Digest("0" * 64),
        "architecture": "LlamaForCausalLM",
        "num_layers": 3,
        "hidden_size": 32,
        "vocab_size": 64,
        "max_model_len": 128,
        "modules": MODULES | OUTSIDE,
        "module_paths": {
            **{m: f"{'self_attn' if m[0] in 'qkvo' else 'mlp'}.{m}" for m in MODULES},
            "lm_head": "lm_head",
            "embed_tokens": "model.embed_tokens",
        },
        "layers_path": "model.layers",
        "eos_token_ids": (0,),
        "dtype": "float32",
        "quantization": "none",
    }
    return BaseSpec(**{**values, **changes})


def _make_file(header: Any, body: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with the safetensors frame; `header` is JSON to be, or its raw bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + body


def _key(layer: int, module: str, side: str) -> str:
    if module == "embed_tokens":
        return f"base_model.model.model.embed_tokens.lora_embedding_{side}"
    if module == "lm_head":
        return f"base_model.model.lm_head.lora_{side}.weight"
    block = "self_attn" if module[0] in "qkvo" else "mlp"
    return f"base_model.model.model.layers.{layer}.{block}.{module}.lora_{side}.weight"


def _make_tensors(
    places: Mapping[tuple[int, str], int], *, seed: int = 0, dtype: str = "F32"
) -> dict[str, np.ndarray[Any, Any]]:
    """(layer, module) → rank, as arrays under PEFT's names."""
    rng = np.random.default_rng(seed)
    result = {}
    for (layer, module), rank in places.items():
        out_features, in_features = (MODULES | OUTSIDE)[module]
        result[_key(layer, module, "A")] = rng.standard_normal((rank, in_features), dtype=np.float32) / 8
        result[_key(layer, module, "B")] = rng.standard_normal((out_features, rank), dtype=np.float32) / 8
    return {name: array.astype(np.float16) if dtype == "F16" else array for name, array in result.items()}


def _save(tensors: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    from safetensors.numpy import save

    return save(dict(tensors), metadata={"format": "pt"})


def _make_config(**changes: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **changes}


@pytest.fixture
def make_base() -> Callable[..., BaseSpec]:
    return _make_base


@pytest.fixture
def base() -> BaseSpec:
    return _make_base()


@pytest.fixture
def make_file() -> Callable[..., bytes]:
    return _make_file


@pytest.fixture
def make_tensors() -> Callable[..., dict[str, np.ndarray[Any, Any]]]:
    return _make_tensors


@pytest.fixture
def make_config() -> Callable[..., dict[str, Any]]:
    return _make_config


@pytest.fixture
def save() -> Callable[..., bytes]:
    return _save


@pytest.fixture
def key() -> Callable[..., str]:
    return _key
