"""mlx-lm's adapters compile to what the same adapter of PEFT's compiles to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.containers import convert_files, needs_conversion, write_safetensors
from loraserve.adapters.format.peft_format import read_adapter
from loraserve.adapters.ir import AdapterIR
from loraserve.errors import AdapterRejected
from loraserve.types import BaseSpec

MakeBase = Callable[..., BaseSpec]
KEYS = ["self_attn.q_proj", "mlp.down_proj"]
RANK, SCALE = 2, 20.0


def config(**changes: Any) -> dict[str, Any]:
    parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.0, "keys": KEYS, **changes.pop("lora_parameters", {})}
    # what mlx_lm.lora writes beside is its command line
    given = {"adapter_path": "adapters", "batch_size": 4, "model": "mlx/tiny", "num_layers": 2, **changes}
    return {"fine_tune_type": "lora", "lora_parameters": parameters, **given}


def mlx_tensors(base: BaseSpec, layers: tuple[int, ...] = (1, 2), *, is_dora: bool = False) -> dict[str, Any]:
    random = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for layer in layers:
        for path in KEYS:
            out_features, in_features = base.modules[path.rpartition(".")[2]]
            name = f"model.layers.{layer}.{path}"
            tensors[f"{name}.lora_a"] = random.standard_normal((in_features, RANK), dtype=np.float32)
            tensors[f"{name}.lora_b"] = random.standard_normal((RANK, out_features), dtype=np.float32)
            if is_dora:
                tensors[f"{name}.m"] = random.random(out_features, dtype=np.float32) + 1
    return tensors


def read(written: dict[str, Any], tensors: dict[str, Any], base: BaseSpec) -> AdapterIR:
    data = json.dumps(written).encode()
    assert needs_conversion(data, save(tensors)[:8], None, ())
    files = convert_files(data, save(tensors), base)
    adapter = read_adapter(files.config, b"".join(write_safetensors(files.tensors)))
    return compile_adapter(adapter.config, adapter.tensors, base)


@pytest.mark.parametrize("is_dora", [False, True])
def test_factors_are_transposed_and_scale_is_kept(make_base: MakeBase, is_dora: bool) -> None:
    base, kind = make_base(), "dora" if is_dora else "lora"
    tensors = mlx_tensors(base, is_dora=is_dora)
    ir = read(config(fine_tune_type=kind), tensors, base)
    assert [(m.layer, m.module) for m in ir.modules] == [(n, m) for n in (1, 2) for m in ("q_proj", "down_proj")]
    for module in ir.modules:
        name = f"model.layers.{module.layer}.{base.module_paths[module.module]}"
        assert (module.rank, module.scaling) == (RANK, SCALE)
        assert module.lora_a is not None
        assert module.lora_b is not None
        assert np.array_equal(module.lora_a.array, tensors[f"{name}.lora_a"].T)
        assert np.array_equal(module.lora_b.array, tensors[f"{name}.lora_b"].T)
        if is_dora:
            assert module.magnitude is not None
            assert np.array_equal(module.magnitude.array, tensors[f"{name}.m"])


@pytest.mark.parametrize("num_layers", [3, 16, -1, 0, None])
def test_all_layers_and_head_are_targeted(make_base: MakeBase, num_layers: int | None) -> None:
    base = make_base()
    tensors = mlx_tensors(base, (0, 1, 2))
    tensors["lm_head.lora_a"] = np.ones((32, RANK), np.float32)
    tensors["lm_head.lora_b"] = np.ones((RANK, 64), np.float32)
    tensors["model.embed_tokens.lora_a"] = np.ones((64, RANK), np.float32)
    tensors["model.embed_tokens.lora_b"] = np.ones((RANK, 32), np.float32)
    given = config(num_layers=num_layers, lora_parameters={"keys": None})
    ir = read({key: value for key, value in given.items() if value is not None}, tensors, base)
    assert set(ir.target_modules) == {"q_proj", "down_proj", "lm_head", "embed_tokens"}
    assert ir.layers == (0, 1, 2)


@pytest.mark.parametrize(
    ("changes", "tensors", "words"),
    [
        ({"fine_tune_type": "full"}, {}, r"fine_tune_type is full.*mlx_lm\.fuse"),
        ({"fine_tune_type": "prefix"}, {}, "'prefix'; of mlx-lm's, lora and dora"),
        ({"fine_tune_type": "dora"}, {}, "has no m"),
        ({"lora_parameters": {"alpha": 16}}, {}, "has alpha"),
        ({"lora_parameters": {"gain": 1}}, {}, "'gain', which isn't implemented"),
        ({"lora_parameters": {"rank": 0}}, {}, "rank is 0"),
        ({"lora_parameters": {"rank": 4}}, {}, "rank"),
        ({"lora_parameters": {"scale": "x"}}, {}, "scale is 'x'"),
        ({"lora_parameters": {"keys": ["self_attn.q_proj"]}}, {}, "mlp.down_proj', which lora_parameters.keys"),
        ({"lora_parameters": {"keys": 3}}, {}, "keys is 3"),
        ({"num_layers": 1}, {}, "means 2 to 2; the file holds tensors for layer 1"),
        ({"num_layers": 3}, {}, "means 0 to 2; the file holds tensors for 2 layers"),
        ({"num_layers": "2"}, {}, "num_layers is '2'"),
        ({}, {"model.layers.2.self_attn.q_proj.m": np.ones(32, np.float32)}, "has m, which fine_tune_type lora"),
        ({}, {"model.layers.2.self_attn.k_proj.lora_a": np.ones((32, RANK), np.float32)}, "has no lora_b"),
        ({}, {"model.layers.2.mlp.down_proj.weight": np.ones((2, 2), np.float32)}, "isn't a tensor of mlx-lm's"),
        ({}, {"model.layers.2.self_attn.q_proj.lora_a": np.ones(32, np.float32)}, "expected 2"),
    ],
)
def test_adapter_is_refused_by_cause(
    make_base: MakeBase, changes: dict[str, Any], tensors: dict[str, Any], words: str
) -> None:
    base = make_base()
    with pytest.raises(AdapterRejected, match=words) as caught:
        read(config(**changes), mlx_tensors(base) | tensors, base)
    assert caught.value.problems or str(caught.value)


def test_embedding_is_refused_on_tied_base(make_base: MakeBase) -> None:
    tensors = {"model.embed_tokens.lora_a": np.ones((64, 2)), "model.embed_tokens.lora_b": np.ones((2, 32))}
    with pytest.raises(AdapterRejected, match="embedding that is the head too"):
        read(config(), tensors, make_base(is_head_tied=True))
    with pytest.raises(AdapterRejected, match="mlx-lm's DoRA"):
        read(config(fine_tune_type="dora"), tensors, make_base())
