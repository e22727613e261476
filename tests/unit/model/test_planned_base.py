"""What is planned of a base is what loading it takes, and what would refuse it refuses the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stored_words import save_awq, save_fp8, save_gptq

from loraserve.config import EngineConfig
from loraserve.engine.execution.runner import kv_block_bytes
from loraserve.errors import ConfigError, MissingTensor, ModelError, UnknownArchitecture
from loraserve.planning.base import BasePlan, plan_base

from .conftest import build_model, edit_json, load, save_model
from .stored_quantized import WIDE, group, save_compressed, save_nf4


def plan(directory: Path, device: str = "cpu", **fields: Any) -> BasePlan:
    return plan_base(EngineConfig(model_dir=str(directory), model_id="org/base", store_url="", **fields), device)


def assert_planned(directory: Path, device: str = "cpu", *, dtype: str = "auto", quantize: str = "none") -> BasePlan:
    planned = plan(directory, device, dtype=dtype, quantize=quantize)
    decoder = load(directory, device=device, dtype=getattr(torch, planned.dtype), quantize=quantize)
    spec = decoder.spec
    assert abs(planned.num_bytes - spec.size_bytes) <= 0.001 * spec.size_bytes
    assert planned.kv_block_bytes(16) == kv_block_bytes(decoder, 16)
    fields = (
        "modules",
        "module_paths",
        "quantization",
        "num_parameters",
        "max_model_len",
        "biased_modules",
        "is_head_tied",
    )
    assert [getattr(planned.spec, name) for name in fields] == [getattr(spec, name) for name in fields]
    return planned


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("gemma3", {"head_dim": 16, "sliding_window": 7, "pad_token_id": 0, "bos_token_id": 1}),
        ("olmo2", {}),
        ("phi3", {"pad_token_id": 0}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
    ids=str,
)
def test_architecture_memory_matches_plan(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    assert_planned(save_model(build_model(kind, **options), tmp_path))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build_model("qwen2", **WIDE, tie_word_embeddings=True)
    return save_model(model.to(torch.bfloat16), tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize("quantize", ["none", "int8", "int4", "nf4", "fp8"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_format_memory_matches_plan(wide: Path, device: str, quantize: str) -> None:
    planned = assert_planned(wide, device, quantize=quantize)
    formats = {part.name: part.format for part in planned.parts}
    assert (quantize if quantize != "none" else planned.dtype) in {
        p.format for p in planned.parts if p.name == "linears"
    }
    assert formats["embedding"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_memory_matches_plan(wide: Path, dtype: str) -> None:
    assert_planned(wide, dtype=dtype)


@pytest.mark.parametrize(
    ("groups", "format"),
    [
        ([group(4, "group", group_size=64, symmetric=False)], "pack-quantized"),
        ([group(8, "channel")], "int-quantized"),
        ([group(4, "channel", targets=["re:.*down_proj"]), group(8, "group", group_size=64)], "pack-quantized"),
    ],
    ids=["int4 with zeros", "int8", "mixed"],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quantized_checkpoint_memory_matches_plan(
    tmp_path: Path, groups: list[dict[str, Any]], format: str, device: str
) -> None:
    save_compressed(build_model(**WIDE), tmp_path, groups, format=format)
    assert_planned(tmp_path, device)


def test_bitsandbytes_nf4_memory_matches_plan(tmp_path: Path) -> None:
    save_nf4(tmp_path)
    assert_planned(tmp_path)


WORDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (save_gptq, {"group_size": 64}),
    "gptq-8-bits": (save_gptq, {"bits": 8, "sym": True}),
    "gptq-reordered": (save_gptq, {"desc_act": True}),
    "awq": (save_awq, {}),
    "fp8": (save_fp8, {}),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", WORDS)
def test_checkpoint_of_words_takes_planned_memory(tmp_path: Path, kind: str, device: str) -> None:
    save, options = WORDS[kind]
    save(build_model(**WIDE), tmp_path, **options)
    assert_planned(tmp_path, device)


def test_plan_refuses_with_loader_message(tmp_path: Path, wide: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 4096; expected at most 128"):
        plan(wide, max_model_len=4096)
    with pytest.raises(ConfigError, match="float32 isn't available on a GPU"):
        plan(wide, "cuda", dtype="float32")
    with pytest.raises(ModelError, match="isn't a directory"):
        plan(tmp_path / "absent")
    odd = save_model(build_model(), tmp_path / "odd")
    with pytest.raises(ModelError, match="can't be quantized to int4"):
        plan(odd, quantize="int4")
    edit_json(odd / "config.json", num_hidden_layers=4)
    with pytest.raises(MissingTensor, match="The checkpoint lacks"):
        plan(odd)
    edit_json(odd / "config.json", architectures=["OtherForCausalLM"], model_type="other")
    with pytest.raises(UnknownArchitecture):
        plan(odd)


def test_gpu_experts_and_requantization_are_refused(tmp_path: Path) -> None:
    experts = save_model(build_model("mixtral", num_local_experts=4, num_experts_per_tok=2), tmp_path / "experts")
    with pytest.raises(ConfigError, match="aren't served on GPUs"):
        plan(experts, "cuda")
    save_compressed(build_model(**WIDE), tmp_path / "int8", [group(8, "channel")], format="int-quantized")
    with pytest.raises(ConfigError, match="quantized to int8 already"):
        plan(tmp_path / "int8", quantize="int4")


def test_router_is_planned_in_float32_for_any_dtype(tmp_path: Path) -> None:
    model = build_model("mixtral", num_local_experts=4, num_experts_per_tok=2)
    planned = assert_planned(save_model(model, tmp_path), dtype="bfloat16")
    assert {part.format for part in planned.parts if part.name == "routers"} == {"float32"}
