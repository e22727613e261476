"""The decoder of a model of images and text computes what the whole model does for text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from adapters_store import LocalStore
from loraserve.errors import UnexpectedTensor
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.loading.load import load_adapter
from loraserve.model.config import wrappers
from loraserve.model.config.model_config import parse_config
from loraserve_kernels.cpu.lora.layout import PackedAdapter

from .conftest import SMALL, PagedRun, edit_json, load, random_tokens, randomize, reference_logits, save_model
from .test_adapter_kinds import publish

_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGES = {**_VISION, "image_size": 16, "patch_size": 8}
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
_QWEN = {"head_dim": 16, "hidden_size": 64, "rope_parameters": _QWEN_ROPE, "tie_word_embeddings": False}
_QWEN_IMAGES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 24}
_GEMMA = {"head_dim": 16, "sliding_window": 7, "sliding_window_pattern": 2, "pad_token_id": 0, "bos_token_id": 1}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", {"model_type": "gemma3_text", **_GEMMA}, _IMAGES),
    "mistral3": ("mistral3", {"model_type": "mistral", "head_dim": 16}, {"model_type": "pixtral", **_IMAGES}),
    "llava": ("llava", {"model_type": "llama"}, {"model_type": "clip_vision_model", **_IMAGES}),
    "qwen2-vl": ("qwen2_vl", _QWEN, {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 64}),
    "qwen2.5-vl": ("qwen2_5_vl", _QWEN, {**_QWEN_IMAGES, "fullatt_block_indexes": [0]}),
    "qwen3-vl": ("qwen3_vl", _QWEN, {**_QWEN_IMAGES, "deepstack_visual_indexes": [0]}),
    "smolvlm": ("smolvlm", {"model_type": "llama", "pad_token_id": 0}, _IMAGES),
    "internvl": ("internvl", {"model_type": "qwen2"}, {**_IMAGES, "image_size": [16, 16], "patch_size": [8, 8]}),
}


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of images and text, and the directory that it's saved in."""
    model_type, text, vision = CASES[request.param]
    config = AutoConfig.for_model(model_type, text_config={**SMALL, **text}, vision_config=vision)
    config._attn_implementation = "eager"
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    return model, save_model(model, tmp_path_factory.mktemp("model"))


def test_logits_equal_wrapper(saved: tuple[Any, Path], caplog: pytest.LogCaptureFixture) -> None:
    model, directory = saved
    token_ids = random_tokens(40)
    with caplog.at_level("INFO"):
        ours = PagedRun(load(directory)).logits(token_ids, [30, 1])
    assert f"serving the decoder of {type(model).__name__}" in caplog.text
    torch.testing.assert_close(ours, reference_logits(model, token_ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], r".*(language_model|text_model).*\.(v|down)_proj"], ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapter_trained_on_wrapper_equals_peft(saved: tuple[Any, Path], targets: Any, tmp_path: Path) -> None:
    model, directory = saved
    # encoders have linears of these names too, which have no part in text
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets)
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(tmp_path / "adapter")
    store, decoder = LocalStore(tmp_path / "store"), load(directory)
    reference = publish(tmp_path / "adapter", store)
    loaded = load_adapter(store, reference, decoder.spec, CpuDevice(decoder.spec, 1 << 30), decoder).host
    assert isinstance(loaded, PackedAdapter)
    token_ids, run = random_tokens(20), PagedRun(decoder)
    (ours,) = run.step([(run.add(token_ids), 20)], lora=[(loaded, 0, 20)])
    torch.testing.assert_close(ours, reference_logits(adapted, token_ids), rtol=0, atol=1e-4)


def test_decoder_equals_wrapper_under_older_names(saved: tuple[Any, Path], tmp_path: Path) -> None:
    """Checkpoints from before transformers 4.52 have the decoder as ``language_model``."""
    _, directory = saved
    tensors = load_file(directory / "model.safetensors")
    renamed = {
        name.replace("model.language_model.", "language_model.model.")
        if "language_model" in name
        else "language_model." + name
        if name.startswith(("model.layers", "model.embed_tokens", "model.norm", "lm_head"))
        else name: tensor
        for name, tensor in tensors.items()
    }
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    save_file(renamed, tmp_path / "model.safetensors")
    token_ids = random_tokens(20)
    older, newer = (PagedRun(load(path)).logits(token_ids, [20]) for path in (tmp_path, directory))
    assert torch.equal(older, newer)
    assert load(tmp_path).spec.digest == load(directory).spec.digest


def test_decoder_refuses_unknown_tensor_of_wrapper(saved: tuple[Any, Path], tmp_path: Path) -> None:
    _, directory = saved
    tensors = load_file(directory / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    save_file({**tensors, "model.memory.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnexpectedTensor, match=r"model\.memory\.weight"):
        load(tmp_path)


def test_wrapper_reads_fields_outside_text_config(tmp_path: Path) -> None:
    """Qwen2-VL's published files have the decoder's fields at the top."""
    model_type, text, vision = CASES["qwen2-vl"]
    config = AutoConfig.for_model(model_type, text_config={**SMALL, **text}, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    save_model(model, tmp_path)
    outside = {**config.text_config.to_dict(), "model_type": "qwen2_vl", "architectures": config.architectures}
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    edit_json(tmp_path / "config.json", **outside)
    edit_json(tmp_path / "config.json", text_config=None, rope_parameters=None, rope_scaling=rope, rope_theta=1000.0)
    edit_json(tmp_path / "config.json", architectures=["Qwen2VLForConditionalGeneration"])
    token_ids = random_tokens(20)
    ours = PagedRun(load(tmp_path)).logits(token_ids, [20])
    torch.testing.assert_close(ours, reference_logits(model, token_ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", wrappers.DEFAULTS)
def test_absent_field_means_default_of_transformers(model_type: str) -> None:
    names = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
    config = AutoConfig.for_model(names.get(model_type, model_type))
    sizes = dict(wrappers.DEFAULTS[model_type])
    theta = sizes.pop("rope_theta", None)
    assert {name: getattr(config, name) for name in sizes} == sizes
    assert theta in (None, config.rope_parameters.get("rope_theta"))


@pytest.mark.parametrize("outside", [None, True, False])
@pytest.mark.parametrize("inside", [None, True, False])
@pytest.mark.parametrize("name", wrappers.WRAPPERS)
def test_wrapper_ties_head_as_transformers(name: str, inside: bool | None, outside: bool | None) -> None:
    text: dict[str, Any] = {"model_type": wrappers.WRAPPERS[name].default}
    config: dict[str, Any] = {"text_config": text}
    if inside is not None:
        text["tie_word_embeddings"] = inside
    if outside is not None:
        config["tie_word_embeddings"] = outside
    expected = getattr(transformers, name).config_class(**copy.deepcopy(config)).tie_word_embeddings
    assert wrappers.text_config({**config, "architectures": [name]})["tie_word_embeddings"] == expected


def test_wrapper_names_match_targets_of_quantization() -> None:
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["language_model.lm_head", "re:model.language_model.layers.0.mlp.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            }
        },
    }
    text = {**SMALL, "model_type": "llama"}
    names = ["LlavaForConditionalGeneration"]
    found = parse_config({"architectures": names, "text_config": text, "quantization_config": quantization}, {})
    assert found.quantization is not None
    assert found.quantization.scheme("lm_head") is None
    assert found.quantization.scheme("model.layers.0.mlp.down_proj") is None
    assert found.quantization.scheme("model.layers.1.mlp.down_proj") is not None


@pytest.mark.parametrize("name", wrappers.WRAPPERS)
def test_wrapper_is_class_of_transformers(name: str) -> None:
    assert hasattr(transformers, name)
