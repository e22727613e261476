"""Files of other tools are refused with what they are and what to do."""

from __future__ import annotations

import numpy as np
import pytest

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.config.kinds import check_kind
from loraserve.adapters.ir import TensorView
from loraserve.errors import AdapterUnsupported
from loraserve.types import BaseSpec

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight", "kohya's LoRA.*language models"),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha", "kohya's LoRA"),
        ("unet.down_blocks.0.attentions.0.to_q.lora_A.weight", "diffusers' LoRA"),
        ("transformer.single_transformer_blocks.0.attn.to_q.lora.down.weight", "diffusers' LoRA"),
        ("down_blocks.0.attn1.processor.to_q_lora.up.weight", "diffusers' older LoRA"),
        ("layers.0.attn.q_proj.lora_a.weight", "torchtune.*FullModelHFCheckpointer"),
        ("transformer.h.0.attn.qkv.lora_A", "LitGPT.*merge_lora"),
        ("decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight", "NeMo"),
        ("model.layers.0.self_attn.q_proj.weight", "a model's checkpoint.*--model DIR.*save_method"),
        ("model.language_model.layers.0.mlp.down_proj.weight", "a model's checkpoint"),
    ],
)
def test_file_is_refused_with_cure(base: BaseSpec, name: str, words: str) -> None:
    tensor = TensorView("F32", (2, 2), np.ones((2, 2), np.float32))
    with pytest.raises(AdapterUnsupported, match=words):
        compile_adapter(CONFIG, {name: tensor}, base)


def test_config_of_model_is_refused_with_cure() -> None:
    with pytest.raises(AdapterUnsupported, match=r"of a whole model.*--model DIR"):
        check_kind({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
