"""Each architecture computes what transformers computes,
in every way in which a sequence can be cut into steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import PagedRun, build_model, load, random_tokens, reference_logits, save_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.6,
    "logits_scaling": 0.8,
}
GEMMA2 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 5,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.0,
    "sliding_window": 7,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}
GEMMA3 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 5,
    "sliding_window": 7,
    "sliding_window_pattern": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [2.0] * 6,
}
MINISTRAL3 = {**YARN, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1, "mscale": 1.0}
OLMO3_ROPES = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
QWEN2_MOE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
QWEN3_MOE = {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4, "head_dim": 16}),
    "llama-multi-query-odd-width": ("llama", {"num_key_value_heads": 1, "head_dim": 10}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama-yarn": ("llama", {"rope_parameters": YARN, "head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": 9, "head_dim": 16}),
    "mistral-window-of-one": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-window-by-layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {**YARN, "attention_factor": 0.8}}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-bias-tied": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "granite": ("granite", GRANITE),
    "granite-tied-biases": (
        "granite",
        {**GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-multi-query-tied-biases": (
        "olmo2",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "olmo2-yarn": ("olmo2", {"rope_parameters": YARN, "hidden_size": 64}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3-all-biases-untied": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 1],
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "pad_token_id": 0,
        },
    ),
    "smollm3-window-yarn": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 6,
            "rope_parameters": YARN,
            "pad_token_id": 0,
        },
    ),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2-untied-biases-uncapped": (
        "gemma2",
        {
            **GEMMA2,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "silu",
        },
    ),
    "gemma2-layer-types-odd-width": (
        "gemma2",
        {
            **GEMMA2,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gemma3": ("gemma3", GEMMA3),
    "gemma3-linear-untied-biases-capped": (
        "gemma3",
        {
            **GEMMA3,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3-multi-query-odd-width": (
        "gemma3",
        {
            **GEMMA3,
            "head_dim": 10,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma-untied-biases": ("gemma", {"head_dim": 16, "tie_word_embeddings": False, "attention_bias": True}),
    "vaultgemma": ("vaultgemma", GEMMA2),
    "olmo3": ("olmo3", {"sliding_window": 7, "num_hidden_layers": 4}),
    "olmo3-yarn": ("olmo3", {"sliding_window": 7, "num_hidden_layers": 4, "rope_parameters": OLMO3_ROPES}),
    "exaone4": ("exaone4", {"sliding_window": 7, "sliding_window_pattern": 2, "head_dim": 16}),
    "exaone4-without-window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "seed-oss": ("seed-oss", {"head_dim": 16}),
    "seed-oss-out-bias": ("seed-oss", {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    "ernie4.5": ("ernie4.5", {"head_dim": 16}),
    "ernie4.5-biases-odd-width": ("ernie4.5", {"head_dim": 10, "use_bias": True, "tie_word_embeddings": False}),
    "helium": ("helium", {"head_dim": 12, "pad_token_id": 0}),
    "glm": ("glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm-without-biases-odd-width": ("glm", {"head_dim": 20, "attention_bias": False, "pad_token_id": 0}),
    "glm4": ("glm4", {"head_dim": 16, "pad_token_id": 0}),
    "hunyuan": ("hunyuan", {"head_dim": 16}),
    "hunyuan-alpha-biases": (
        "hunyuan",
        {
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "ministral": ("ministral", {"sliding_window": 7, "head_dim": 16}),
    "ministral-layer-types": (
        "ministral",
        {"head_dim": 16, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": {**MINISTRAL3, "mscale_all_dim": 1.0}}),
    "olmoe": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "olmoe-normed-biases": (
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": True},
    ),
    "qwen2-moe": ("qwen2-moe", QWEN2_MOE),
    "qwen2-moe-normed-without-biases": ("qwen2-moe", {**QWEN2_MOE, "norm_topk_prob": True, "qkv_bias": False}),
    "phi3": ("phi3", {"pad_token_id": 0, "num_key_value_heads": 1}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window-one-expert": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 9}),
    "qwen3-moe": ("qwen3-moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-not-normed-biases": ("qwen3-moe", {**QWEN3_MOE, "attention_bias": True}),
    "phi3-partial-rope": ("phi3", {"pad_token_id": 0, "head_dim": 16, "partial_rotary_factor": 0.75}),
    "phi3-longrope": ("phi3", {"pad_token_id": 0, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "phi3-window-tied": ("phi3", {"pad_token_id": 0, "sliding_window": 9, "tie_word_embeddings": True}),
    "qwen3-yarn-mscale": ("qwen3", {"head_dim": 32, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, PagedRun]:
    """A model of transformers, and ours loaded from what it saved."""
    kind, overrides = CASES[request.param]
    model = build_model(kind, **overrides)
    decoder = load(save_model(model, tmp_path_factory.mktemp("model")))
    return model, PagedRun(decoder)


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([50], id="prefill"),
        # decodes over the border of a block, behind windows and the context that ropes stretch
        pytest.param([1, 7, 16, 3, 16], id="chunked-then-decode"),
        pytest.param([1, 7, 16, 3, 23], id="chunked", marks=pytest.mark.campaign),
        pytest.param([17], id="prefill-then-decode", marks=pytest.mark.campaign),
        pytest.param([], id="decode", marks=pytest.mark.campaign),
    ],
)
def test_logits_equal_transformers(pair: tuple[Any, PagedRun], chunks: list[int]) -> None:
    model, shared = pair
    run = PagedRun(shared.decoder, seed=len(chunks))
    token_ids = random_tokens(50)
    torch.testing.assert_close(run.logits(token_ids, chunks), reference_logits(model, token_ids), rtol=0, atol=1e-4)


def test_logits_equal_transformers_in_a_mixed_batch(pair: tuple[Any, PagedRun]) -> None:
    """Prefill, a chunk in the middle, and decode rows of four sequences share each step."""
    model, shared = pair
    run = PagedRun(shared.decoder, seed=7)
    tokens = [random_tokens(count, seed=count) for count in (40, 33, 21, 18)]
    a, b, c, d = (run.add(token_ids) for token_ids in tokens)
    steps = [
        [(a, 31), (b, 5)],
        [(b, 13), (a, 1), (c, 20)],
        [(c, 1), (d, 17), (a, 1), (b, 14)],
        [(d, 1), (b, 1), (a, 7)],
    ]
    parts: dict[int, list[torch.Tensor]] = {}
    for step in steps:
        for (sequence, _), logits in zip(step, run.step(step), strict=True):
            parts.setdefault(id(sequence), []).append(logits)
    for sequence, token_ids in zip((a, b, c, d), tokens, strict=True):
        ours = torch.cat(parts[id(sequence)])
        torch.testing.assert_close(ours, reference_logits(model, token_ids)[: len(ours)], rtol=0, atol=1e-4)


@pytest.mark.parametrize("max_model_len", [None, 128])
def test_longrope_equals_transformers_around_original_context(max_model_len: int | None, tmp_path: Path) -> None:
    # transformers turns a sequence by its length; a base of long contexts turns all as long ones
    ropes = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "max_position_embeddings": 128}
    model = build_model("phi3", pad_token_id=0, **ropes)
    run = PagedRun(load(save_model(model, tmp_path), max_model_len=max_model_len))
    token_ids = random_tokens(32 if max_model_len is None else 50)
    ours, theirs = run.logits(token_ids, [20, 1, 7]), reference_logits(model, token_ids)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_older_fields_of_two_ropes_mean_the_same(tmp_path: Path) -> None:
    from .conftest import edit_json

    ropes = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 20.0}}
    model = build_model("gemma3", **{**GEMMA3, "rope_parameters": ropes})
    older = {key: value for key, value in LINEAR.items() if key != "rope_theta"}
    config = save_model(model, tmp_path) / "config.json"
    edit_json(config, rope_parameters=None, layer_types=None, sliding_window_pattern=2)
    edit_json(config, rope_scaling=older, rope_theta=LINEAR["rope_theta"], rope_local_base_freq=20.0)
    token_ids = random_tokens(50)
    ours = PagedRun(load(tmp_path)).logits(token_ids, [50])
    torch.testing.assert_close(ours, reference_logits(model, token_ids), rtol=0, atol=1e-4)


def test_older_rope_scaling_field_means_the_same(tmp_path: Path) -> None:
    model = build_model(rope_parameters=LLAMA3, head_dim=32)
    save_model(model, tmp_path)
    from .conftest import edit_json

    older = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    edit_json(tmp_path / "config.json", rope_parameters=None, rope_scaling=older, rope_theta=LLAMA3["rope_theta"])
    token_ids = random_tokens(50)
    ours = PagedRun(load(tmp_path)).logits(token_ids, [50])
    torch.testing.assert_close(ours, reference_logits(model, token_ids), rtol=0, atol=1e-4)
