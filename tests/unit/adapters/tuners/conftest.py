"""PEFT itself, on a tiny Llama: it saves what we compile,
and says what its modules then compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import CONFIG_FILE, WEIGHTS_FILE, PeftAdapter, read_adapter
from loraserve.adapters.ir import AdapterIR, ModuleIR, TensorView
from loraserve.limits import LIMITS, Limits
from loraserve.types import BaseSpec


def _make_model(dtype: torch.dtype = torch.float32) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_bias=True,
        mlp_bias=True,
    )
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    return model.to(dtype).eval()


def _save_adapter(
    directory: Path,
    config: peft.PeftConfig,
    dtype: torch.dtype = torch.float32,
    model: transformers.PreTrainedModel | None = None,
) -> PeftAdapter:
    """What PEFT's save_pretrained writes of an adapter with random weights; `model`, if given,
    has it then.
    """
    model = peft.get_peft_model(model or _make_model(dtype), config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    model.save_pretrained(directory)
    return read_adapter((directory / CONFIG_FILE).read_bytes(), (directory / WEIGHTS_FILE).read_bytes())


def _load_adapter(directory: Path) -> dict[str, BaseTunerLayer]:
    """PEFT's own modules, read back from the files, by their names in the base."""
    model = peft.PeftModel.from_pretrained(_make_model(), directory).eval()
    return {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer)
    }


def _compile(adapter: PeftAdapter, base: BaseSpec, limits: Limits = LIMITS) -> AdapterIR:
    return compile_adapter(adapter.config, adapter.tensors, base, limits)


def _as_tensor(view: TensorView) -> torch.Tensor:
    if view.dtype == "BF16":
        return torch.from_numpy((view.array.astype(np.uint32) << 16).view(np.float32))
    return torch.from_numpy(view.array.astype(np.float32))


def _delta(m: ModuleIR) -> torch.Tensor:
    assert m.lora_a is not None
    assert m.lora_b is not None
    assert m.lora_a.shape[0] == m.lora_b.shape[1] == m.rank
    return m.scaling * (_as_tensor(m.lora_b) @ _as_tensor(m.lora_a))


@pytest.fixture
def make_model() -> Callable[..., transformers.LlamaForCausalLM]:
    return _make_model


@pytest.fixture
def save_adapter() -> Callable[..., PeftAdapter]:
    return _save_adapter


@pytest.fixture
def load_adapter() -> Callable[[Path], Mapping[str, Any]]:
    return _load_adapter


@pytest.fixture
def compile_kind() -> Callable[..., AdapterIR]:
    return _compile


@pytest.fixture
def as_tensor() -> Callable[[TensorView], torch.Tensor]:
    return _as_tensor


@pytest.fixture
def delta() -> Callable[[ModuleIR], torch.Tensor]:
    return _delta
