"""Checkpoints that are quantized already, of a family that transformers' code computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_words import gptq_parts, round_weight, save_awq, save_gptq

from loraserve.errors import UnexpectedTensor

from ..conftest import edit_json, reference_logits
from ..stored_quantized import group, save_compressed
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


@pytest.mark.parametrize("layout", ["fp8", "gptq"])
def test_quantized_experts_are_refused(layout: str, tmp_path: Path) -> None:
    save("Glm4MoeForCausalLM", tmp_path, hidden_size=128, intermediate_size=256)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    for name in [name for name in tensors if ".experts." in name]:
        weight, path = tensors.pop(name), name.removesuffix(".weight")
        if layout == "fp8":
            parts = {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": torch.full((1, 1), 0.5)}
        else:
            parts = gptq_parts(round_weight(weight, 4, 32, sym=True), 4)
        tensors |= {f"{path}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, weights)
    settings = {
        "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    }
    edit_json(tmp_path / "config.json", quantization_config=settings[layout])
    with pytest.raises(UnexpectedTensor, match=r"experts\.0\..*quantized"):
        load(tmp_path)
