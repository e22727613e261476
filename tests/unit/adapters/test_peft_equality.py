"""What PEFT saves, compiled by us, is the same update that PEFT computes:
scaling · B A per module, within 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from loraserve.adapters.format.tensor_names import module_name
from loraserve.adapters.ir import TensorView
from loraserve.adapters.validation import check_finite
from loraserve.errors import AdapterRejected
from loraserve.types import BaseSpec

# the oracles' own deprecations and remarks aren't ours to mend
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CASES: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "rank 1 on all": {"r": 1, "lora_alpha": 3, "target_modules": LINEARS},
    "all-linear": {"r": 2, "lora_alpha": 2, "target_modules": "all-linear"},
    "rslora": {"r": 7, "lora_alpha": 5, "use_rslora": True, "target_modules": ["o_proj", "down_proj"]},
    "rank pattern": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": LINEARS,
        "rank_pattern": {
            "mlp.up_proj": 3,
            "layers.1.self_attn.q_proj": 6,
            "q_proj": 5,
            "^model.layers.0.mlp.down_proj": 1,
        },
    },
    "alpha pattern": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": LINEARS,
        "alpha_pattern": {"self_attn.k_proj": 1, "k_proj": 99, r"layers\.2\.mlp\.gate_proj": 32, "v.proj": 7},
    },
    "both patterns with rslora": {
        "r": 4,
        "lora_alpha": 9,
        "use_rslora": True,
        "target_modules": LINEARS,
        "rank_pattern": {"q_proj$": 2, "layers.2.mlp.up_proj": 16},
        "alpha_pattern": {"up_proj": 3},
    },
    "one layer": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "layers_to_transform": 1},
    "some layers": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["up_proj", "k_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "dotted targets": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"],
    },
    "excluded": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": LINEARS,
        "exclude_modules": ["k_proj", "layers.1.mlp.up_proj"],
    },
    "regex": {"r": 3, "lora_alpha": 6, "target_modules": r".*\.layers\.[02]\.(self_attn\.[qk]|mlp\.up)_proj"},
    "regex excluded": {"r": 3, "lora_alpha": 6, "target_modules": LINEARS, "exclude_modules": r".*\.1\..*(q|k)_proj"},
    "regex patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": LINEARS,
        "rank_pattern": {"(q|up)_proj": 5, r"layers\.\d\.mlp\.(up|gate)_proj": 3},
        "alpha_pattern": {r"[012]\..*k_proj": 1, ".*o_proj|.*k_proj": 99, r"(?:layers\.2.*)": 32},
    },
    "regex of layers": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["up_proj", "k_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": ["h", "la[y]ers"],
    },
    "gaussian init": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal init": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "float alpha": {"r": 4, "lora_alpha": 2.5, "target_modules": ["q_proj"]},
}


def make_model(dtype: torch.dtype = torch.float32) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def save_random_adapter(directory: Path, config: dict[str, Any], dtype: torch.dtype) -> peft.PeftModel:
    model = peft.get_peft_model(
        make_model(dtype), peft.LoraConfig(task_type="CAUSAL_LM", **config), autocast_adapter_dtype=False
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    model.save_pretrained(directory)
    return model


def as_float(tensor: TensorView) -> torch.Tensor:
    if tensor.dtype == "BF16":
        return torch.from_numpy((tensor.array.astype(np.uint32) << 16).view(np.float32))
    return torch.from_numpy(tensor.array.astype(np.float32))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES]
    + [("both patterns with rslora", torch.bfloat16), ("both patterns with rslora", torch.float16)],
)
def test_each_modules_update_equals_pefts(
    case: str, dtype: torch.dtype, tmp_path: Path, make_base: Callable[..., BaseSpec]
) -> None:
    save_random_adapter(tmp_path, CASES[case], dtype)
    base = make_base()
    adapter = read_adapter((tmp_path / CONFIG_FILE).read_bytes(), (tmp_path / WEIGHTS_FILE).read_bytes())
    ir = compile_adapter(adapter.config, adapter.tensors, base)
    check_finite(ir)

    ours = {
        module_name(base, m.layer, m.module): m.scaling * (as_float(m.lora_b) @ as_float(m.lora_a)) for m in ir.modules
    }
    # Read back by PEFT: its save_pretrained sorts the patterns' keys, and which one is first may
    # change by that.
    model = peft.PeftModel.from_pretrained(make_model(), tmp_path)
    theirs = {
        name.removeprefix("base_model.model."): layer.get_delta_weight("default")
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
    assert ours.keys() == theirs.keys()
    for name, delta in theirs.items():
        torch.testing.assert_close(ours[name], delta, rtol=1e-6, atol=1e-6 * float(delta.abs().max()))


def test_adapter_of_older_peft_compiles_alike(tmp_path: Path, make_base: Callable[..., BaseSpec]) -> None:
    save_random_adapter(tmp_path, CASES["plain"], torch.float32)
    adapter = read_adapter((tmp_path / CONFIG_FILE).read_bytes(), (tmp_path / WEIGHTS_FILE).read_bytes())
    old = {"r", "lora_alpha", "target_modules", "peft_type", "bias", "fan_in_fan_out", "inference_mode", "task_type"}
    ir = compile_adapter({k: v for k, v in adapter.config.items() if k in old}, adapter.tensors, make_base())
    assert {m.scaling for m in ir.modules} == {2.0}


@pytest.mark.parametrize(
    "config",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"layer_replication": [[0, 2], [1, 3]]},
    ],
    ids=lambda c: next(iter(c)),
)
def test_unsupported_kinds_saved_by_peft_are_refused(
    config: dict[str, Any], tmp_path: Path, make_base: Callable[..., BaseSpec]
) -> None:
    save_random_adapter(tmp_path, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **config}, torch.float32)
    adapter = read_adapter((tmp_path / CONFIG_FILE).read_bytes(), (tmp_path / WEIGHTS_FILE).read_bytes())
    with pytest.raises(AdapterRejected) as caught:
        compile_adapter(adapter.config, adapter.tensors, make_base())
    assert any(next(iter(config)) in problem for problem in caught.value.problems)
