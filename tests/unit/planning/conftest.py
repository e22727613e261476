"""A base of a plan's making, without a file of it."""

from __future__ import annotations

from typing import Any

import pytest

from loraserve.config import EngineConfig
from loraserve.memory.memory_plan import MemoryPlan
from loraserve.model.config.model_config import parse_config
from loraserve.planning.base import BasePlan
from loraserve.planning.memory import ArenaPlan
from loraserve.types import BaseSpec, Digest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 603,
    "hidden_size": 200,
    "intermediate_size": 1058,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 18,
    "max_position_embeddings": 128,
}


class Builders:
    """What tests make."""

    @staticmethod
    def base(device: str = "cpu", num_bytes: int = 1 << 20, modules: Any = None, **fields: Any) -> BasePlan:
        """A small llama of odd widths, of any size."""
        config = parse_config({**CONFIG, **fields}, {})
        hidden, vocab = config.hidden_size, config.vocab_size
        modules = modules or {**config.module_shapes, "lm_head": (vocab, hidden), "embed_tokens": (hidden, vocab)}
        dtype = "float32" if device == "cpu" else "bfloat16"
        spec = BaseSpec(
            id="base",
            digest=Digest(""),
            architecture="LlamaForCausalLM",
            num_layers=config.num_layers,
            hidden_size=hidden,
            vocab_size=vocab,
            max_model_len=config.max_model_len,
            modules=modules,
            module_paths={
                **config.architecture.module_paths,
                "lm_head": "lm_head",
                "embed_tokens": "model.embed_tokens",
            },
            layers_path="model.layers",
            eos_token_ids=(),
            dtype=dtype,
            quantization="none",
            size_bytes=num_bytes,
        )
        return BasePlan(config, device, dtype, config.max_model_len, (), spec)

    @staticmethod
    def config(**fields: Any) -> EngineConfig:
        return EngineConfig(**{"model_dir": "", "model_id": "base", "store_url": "", **fields})

    @staticmethod
    def arena(num_pages: int = 1000, *, page_bytes: int = 4096, sequence_blocks: int = 8, **fields: Any) -> ArenaPlan:
        """By default a KV block is a page."""
        division = MemoryPlan(num_pages, page_bytes, page_bytes, num_kv_pages=sequence_blocks)
        values = {"max_tiles": 1000, "block_size": 16, **fields}
        return ArenaPlan(
            num_pages * page_bytes, "a test", division, page_bytes, sequence_blocks=sequence_blocks, **values
        )


@pytest.fixture
def make() -> type[Builders]:
    return Builders
