"""Bases in words of codes or FP8 blocks over two processes answer as in one, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from stored_words import save_awq, save_fp8, save_gptq

from loraserve.errors import ConfigError, ModelError
from loraserve.model.checkpoint.blueprint import draw
from loraserve.model.checkpoint.cutting import check_grid
from loraserve.model.checkpoint.files import open_checkpoint
from loraserve.model.config.model_config import read_config
from loraserve.model.parallel.grid import Grid
from loraserve.model.parallel.rank_part import cut_site
from loraserve.model.parallel.shard import SiteCut

from ..checkpoint.test_word_codes import assembled
from ..conftest import build_model, load
from .test_architectures import logits

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
SAVES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (save_gptq, {"group_size": 64}),
    "awq": (save_awq, {}),
    "fp8": (save_fp8, {}),
    "fp8-cut-blocks": (save_fp8, {"block": (128, 96)}),
}


@pytest.mark.parametrize("kind", SAVES)
def test_ranks_with_word_codes_match_single_process(kind: str, rank_pool: RankPool, tmp_path: Path) -> None:
    save, options = SAVES[kind]
    save(build_model(**SIZES), tmp_path, **options)
    # sums of ranks differ in their last bits, which rounding would carry on
    expected = logits(load(tmp_path, activation_dtype="float"))
    with rank_pool.load(tmp_path, 2, activation_dtype="float") as base:
        for got, wanted in zip(logits(base), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_reordered_inputs_arent_cut(tmp_path: Path) -> None:
    save_gptq(build_model(**SIZES), tmp_path, desc_act=True)
    blueprint = draw(read_config(tmp_path), open_checkpoint(tmp_path).tensors, "none")
    check_grid(blueprint, Grid(1, 2))
    with pytest.raises(ConfigError, match=r"the inputs of .*o_proj are quantized in another order .*desc_act"):
        check_grid(blueprint, Grid(2, 1))


def test_reordered_inputs_denied_by_config_are_not_cut(tmp_path: Path) -> None:
    save_gptq(build_model(**SIZES), tmp_path, desc_act=True)
    weight = assembled(tmp_path, "model.layers.0.self_attn.o_proj")
    with pytest.raises(ModelError, match="quantized in another order than they stand"):
        cut_site(SiteCut(None, (0, 128)), weight, None, 0, 256)
