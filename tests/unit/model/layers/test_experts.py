"""Bases with mixtures of experts: adapters on their attention, quantized experts, and what is
refused. (Equality with transformers: test_equality.)
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loraserve.errors import ConfigError, ModelError
from loraserve.model.config.model_config import parse_config
from loraserve.model.layers.experts import MixtureOfExperts
from loraserve.model.layers.linears import make_linear

from ..conftest import (
    PagedRun,
    build_model,
    edit_json,
    load,
    random_adapter,
    random_tokens,
    reference_logits,
    save_model,
)
from ..test_equality import CASES

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
WIDE = {"hidden_size": 64, "intermediate_size": 64}


@pytest.fixture(scope="module", params=["mixtral", "qwen3-moe", "qwen2-moe"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    kind, overrides = CASES[request.param]
    experts = {} if kind == "mixtral" else {"moe_intermediate_size": 32}
    if kind == "qwen2-moe":
        experts |= {"shared_expert_intermediate_size": 96}
    model = build_model(kind, **{**overrides, **WIDE, **experts})
    return model, save_model(model, tmp_path_factory.mktemp("model"))


def test_adapted_rows_equal_merged_models(saved: tuple[Any, Path]) -> None:
    model, directory = saved
    run = PagedRun(load(directory))
    adapter = random_adapter(run.decoder, 5, modules=ATTENTION)
    merged = copy.deepcopy(model)
    with torch.no_grad():
        for layer, block in enumerate(merged.model.layers):
            for module in ATTENTION:
                update = 0.5 * adapter.lora_b(layer, module).T @ adapter.lora_a(layer, module)
                getattr(block.self_attn, module).weight.add_(update)
    tokens = [random_tokens(count, seed=count) for count in (20, 17)]
    plain, adapted = run.step([(run.add(tokens[0]), 20), (run.add(tokens[1]), 17)], lora=[(adapter, 20, 37)])
    torch.testing.assert_close(plain, reference_logits(model, tokens[0]), rtol=0, atol=1e-4)
    torch.testing.assert_close(adapted, reference_logits(merged, tokens[1]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_row_bits_are_independent_of_batch(saved: tuple[Any, Path], quantize: str) -> None:
    run = PagedRun(load(saved[1], quantize=quantize))
    tokens = [random_tokens(count, seed=count) for count in (9, 23, 14)]
    alone = [run.step([(run.add(token_ids), len(token_ids))])[0] for token_ids in tokens]
    together = run.step([(run.add(token_ids), len(token_ids)) for token_ids in tokens])
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_experts_are_quantized_but_router_is_not(saved: tuple[Any, Path], quantize: str) -> None:
    model, directory = saved
    exact, rounded = load(directory), load(directory, quantize=quantize)
    assert rounded.spec.size_bytes < 0.6 * exact.spec.size_bytes
    assert rounded.spec.num_parameters == exact.spec.num_parameters == sum(p.numel() for p in model.parameters())
    mlp = rounded._layers[0].mlp
    assert isinstance(mlp, MixtureOfExperts)
    router = torch.cat(list(mlp.router.rows(0, mlp.router.out_features)))
    assert torch.equal(router, model.model.layers[0].mlp.gate.weight)
    # nearly the same answers, though a row may go to another expert
    token_ids = random_tokens(20)
    ours = PagedRun(rounded).logits(token_ids, [20])
    correlation = torch.corrcoef(torch.stack([ours.flatten(), reference_logits(model, token_ids).flatten()]))[0, 1]
    assert correlation > 0.9


def test_a_missing_expert_is_named(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, _ = saved
    directory = save_model(model, tmp_path)
    # transformers calls them as the class does
    names = json.loads((directory / "config.json").read_text())
    name = next(name for name in ("num_local_experts", "num_experts") if name in names)
    edit_json(directory / "config.json", **{name: getattr(model.config, name) + 1})
    with pytest.raises(ModelError, match=r"experts\."):
        load(directory)


def test_number_of_experts_accepts_checkpoint_field_names() -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 12,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }
    experts = parse_config(config, {}).experts
    assert experts is not None
    assert (experts.num_experts, experts.num_chosen, experts.intermediate_size) == (12, 4, 20)
    assert experts.is_normed
    with pytest.raises(ModelError, match="num_experts_per_tok is 13"):
        parse_config({**config, "num_experts_per_tok": 13}, {})
    with pytest.raises(ModelError, match="mlp_only_layers"):
        parse_config({**config, "mlp_only_layers": [0]}, {})


def test_a_gpu_is_refused_before_weights_are_read(saved: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraserve.model.checkpoint.loader.make_backend", lambda *_: None)
    with pytest.raises(ConfigError, match="experts, which aren't served on GPUs"):
        load(saved[1], device="cuda")


def test_unchosen_expert_is_not_computed() -> None:
    class Counting:
        def __init__(self, weight: torch.Tensor) -> None:
            self.linear, self.num_rows = make_linear(weight, None, quantize="none", dtype=torch.float32), 0
            self.num_bytes, self.out_features, self.bias = 0, weight.shape[0], None

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.num_rows += x.shape[0]
            return self.linear(x)

        def rows(self, start: int, end: int) -> Any:
            return self.linear.rows(start, end)

    from loraserve.model.layers.experts import Expert

    scores = torch.tensor([[4.0, 0], [3.0, 1], [-5.0, -5]])
    experts = [Expert(Counting(torch.randn(2, 2)), Counting(torch.randn(2, 1))) for _ in range(3)]
    router = make_linear(scores, None, quantize="none", dtype=torch.float32)
    mlp = MixtureOfExperts(router, experts, num_chosen=2, is_normed=True, gated=lambda y: y[:, :1] * y[:, 1:])
    mlp(torch.rand(4, 2))
    assert [expert.down.num_rows for expert in experts] == [4, 4, 0]
