"""A checkpoint's own weights, streamed, compute what transformers computes with them;
and nothing of them stays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loraserve.model.checkpoint.original import OriginalBase
from loraserve.model.reference_model import evaluate
from loraserve.model.reference_pass import Subject

from ..conftest import CONFIGS, build_model, random_tokens, reference_logits, save_model
from ..stored_quantized import WIDE, group, save_compressed, save_nf4

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen2-moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 24,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "olmo3": {"sliding_window": 9},
    "exaone4": {"sliding_window": 9, "sliding_window_pattern": 2},
    "glm": {"pad_token_id": 0},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "helium": {"head_dim": 12, "pad_token_id": 0},
    "ministral": {"head_dim": 16},
    "ministral3": {"head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    "hunyuan": {"head_dim": 16},
    "phi3": {"pad_token_id": 0},
    "smollm3": {"pad_token_id": 0, "bos_token_id": 1},
}


def logits(directory: Path, token_ids: list[int]) -> torch.Tensor:
    (found,) = evaluate(OriginalBase(directory, torch.device("cpu")), [Subject([token_ids], (), known_base=())])
    assert found.base == ()
    return found.adapted[0]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("is_tied", [False, True], ids=["own-head", "tied"])
def test_logits_equal_transformers(tmp_path: Path, kind: str, is_tied: bool) -> None:
    model = build_model(kind, tie_word_embeddings=is_tied, **SIZES.get(kind, {}))
    save_model(model, tmp_path, max_shard_size="40KB")
    token_ids = random_tokens(40)
    torch.testing.assert_close(logits(tmp_path, token_ids), reference_logits(model, token_ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["int4", "int8", "nf4", "float-within-a-site"])
def test_original_weights_equal_dequantized_codes(tmp_path: Path, case: str) -> None:
    if case == "nf4":
        model = save_nf4(tmp_path)
    elif case == "int8":
        model = save_compressed(build_model("qwen2", **WIDE), tmp_path, [group(8, "channel")], ignore=[])
    else:
        ignore = ["lm_head", "re:.*k_proj$"] if case == "float-within-a-site" else None
        groups = [group(4, "group", group_size=64, symmetric=False)]
        model = save_compressed(build_model("qwen2", **WIDE), tmp_path, groups, ignore=ignore)
    token_ids = random_tokens(30)
    torch.testing.assert_close(logits(tmp_path, token_ids), reference_logits(model, token_ids), rtol=0, atol=1e-4)


def test_weights_are_read_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraserve.model.checkpoint.original._BLOCK_WEIGHTS", 48 * 10)
    model = build_model()
    base = OriginalBase(save_model(model, tmp_path), torch.device("cpu"))
    blocks = list(base.weight_rows(1, "k_proj", "v_proj"))
    assert [len(block) for block in blocks] == [10, 10, 4, 10, 10, 4]
    layer = model.model.layers[1].self_attn
    assert torch.equal(torch.cat(blocks), torch.cat([layer.k_proj.weight, layer.v_proj.weight]))
    token_ids = random_tokens(20)
    torch.testing.assert_close(logits(tmp_path, token_ids), reference_logits(model, token_ids), rtol=0, atol=1e-4)
