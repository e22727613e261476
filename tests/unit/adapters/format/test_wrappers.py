"""Adapters whose models were wrapped while they were trained are those of the plain model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaConfig, LlamaForCausalLM

from loraserve.adapters.compiler import open_adapter
from loraserve.adapters.ir import AdapterIR
from loraserve.errors import AdapterFormatError, AdapterRejected
from loraserve.types import BaseSpec

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPRESSION = r".*language_model.*(?:self_attn|mlp)\.(?:q_proj|down_proj)"
"""Targets as trainers of models of images and text write them; plain decoders lack that path."""


def decoder() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64, num_hidden_layers=3, head_dim=16))


class ImagesAndText(nn.Module):
    """The shape of LLaVA's and older Gemma 3's models."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = decoder()


class TextModel(nn.Module):
    """The shape of Idefics' and SmolVLM's models."""

    def __init__(self) -> None:
        super().__init__()
        plain = decoder()
        self.model, self.lm_head = nn.Module(), plain.lm_head
        self.model.text_model = plain.model


class NewerImagesAndText(nn.Module):
    """The shape of Qwen2.5-VL's and newer Gemma 3's models."""

    def __init__(self) -> None:
        super().__init__()
        plain = decoder()
        self.model, self.lm_head = nn.Module(), plain.lm_head
        self.model.language_model = plain.model


def trained(model: nn.Module, **config: Any) -> Any:
    config = {"target_modules": ["q_proj", "down_proj", "lm_head"], "r": 4, **config}
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(**config))
    for number, (name, parameter) in enumerate(sorted(adapted.named_parameters(), key=lambda item: plain(item[0]))):
        if "lora_" in name:
            generator = torch.Generator().manual_seed(number)
            parameter.data = torch.randn(parameter.shape, generator=generator) / 8
    return adapted


def plain(name: str) -> str:
    for word in ("_orig_mod.", "_checkpoint_wrapped_module.", "language_model.", "text_model."):
        name = name.replace(word, "")
    return name.replace("model.model.model.", "model.model.")


def saved(adapted: Any, folder: Path) -> tuple[bytes, bytes]:
    adapted.save_pretrained(folder)
    return (folder / "adapter_config.json").read_bytes(), (folder / "adapter_model.safetensors").read_bytes()


def compiled_layers(model: LlamaForCausalLM) -> nn.Module:
    return torch.compile(model)


def checkpointed_layers(model: LlamaForCausalLM) -> nn.Module:
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    return model


def contents(ir: AdapterIR) -> dict[tuple[int, str], list[Any]]:
    return {(m.layer, m.module): [np.asarray(t.array) for t in m.tensors.values()] for m in ir.modules}


def assert_same(found: AdapterIR, expected: AdapterIR) -> None:
    ours, theirs = contents(found), contents(expected)
    assert list(ours) == list(theirs)
    for place, arrays in theirs.items():
        for one, other in zip(ours[place], arrays, strict=True):
            assert one.shape == other.shape, place


@pytest.fixture
def expected(tmp_path: Path, make_base: Callable[..., BaseSpec]) -> AdapterIR:
    return open_adapter(*saved(trained(decoder()), tmp_path / "plain"), make_base())


WRAPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "torch.compile": (lambda: compiled_layers(decoder()), "left out _orig_mod, torch.compile's"),
    "images": (ImagesAndText, "left out language_model, the decoder's path in a model of images and text"),
    "text model": (TextModel, "left out text_model, the decoder's path in a model of images and text"),
    "newer images": (NewerImagesAndText, "left out language_model, the decoder's path in a model of images and text"),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_model_gives_the_plain_adapter(
    name: str, tmp_path: Path, expected: AdapterIR, make_base: Callable[..., BaseSpec]
) -> None:
    wrapped, note = WRAPPED[name]
    found = open_adapter(*saved(trained(wrapped()), tmp_path / "wrapped"), make_base())
    assert_same(found, expected)
    assert found.renames == (note,)


def test_target_patterns_match_trained_paths(tmp_path: Path, make_base: Callable[..., BaseSpec]) -> None:
    adapted = trained(
        ImagesAndText(),
        target_modules=EXPRESSION,
        rank_pattern={r"language_model\.model\.layers\.1\.mlp\.down_proj": 2},
    )
    found = open_adapter(*saved(adapted, tmp_path / "wrapped"), make_base())
    assert {m.rank for m in found.modules if (m.layer, m.module) == (1, "down_proj")} == {2}
    assert {m.module for m in found.modules} == {"q_proj", "down_proj"}


def test_running_model_gives_the_plain_adapter(
    tmp_path: Path, expected: AdapterIR, make_base: Callable[..., BaseSpec]
) -> None:
    adapted = trained(decoder())
    config, weights = saved(adapted, tmp_path / "plain")
    state = {f"module.{name}": tensor for name, tensor in adapted.state_dict().items() if "lora_" in name}
    found = open_adapter(config, save(state), make_base())
    assert_same(found, expected)
    assert found.renames == (
        "left out module., DistributedDataParallel's",
        "left out .default, the adapter's name in a running model",
    )
    bare = {
        name.removeprefix("base_model.model."): tensor
        for name, tensor in load_file(tmp_path / "plain" / "adapter_model.safetensors").items()
    }
    found = open_adapter(config, save(bare), make_base())
    assert_same(found, expected)
    assert found.renames == ("added base_model.model",)
    assert open_adapter(config, weights, make_base()).renames == ()


def test_checkpointed_layers_give_the_plain_adapter(
    tmp_path: Path, expected: AdapterIR, make_base: Callable[..., BaseSpec]
) -> None:
    config, _ = saved(trained(decoder()), tmp_path / "plain")
    # PEFT's own save loses them: loops that gather shards save the parameters by their names
    adapted = trained(checkpointed_layers(decoder()))
    state = {name: parameter.data for name, parameter in adapted.named_parameters() if "lora_" in name}
    found = open_adapter(config, save(state), make_base())
    assert_same(found, expected)
    assert "left out _checkpoint_wrapped_module, activation checkpointing's" in found.renames


def test_names_of_fsdp_are_left_out(tmp_path: Path, expected: AdapterIR, make_base: Callable[..., BaseSpec]) -> None:
    config, _ = saved(trained(decoder()), tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    sharded = {name.replace(".self_attn.", "._fsdp_wrapped_module.self_attn."): t for name, t in tensors.items()}
    found = open_adapter(config, save(sharded), make_base())
    assert_same(found, expected)
    assert found.renames == ("left out _fsdp_wrapped_module, FSDP's",)


def test_foreign_names_are_refused_as_written(tmp_path: Path, make_base: Callable[..., BaseSpec]) -> None:
    config, _ = saved(trained(decoder()), tmp_path / "plain")
    with pytest.raises(AdapterRejected, match=r"'blocks\.lora_down\.weight' doesn't begin with"):
        open_adapter(config, save({"blocks.lora_down.weight": torch.zeros(4, 32)}), make_base())


def test_duplicate_tensor_is_refused(tmp_path: Path, make_base: Callable[..., BaseSpec]) -> None:
    config, _ = saved(trained(decoder()), tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name.replace("base_model.model.", "base_model.model._orig_mod.")] = tensors[name].clone()
    with pytest.raises(AdapterFormatError, match="are one tensor"):
        open_adapter(config, save(tensors), make_base())


def test_encoder_linears_are_left_out_and_named(tmp_path: Path, make_base: Callable[..., BaseSpec]) -> None:
    config, _ = saved(trained(ImagesAndText()), tmp_path / "wrapped")
    tensors = load_file(tmp_path / "wrapped" / "adapter_model.safetensors")
    name = "base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight"
    more = {**tensors, name: torch.zeros(4, 32)}
    plain, found = (open_adapter(config, save(held), make_base()) for held in (tensors, more))
    assert [m.module for m in found.modules] == [m.module for m in plain.modules]
    assert "left out what reads images, which has no part in text" in found.renames
    assert json.loads(config)["r"] == 4


def test_adapter_of_encoder_alone_is_refused(tmp_path: Path, make_base: Callable[..., BaseSpec]) -> None:
    config, _ = saved(trained(ImagesAndText()), tmp_path / "wrapped")
    name = "base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight"
    with pytest.raises(AdapterRejected, match=r"All tensors belong to what reads images, '.*vision_tower.*q_proj"):
        open_adapter(config, save({name: torch.zeros(4, 32)}), make_base())
