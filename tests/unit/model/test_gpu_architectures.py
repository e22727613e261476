"""Each architecture on a GPU's backend, its kernels in Triton's interpreter, in float16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from loraserve.model.decoder import Decoder
from loraserve.model.inputs import GpuInputs, KVTensors
from loraserve_kernels.gpu.attention.plan import GpuAttentionPlan

from .conftest import BLOCK_SIZE, build_model, load, random_tokens, reference_logits, save_model
from .test_equality import CASES

pytestmark = pytest.mark.interpreted

NAMES = ["granite", "olmo2", "smollm3-window-yarn", "gemma2", "gemma3", "phi3-partial-rope"]
NAMES += ["glm4", "ernie4.5", "hunyuan-alpha-biases", "exaone4", "olmo3-yarn"]
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def make_cache(decoder: Decoder) -> KVTensors:
    num_layers, num_kv_heads, head_dim = decoder.kv_shape
    shape = (4, num_kv_heads, BLOCK_SIZE, head_dim)
    k, v = (tuple(torch.full(shape, float("nan"), dtype=decoder.kv_dtype) for _ in range(num_layers)) for _ in range(2))
    return KVTensors(k=k, v=v, block_size=BLOCK_SIZE)


def step(decoder: Decoder, kv: KVTensors, token_ids: list[int], first: int, end: int) -> Tensor:
    """The logits of these positions of the only sequence, whose blocks are the cache's in order."""
    config = decoder.config
    plan = GpuAttentionPlan(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        max_num_tokens=64,
        max_num_seqs=1,
        max_model_len=64,
        device=torch.device("cpu"),
    )
    plan.fill(*(np.array(x, dtype=np.int32) for x in ([0, end - first], [end], [[0, 1, 2, 3]])))
    positions = torch.arange(first, end)
    inputs = GpuInputs(
        token_ids=torch.tensor(token_ids[first:end]),
        positions=positions.int(),
        slot_mapping=positions,
        attention=plan,
        logits_rows=None,
        lora=None,
        logits_lora=None,
    )
    return decoder.forward(inputs, kv)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_near_transformers(name: str, tmp_path: Path) -> None:
    kind, overrides = CASES[name]
    model = build_model(kind, **{**overrides, **SIZES})
    decoder = load(save_model(model, tmp_path), device="cuda", dtype=torch.float16)
    token_ids, kv = random_tokens(20), make_cache(decoder)
    ours = torch.cat([step(decoder, kv, token_ids, first, end) for first, end in ((0, 14), (14, 19), (19, 20))])
    exact = reference_logits(model, token_ids)
    error = (ours - exact).norm(dim=1) / exact.norm(dim=1)
    # a rounding to eleven bits after each linear of two layers
    assert error.max() < 0.01
