"""Experts of transformers' code as linears of this engine: gpt-oss as it is published, in MXFP4,
and LoRA on experts.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from adapters_store import LocalStore
from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import read_adapter
from loraserve.errors import AdapterUnservable, ConfigError, MissingTensor, ModelError, ShapeMismatch
from loraserve.model.modelling.modelled_base import ModelledBase
from loraserve.model.reference_model import evaluate
from loraserve.model.reference_pass import Subject

from ..conftest import edit_json, reference_logits
from ..test_adapter_kinds import load_packed
from .families import build, load, save
from .test_modelled_base import CUTS, LONG, SHORT, equal, mixed

# PEFT remarks on parameters that torch would compile anew
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "FutureWarning", "RuntimeWarning")
]

GPT_OSS = "GptOssForCausalLM"
PARAMETERS = ("gate_up_proj", "down_proj")
WIDE = {"hidden_size": 64, "intermediate_size": 96}


def save_mxfp4(directory: Path, **overrides: Any) -> Any:
    """Save gpt-oss with random experts in MXFP4, and return transformers' model of them."""
    model = build(GPT_OSS, **{**WIDE, **overrides})
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    for number, layer in enumerate(model.model.layers):
        for parameter in PARAMETERS:
            path = f"model.layers.{number}.mlp.experts.{parameter}"
            experts, inputs, outputs = tensors.pop(path).shape
            groups = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 126, groups, generator=generator, dtype=torch.uint8)
            tensors |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
            values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(layer.mlp.experts, parameter).data.copy_(values)
    model.save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_json(
        directory / "config.json",
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    )
    return model


def test_mxfp4_experts_equal_transformers(tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path)
    base = load(tmp_path, activation_dtype="float")
    assert base.spec.quantization == "mxfp4"
    assert "w4a16-mxfp4" in base.spec.arithmetic
    expected = [reference_logits(model, tokens) for tokens in (LONG, SHORT)]
    for cuts in CUTS:
        for found, wanted in zip(mixed(base, cuts, (None, None)), expected, strict=True):
            assert equal(found, wanted)
    (reference,) = evaluate(base, [Subject([LONG, SHORT], [], known_base=None)])
    for found, wanted in zip(reference.base, expected, strict=True):
        assert equal(found, wanted)


def test_mxfp4_experts_round_activations_in_groups(tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path)
    base = load(tmp_path)
    assert "mxfp4a8-g32-o2" in base.spec.arithmetic
    found, expected = mixed(base, CUTS[2], (None, None))[0], reference_logits(model, LONG)
    assert 1e-6 < float((found - expected).norm() / expected.norm()) < 0.1


def test_mxfp4_experts_take_bytes_of_file(tmp_path: Path) -> None:
    save_mxfp4(tmp_path, num_local_experts=32, hidden_size=256, intermediate_size=256)
    stored = (tmp_path / "model.safetensors").stat().st_size
    # scales are two bytes
    assert load(tmp_path).spec.size_bytes < 1.1 * stored


@pytest.mark.parametrize("width", ["hidden_size", "intermediate_size"])
def test_width_without_whole_blocks_is_refused(width: str, tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    edit_json(tmp_path / "config.json", **{width: 80})
    with pytest.raises(ModelError, match="80 inputs, which isn't a multiple of MXFP4's blocks, 32"):
        load(tmp_path)


def damage(directory: Path, name: str, change: Any) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def nan_scale(scales: Tensor) -> Tensor:
    scales[1, 2, 0] = 255
    return scales


@pytest.mark.parametrize(
    ("part", "change", "error", "message"),
    [
        ("down_proj_scales", nan_scale, ModelError, r"down_proj_scales has 1 of \d+ scales that aren't numbers"),
        ("down_proj_scales", lambda _: None, MissingTensor, r"lacks .*layers\.1.*down_proj_scales"),
        ("gate_up_proj_blocks", lambda t: t[:3].contiguous(), ShapeMismatch, r"gate_up_proj_blocks has the shape \[3"),
        ("gate_up_proj_blocks", lambda t: t.to(torch.int8), ModelError, r"gate_up_proj_blocks is stored as I8"),
    ],
)
def test_damaged_experts_are_named(part: str, change: Any, error: type, message: str, tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    damage(tmp_path, f"model.layers.1.mlp.experts.{part}", change)
    with pytest.raises(error, match=message):
        load(tmp_path)


def test_rounding_of_mxfp4_checkpoint_is_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    with pytest.raises(ConfigError, match="mxfp4"):
        load(tmp_path, quantize="int4")


@pytest.mark.parametrize("quantize", ["int8", "int4", "nf4", "fp8"])
@pytest.mark.parametrize("name", [GPT_OSS, "Glm4MoeForCausalLM"])
def test_rounded_experts_equal_reference(name: str, quantize: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    model = save(name, tmp_path, **sizes)
    whole, base = load(tmp_path), load(tmp_path, quantize=quantize, activation_dtype="float")
    assert base.spec.size_bytes < 0.75 * whole.spec.size_bytes
    assert base.spec.num_parameters == whole.spec.num_parameters
    (reference,) = evaluate(base, [Subject([LONG, SHORT], [], known_base=None)])
    for found, wanted in zip(mixed(base, CUTS[0], (None, None)), reference.base, strict=True):
        assert equal(found, wanted)
    assert not equal(reference.base[0], reference_logits(model, LONG))


TARGETS: dict[str, dict[str, Any]] = {
    "both": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"experts.down_proj": 5},
    },
    "of some layers": {
        "r": 4,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": "all-linear",
        "target_parameters": ["1.mlp.experts.gate_up_proj", "2.mlp.experts.down_proj"],
    },
}


def adapt(model: Any, root: Path, seed: int, **options: Any) -> Any:
    """Save an adapter with random tensors, and return PEFT's model."""
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    adapted.save_pretrained(root / f"adapter-{seed}")
    return adapted


def loaded(base: ModelledBase, root: Path, seed: int) -> Any:
    return load_packed(base, root / f"adapter-{seed}", LocalStore(root / "store"))


@pytest.mark.parametrize("name", ["mxfp4", GPT_OSS, "GraniteMoeForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_adapters_of_experts_equal_peft(name: str, tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path / "base") if name == "mxfp4" else save(name, tmp_path / "base")
    base = load(tmp_path / "base", activation_dtype="float")
    assert base.spec.experts is not None
    path = base.spec.experts.parameters_path
    pairs = []
    for seed, options in enumerate(TARGETS.values()):
        targets = [target.replace("mlp.experts", path) for target in options["target_parameters"]]
        # PEFT takes a Mamba's or a gated rule's output for none of its own
        options = {**options, "target_parameters": targets, "target_modules": ["q_proj", "v_proj"]}
        pairs.append((adapt(model, tmp_path, seed, **options), loaded(base, tmp_path, seed)))
    (first, packed), (second, other) = pairs
    for cuts in CUTS[:2]:
        found = mixed(base, cuts, (packed, other))
        assert equal(found[0], reference_logits(first, LONG))
        assert equal(found[1], reference_logits(second, SHORT))
        alone = mixed(base, cuts, (None, other))
        assert equal(alone[0], reference_logits(model, LONG))
    assert float((reference_logits(first, LONG) - reference_logits(model, LONG)).abs().max()) > 0.01


@pytest.mark.parametrize("name", [GPT_OSS, "GraniteMoeForCausalLM"])
def test_reference_of_adapted_experts_equals_peft(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "base")
    base = load(tmp_path / "base")
    assert base.spec.experts is not None
    targets = [f"{base.spec.experts.parameters_path}.{parameter}" for parameter in PARAMETERS]
    adapted = adapt(model, tmp_path, 0, r=3, lora_alpha=6, target_modules=["o_proj"], target_parameters=targets)
    directory = tmp_path / "adapter-0"
    adapter = read_adapter(
        (directory / "adapter_config.json").read_bytes(), (directory / "adapter_model.safetensors").read_bytes()
    )
    ir = compile_adapter(adapter.config, adapter.tensors, base.spec)
    (found,) = evaluate(base, [Subject([LONG, SHORT], [(ir, 1.0)])])
    for tokens, changed in zip((LONG, SHORT), found.adapted, strict=True):
        assert equal(changed, reference_logits(adapted, tokens))


def test_adapter_of_router_is_refused(tmp_path: Path) -> None:
    model = save(GPT_OSS, tmp_path / "base")
    base = load(tmp_path / "base")
    adapt(model, tmp_path, 0, r=2, target_modules=["q_proj"], target_parameters=["mlp.router.weight"])
    with pytest.raises(AdapterUnservable, match=r"mlp\.router"):
        loaded(base, tmp_path, 0)


def test_partial_mixture_takes_no_expert_adapters(tmp_path: Path) -> None:
    save("DeepseekV3ForCausalLM", tmp_path)
    assert load(tmp_path).spec.experts is None
