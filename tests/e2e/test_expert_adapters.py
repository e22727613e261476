"""Adapters of a mixture's experts, pushed through the API, answer as PEFT answers, also after a
restart.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import ServerProcess
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from loraserve import Client
from loraserve.demo.pack import base_dir

from .test_adapter_kinds import LORA, MAX_TOKENS, PROMPT, check_kinds

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "FutureWarning", "RuntimeWarning")
]

KINDS: dict[str, dict[str, Any]] = {
    "attention": {**LORA, "target_modules": ["q_proj", "v_proj"]},
    "experts": {
        **LORA,
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"mlp.experts.down_proj": 2},
    },
    "router": {**LORA, "target_modules": [], "target_parameters": ["mlp.gate.weight", "experts.down_proj"]},
}


def save_mixture(directory: Path) -> Path:
    """Save a small mixture of experts with random weights and the demo's tokenizer."""
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=AutoModelForCausalLM.from_pretrained(base_dir()).config.vocab_size,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base_dir() / name, directory)
    return directory


def test_adapters_of_experts_answer_as_peft(tmp_path: Path) -> None:
    base = save_mixture(tmp_path / "base")
    server = ServerProcess(tmp_path / "data", model=base)
    server.start()
    try:
        check_kinds(server, base, tmp_path, num_steps=6, kinds=KINDS)
        key = server.make_tenant("again")
        with Client(server.url, api_key=key) as client:
            version = client.adapters.push(str(tmp_path / "experts"), name="experts")
            assert version.certificate is not None
            assert version.certificate.verdict == "passed"
            assert version.target_modules == ["q_proj", "experts.gate_proj", "experts.up_proj", "experts.down_proj"]
            before = answer(client)
        assert server.stop() == 0
        server.start()
        with Client(server.url, api_key=key) as client:
            assert answer(client) == before
    finally:
        assert server.stop() == 0


def answer(client: Client) -> list[int]:
    answered = client.completions.create(
        model="experts", prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0, return_token_ids=True
    )
    found: list[int] = answered.choices[0].token_ids
    return found
