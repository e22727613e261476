"""A server on a base that transformers' code computes: adapters are pushed, certified and answered
in one batch as PEFT answers, and chats work.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import ServerProcess
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    GPTNeoXConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
)

from loraserve import Client
from loraserve.demo.pack import base_dir

from .test_adapter_kinds import KINDS, LORA, check_kinds

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
COHERE_KINDS = {
    **KINDS,
    # norms aren't replaced on such bases
    "saved": {**LORA, "target_modules": ["k_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}
FUSED = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
NEOX_KINDS: dict[str, dict[str, Any]] = {
    "lora": {**LORA, "target_modules": FUSED},
    "dora": {**LORA, "use_dora": True, "target_modules": FUSED[:2]},
    "embeddings": {**LORA, "target_modules": ["embed_in", "embed_out", "query_key_value"]},
}

QWEN_KINDS: dict[str, dict[str, Any]] = {
    "lora": {**LORA, "target_modules": ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "down_proj"]},
    "rslora": KINDS["rslora"],
    "dora": {**LORA, "use_dora": True, "target_modules": ["in_proj_qkv", "out_proj", "o_proj"]},
    "activated": KINDS["activated"],
}
KINDS_OF: dict[type[PreTrainedConfig], dict[str, dict[str, Any]]] = {
    CohereConfig: COHERE_KINDS,
    GPTNeoXConfig: NEOX_KINDS,
    Qwen3_5TextConfig: QWEN_KINDS,
}
RECURRENT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def save_base(config_class: type[PreTrainedConfig], directory: Path) -> Path:
    """Save a random base with the toy's tokens."""
    toy = AutoConfig.from_pretrained(base_dir())
    config = config_class(
        **SIZES,
        **(RECURRENT if config_class is Qwen3_5TextConfig else {}),
        vocab_size=toy.vocab_size,
        pad_token_id=0,
        bos_token_id=toy.bos_token_id,
        eos_token_id=toy.eos_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape) * 1.5 * parameter.shape[1] ** -0.5)
    model.save_pretrained(directory)
    for file in base_dir().iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special_tokens")):
            shutil.copy(file, directory)
    return directory


@pytest.mark.parametrize("config_class", KINDS_OF)
def test_adapters_answer_on_modelled_base_as_peft(config_class: type[PreTrainedConfig], tmp_path: Path) -> None:
    base = save_base(config_class, tmp_path / "base")
    server = ServerProcess(tmp_path / "data", model=base)
    server.start()
    try:
        resident, kinds = server.admin().base(), KINDS_OF[config_class]
        assert resident.implementation == "transformers"
        assert resident.has_recurrent_state == (config_class is Qwen3_5TextConfig)
        check_kinds(server, base, tmp_path, num_steps=8 if resident.has_recurrent_state else 3, kinds=kinds)
        with Client(server.url, api_key=server.make_tenant("chats")) as client:
            version = client.adapters.push(str(tmp_path / "lora"), name="lora")
            assert set(version.target_modules) == set(kinds["lora"]["target_modules"])
            assert version.certificate is not None
            assert version.certificate.verdict == "passed"
            answer = client.chat.completions.create(
                model="lora", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens > 0
    finally:
        assert server.stop() == 0
