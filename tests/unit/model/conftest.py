"""Builders for the model's tests: random checkpoints as transformers saves them, and a paged cache
whose unused bytes are NaN.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    VaultGemmaConfig,
)

from loraserve.model.checkpoint.loader import load_model
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.model.states import RecurrentStates, StateUse
from loraserve_kernels.common.plan import make_plan
from loraserve_kernels.cpu.lora.layout import LAYER_MODULES, LoraModule, PackedAdapter, pack_adapter

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "granite": GraniteConfig,
    "olmo2": Olmo2Config,
    "smollm3": SmolLM3Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "phi3": Phi3Config,
    "mixtral": MixtralConfig,
    "qwen3-moe": Qwen3MoeConfig,
    "gemma": GemmaConfig,
    "vaultgemma": VaultGemmaConfig,
    "olmo3": Olmo3Config,
    "olmoe": OlmoeConfig,
    "qwen2-moe": Qwen2MoeConfig,
    "exaone4": Exaone4Config,
    "seed-oss": SeedOssConfig,
    "ernie4.5": Ernie4_5Config,
    "helium": HeliumConfig,
    "glm": GlmConfig,
    "glm4": Glm4Config,
    "hunyuan": HunYuanDenseV1Config,
    "ministral": MinistralConfig,
    "ministral3": Ministral3Config,
}
SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
BLOCK_SIZE = 16


def build_model(kind: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model in float32 whose logits have a deviation near 1, so that an error of
    1e-4 is one in ten thousand.
    """
    config = CONFIGS[kind](**{**SMALL, **overrides})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, seed=seed)
    return model


def randomize(model: Any, *, seed: int = 0) -> None:
    """Draw a model's weights as `build_model` does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                # Gemma's weights are what is added to 1
                parameter.copy_(0.2 * noise if "gemma" in model.config.model_type else 1 + 0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name and not model.config.tie_word_embeddings:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[1] ** -0.5)


def save_model(model: Any, directory: Path, *, max_shard_size: str = "5GB") -> Path:
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def edit_json(path: Path, **changes: Any) -> None:
    """Set these keys of a JSON file; None deletes."""
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def load(directory: Path, **options: Any) -> Decoder:
    settings = {
        "model_id": "org/base",
        "dtype": torch.float32,
        "quantize": "none",
        "device": "cpu",
        "max_model_len": None,
        **options,
    }
    return load_model(directory, **settings)


@torch.no_grad()
def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """transformers' logits of every position, [num_tokens, vocab_size]."""
    logits: Tensor = model(input_ids=torch.tensor([token_ids])).logits[0]
    return logits


@dataclass
class Sequence:
    """One sequence in a `PagedRun`: tokens, blocks, how many tokens are computed, and where its
    state is.
    """

    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    state: StateUse = field(default_factory=lambda: StateUse(0))


class PagedRun:
    """Runs a decoder over several sequences whose blocks lie shuffled in a cache full of NaN."""

    def __init__(self, decoder: Decoder, *, num_blocks: int = 64, block_size: int = BLOCK_SIZE, seed: int = 0) -> None:
        self.decoder, self.block_size = decoder, block_size
        num_layers, num_kv_heads, head_dim = decoder.kv_shape
        shape = (num_blocks, num_kv_heads, block_size, head_dim)

        def poisoned() -> tuple[Tensor, ...]:
            return tuple(torch.full(shape, float("nan"), dtype=decoder.kv_dtype) for _ in range(num_layers))

        shapes = getattr(decoder, "state_shapes", {})
        states = RecurrentStates(shapes, 4, 4) if shapes else None
        self.kv = KVTensors(k=poisoned(), v=poisoned(), block_size=block_size, states=states)
        self._num_sequences = 0
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def add(self, token_ids: list[int]) -> Sequence:
        self._num_sequences += 1
        return Sequence(token_ids, state=StateUse(self._num_sequences % 4))

    def step(
        self,
        work: list[tuple[Sequence, int]],
        *,
        last_rows_only: bool = False,
        no_logits: bool = False,
        lora: list[tuple[PackedAdapter, int, int]] | None = None,
    ) -> list[Tensor]:
        """Compute the next `count` tokens of each sequence in one batch;
        return the logits of each one's rows.
        """
        token_ids, positions, slots, starts, lens = [], [], [], [0], []
        rows: list[int] = []
        for sequence, count in work:
            first = sequence.num_computed
            sequence.num_computed += count
            while len(sequence.blocks) * self.block_size < sequence.num_computed:
                sequence.blocks.append(self._free.pop())
            for position in range(first, sequence.num_computed):
                token_ids.append(sequence.token_ids[position])
                positions.append(position)
                slots.append(
                    sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size
                )
            if not no_logits:
                rows.extend(range(len(token_ids) - (1 if last_rows_only else count), len(token_ids)))
            starts.append(len(token_ids))
            lens.append(sequence.num_computed)
        width = max(len(sequence.blocks) for sequence, _ in work)
        inputs = ModelInputs(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_starts=starts,
            context_lens=lens,
            block_tables=torch.tensor([s.blocks + [0] * (width - len(s.blocks)) for s, _ in work], dtype=torch.int32),
            logits_rows=torch.tensor(rows, dtype=torch.int64),
            lora=make_plan(lora or [], len(token_ids)),
            states=None if self.kv.states is None else [sequence.state for sequence, _ in work],
        )
        logits = self.decoder.forward(inputs, self.kv)
        counts = [0 if no_logits else 1 if last_rows_only else count for _, count in work]
        return list(torch.split(logits, counts))

    def logits(self, token_ids: list[int], chunks: list[int]) -> Tensor:
        """The logits of a whole sequence computed in these chunks;
        what the chunks leave is decoded token by token.
        """
        sequence = self.add(token_ids)
        rest = len(token_ids) - sum(chunks)
        return torch.cat([self.step([(sequence, count)])[0] for count in [*chunks, *[1] * rest]])


def random_tokens(count: int, *, seed: int = 0, vocab_size: int = SMALL["vocab_size"]) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(count)]


def random_adapter(
    decoder: Decoder, rank: int, *, seed: int = 0, modules: tuple[str, ...] | None = None
) -> PackedAdapter:
    """An adapter on every layer, about as strong as the base."""
    generator = torch.Generator().manual_seed(seed)
    shapes = decoder.spec.modules
    matrices = [
        LoraModule(
            layer,
            module,
            torch.randn(rank, shapes[module][1], generator=generator) * shapes[module][1] ** -0.5,
            torch.randn(shapes[module][0], rank, generator=generator) * rank**-0.5,
            0.5,
        )
        for layer in range(decoder.spec.num_layers)
        for module in modules or LAYER_MODULES
    ]
    return pack_adapter(matrices, num_layers=decoder.spec.num_layers, module_shapes=shapes, dtype=torch.float32)


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A small Llama of transformers, and the directory that it's saved in."""
    model = build_model()
    return model, save_model(model, tmp_path_factory.mktemp("llama"))
