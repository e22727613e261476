"""Formats that a base can be served in, and which is recommended."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from loraserve.base_advice import is_low
from loraserve.config import EngineConfig
from loraserve.demo.pack import base_dir
from loraserve.model.config.model_config import ExpertsConfig
from loraserve.model.config.quantization_config import parse_quantization
from loraserve.planning.base import Part, plan_base
from loraserve.planning.base_formats import FormatPlan, plan_formats, token_bytes

CONFIG = EngineConfig(model_dir=str(base_dir()), model_id="demo", store_url="file:///unused")
NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32", "bnb_4bit_use_double_quant": False}


def formats_of(device: str = "cpu", **changes: str) -> dict[str, FormatPlan]:
    config = msgspec.structs.replace(CONFIG, **changes)
    return {one.name: one for one in plan_formats(config, plan_base(config, device))}


@pytest.mark.parametrize(
    ("changes", "planned"),
    [
        ({}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"quantize": "int8"}, "int8"),
        ({"quantize": "int8", "activation_dtype": "float"}, "int8, float activations"),
        ({"quantize": "int4"}, "int4"),
    ],
)
def test_planned_format_has_the_bytes_of_the_plan(changes: dict[str, str], planned: str) -> None:
    formats = formats_of(**changes)
    assert [name for name, one in formats.items() if one.is_planned] == [planned]
    assert formats[planned].num_bytes == plan_base(msgspec.structs.replace(CONFIG, **changes), "cpu").num_bytes


def test_recommended_format_reads_least_while_keeping_answers() -> None:
    formats = formats_of()
    (best,) = [one for one in formats.values() if one.is_recommended]
    assert not is_low(best.agreement, best.divergence)
    kept = [one for one in formats.values() if not is_low(one.agreement, one.divergence)]
    assert best.token_bytes == min(one.token_bytes for one in kept)
    assert best.flags == "--quantize int8"
    sizes = [one.num_bytes for one in formats.values()]
    assert sizes == sorted(sizes, reverse=True)


def test_gpu_rounds_no_activations() -> None:
    formats = formats_of("cuda")
    assert "float32" not in formats
    assert "int8" not in formats
    assert formats["int8, float activations"].flags == "--quantize int8"


def test_experts_are_read_in_part() -> None:
    dense = plan_base(CONFIG, "cpu")
    read = sum(part.num_bytes for part in dense.parts if part.name in ("linears", "head", "norms"))
    assert token_bytes(dense) == read
    experts = ExpertsConfig(num_experts=8, num_chosen=2, intermediate_size=64, is_normed=True)
    sparse = replace(
        dense, config=replace(dense.config, experts=experts), parts=(*dense.parts, Part("experts", "int8", 800))
    )
    assert token_bytes(sparse) == read + 200


def test_rounded_checkpoint_has_no_choice() -> None:
    base = plan_base(CONFIG, "cpu")
    stored = parse_quantization({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, **NF4}})
    assert stored is not None
    assert plan_formats(CONFIG, replace(base, config=replace(base.config, quantization=stored))) == ()
