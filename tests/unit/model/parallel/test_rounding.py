"""Activations that are rounded while a base is cut: by the whole row, as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool

from ..conftest import build_model, load, save_model
from ..stored_quantized import group, save_compressed
from .test_architectures import logits

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def all_rows(decoder: Any) -> torch.Tensor:
    return torch.cat([rows.view(-1, rows.shape[-1]) for rows in logits(decoder)])


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_round_rows_like_single_process(kind: str, quantize: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """Sums of another order may move a number of a row to the next code: rarely."""
    directory = save_model(build_model(kind, **SIZES, **KINDS[kind]), tmp_path)
    options: dict[str, Any] = {"quantize": quantize, "activation_dtype": "int8"}
    expected = all_rows(load(directory, **options))
    with rank_pool.load(directory, 2, **options) as base:
        off = (all_rows(base) - expected).abs().amax(1)
    assert float(off.median()) < 1e-4
    assert float(off.mean()) < 0.1


@pytest.mark.parametrize(("bits", "strategy"), [(4, "group"), (8, "channel")])
def test_ranks_round_groups_without_an_exchange(bits: int, strategy: str, rank_pool: RankPool, tmp_path: Path) -> None:
    sizes = {"group_size": 32} if strategy == "group" else {}
    save_compressed(build_model("llama", **SIZES), tmp_path, [group(bits, strategy, **sizes)])
    whole = load(tmp_path)
    assert whole.spec.arithmetic == f"w{bits}a8-g32-o2+w{bits}a8-g32+fp32"
    expected = all_rows(whole)
    with rank_pool.load(tmp_path, 2) as base:
        off = (all_rows(base) - expected).abs().amax(1)
    assert float(off.median()) < 1e-4
    assert float(off.mean()) < 0.1
