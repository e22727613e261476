"""Rows beyond the base's with kinds beside LoRA."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.ir import TensorView
from loraserve.errors import AdapterUnsupported
from loraserve.types import BaseSpec

PREFIX = "base_model.model."
CONFIG = {"peft_type": "ADALORA", "init_r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}


def ones(*shape: int) -> TensorView:
    array = np.ones(shape, np.float32)
    return TensorView("F32", shape, array)


def test_adalora_of_resized_base_is_refused(make_base: Callable[..., BaseSpec]) -> None:
    base = make_base()
    out_features, in_features = base.modules["q_proj"]
    tensors = {}
    for layer in range(base.num_layers):
        path = f"{PREFIX}model.layers.{layer}.self_attn.q_proj."
        tensors |= {path + "lora_A": ones(2, in_features), path + "lora_B": ones(out_features, 2)}
        tensors[path + "lora_E"] = ones(2, 1)
    for name in ("lm_head", "model.embed_tokens"):
        tensors[f"{PREFIX}{name}.weight"] = ones(base.vocab_size, base.hidden_size)
    assert compile_adapter(CONFIG, tensors, base).extra_rows is None
    for name in ("lm_head", "model.embed_tokens"):
        tensors[f"{PREFIX}{name}.weight"] = ones(base.vocab_size + 2, base.hidden_size)
    with pytest.raises(AdapterUnsupported, match="2 rows beyond the base's, which are served with LoRA alone"):
        compile_adapter(CONFIG, tensors, base)
