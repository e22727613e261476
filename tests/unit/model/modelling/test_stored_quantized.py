"""Checkpoints that are quantized already, of a family that transformers' code computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_words import fp8_blocks, gptq_parts, round_weight, save_awq, save_gptq

from loraserve.errors import UnexpectedTensor

from ..conftest import edit_json, reference_logits
from ..stored_quantized import group, put_weight, save_compressed
from .families import build, load, save
from .test_modelled_base import CUTS, LONG, SHORT, equal, mixed

SAVED: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "awq": (save_awq, "int4"),
    "compressed-tensors": (partial(save_compressed, groups=[group(8, "channel")]), "int8"),
    "gptq": (save_gptq, "int4"),
    "gptq-reordered": (partial(save_gptq, desc_act=True), "int4"),
}


@pytest.mark.parametrize("layout", SAVED)
def test_quantized_checkpoint_equals_dequantized_weights(layout: str, tmp_path: Path) -> None:
    save_as, quantization = SAVED[layout]
    meant = save_as(build("CohereForCausalLM", hidden_size=128, intermediate_size=256), tmp_path)
    base = load(tmp_path, activation_dtype="float")
    assert base.spec.quantization == quantization
    for found, tokens in zip(mixed(base, CUTS[0], (None, None)), (LONG, SHORT), strict=True):
        assert equal(found, reference_logits(meant, tokens))


@pytest.mark.parametrize("name", ["Glm4MoeForCausalLM", "Qwen3_5MoeForCausalLM"])
@pytest.mark.parametrize("layout", ["fp8", "gptq", "gptq of some"])
def test_quantized_experts_equal_dequantized_weights(layout: str, name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64}
    model = save(name, tmp_path, **sizes)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    quantized = [one for one in tensors if re.search(r"\.experts\.\d+\.", one)]
    if not quantized:
        # this family keeps the parameters of all experts in its files
        quantized = list(split_experts(tensors))
    if layout == "gptq of some":
        quantized = [one for one in quantized if ".experts.2." not in one]
    for one in quantized:
        weight, path = tensors.pop(one), one.removesuffix(".weight")
        if layout == "fp8":
            parts, meant = fp8_blocks(weight)
        else:
            codes = round_weight(weight, 4, 32, sym=True)
            parts, meant = gptq_parts(codes, 4), codes.weight
        tensors |= {f"{path}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        put_weight(model, f"{path}.weight", meant)
    save_file(tensors, weights)
    settings = {
        "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    }
    edit_json(tmp_path / "config.json", quantization_config=settings[layout.partition(" ")[0]])
    base = load(tmp_path, activation_dtype="float")
    assert base.spec.quantization == {"fp8": "fp8"}.get(layout, "int4")
    for found, tokens in zip(mixed(base, CUTS[0], (None, None)), (LONG, SHORT), strict=True):
        assert equal(found, reference_logits(model, tokens))


def split_experts(tensors: dict[str, Any]) -> Iterator[str]:
    """Replace parameters of all experts by linears of each, and yield their names."""
    for name in [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        path, _, parameter = name.rpartition(".")
        for number, weight in enumerate(tensors.pop(name)):
            parts = {"down_proj": weight}
            if parameter == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            for part, own in parts.items():
                tensors[f"{path}.{number}.{part}.weight"] = own.contiguous()
                yield f"{path}.{number}.{part}.weight"


def test_codes_of_all_experts_are_refused(tmp_path: Path) -> None:
    save("GptOssForCausalLM", tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, weights)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnexpectedTensor, match=r"experts\.down_proj, quantized"):
        load(tmp_path)
