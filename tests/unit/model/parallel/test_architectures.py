"""Each architecture over two and four processes answers as in one: its linears cut, its layers
shared out, or both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import default_and_campaign
from rank_pool import RankPool

from ..conftest import CONFIGS, PagedRun, build_model, load, random_tokens, save_model

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
# what four ranks can share
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "phi3": {"pad_token_id": 0},
    "smollm3": {"pad_token_id": 0, "bos_token_id": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
        "norm_topk_prob": True,
    },
    "qwen2-moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {"head_dim": 32},
    "vaultgemma": {"head_dim": 32},
    "olmo3": {"sliding_window": 9},
    "exaone4": {"sliding_window": 9, "sliding_window_pattern": 2, "head_dim": 16},
    "ernie4.5": {"head_dim": 16, "use_bias": True},
    "helium": {"head_dim": 16, "pad_token_id": 0},
    "glm": {"head_dim": 16, "pad_token_id": 0},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "ministral": {"head_dim": 16},
    "ministral3": {"head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    "seed-oss": {"head_dim": 16},
    "hunyuan": {"head_dim": 16, "attention_bias": True},
    "qwen3": {"head_dim": 32},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.7},
    "gemma2": {"head_dim": 32},
    "gemma3": {"head_dim": 32},
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
}


NUM_LAYERS = 5
"""So that stages have different numbers of them."""


def logits(decoder: Any) -> list[torch.Tensor]:
    """The logits of a few steps of several sequences, some of them in micro-batches."""
    tokens = [random_tokens(count, seed=count) for count in (20, 1, 37, 11, 12, 13, 14, 15)]
    run = PagedRun(decoder)
    sequences = [run.add(token_ids) for token_ids in tokens]
    first = run.step([(s, max(1, len(s.token_ids) - 3)) for s in sequences])
    later = [run.step([(s, 1) for s in sequences if s.num_computed < len(s.token_ids)]) for _ in range(3)]
    return [*first, *(rows for step in later for rows in step)]


EVERY_GRID = ("llama", "gemma2", "mixtral")
"""Kinds that the default run computes over each grid; the campaign each kind."""
TENSOR_SIZES = default_and_campaign(
    [(kind, size) for kind in CONFIGS for size in (2, 4)],
    default=[(kind, size) for kind in CONFIGS for size in (2, 4) if size == 4 or kind in EVERY_GRID],
)
GRIDS = default_and_campaign(
    [(kind, grid) for kind in CONFIGS for grid in ((1, 2), (1, 4), (2, 2))],
    # both cut and shared out
    default=[
        (kind, grid) for kind in CONFIGS for grid in ((1, 2), (1, 4), (2, 2)) if grid == (2, 2) or kind in EVERY_GRID
    ],
)


@pytest.mark.parametrize(("kind", "size"), TENSOR_SIZES)
def test_tensor_parallel_logits_match_single_process(kind: str, size: int, rank_pool: RankPool, tmp_path: Path) -> None:
    directory = save_model(build_model(kind, **{**SIZES, **OPTIONS.get(kind, {})}), tmp_path)
    expected = logits(load(directory))
    with rank_pool.load(directory, size) as base:
        for got, wanted in zip(logits(base), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
        # each rank has a part of the cache, and of what a step exchanges
        assert base.kv_shape[1] == max(1, base.config.num_kv_heads // size)
        assert all(rank.sum_bytes > 0 and rank.sum_s > 0 for rank in base.traffic)


@pytest.mark.parametrize(("kind", "grid"), GRIDS)
def test_pipeline_logits_match_single_process(
    kind: str, grid: tuple[int, int], rank_pool: RankPool, tmp_path: Path
) -> None:
    options = {**SIZES, **OPTIONS.get(kind, {}), "num_hidden_layers": NUM_LAYERS}
    directory = save_model(build_model(kind, **options), tmp_path)
    whole = load(directory)
    expected = logits(whole)
    with rank_pool.load(directory, *grid) as base:
        for got, wanted in zip(logits(base), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
        # the last stage's layers alone, and nothing is lost of what the base is
        assert base.kv_shape[0] == NUM_LAYERS // grid[1]
        assert (base.spec.digest, base.spec.arithmetic) == (whole.spec.digest, whole.spec.arithmetic)
        assert [rank.transfer_bytes > 0 for rank in base.traffic] == [
            base.grid.stage_index(rank) > 0 for rank in range(base.grid.size)
        ]
        assert base.group_forward.num_micro_batches > 4
