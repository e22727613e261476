"""Cost of rounding a base, against transformers on the same checkpoint and on the weights that a
format makes of it.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from loraserve.config import EngineConfig
from loraserve.demo.pack import base_dir
from loraserve.engine.verification import base_precision
from loraserve.engine.verification.base_precision import compare
from loraserve.engine.worker.rounding import measure
from loraserve.errors import ConfigError
from loraserve.model.layers.linears import quantize_weight
from loraserve.text.passage import PASSAGE
from loraserve.text.tokenizer import Tokenizer
from loraserve_kernels.common.formats import rotation_block

CONFIG = EngineConfig(model_dir=str(base_dir()), model_id="demo", store_url="")


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(base_dir(), dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' logits of 256 positions of the passage, and the token that follows each."""
    tokens = Tokenizer(base_dir()).encode(PASSAGE)[:257]
    return model(torch.tensor([tokens[:-1]])).logits[0], torch.tensor(tokens[1:])


@torch.no_grad()
def rounded(model: Any, format: str) -> Any:
    """Return the model with the weights that this format's codes mean: the head in int8 beside four
    bits, the embedding as it is.
    """
    model = copy.deepcopy(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    for name, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear):
            kind = "int8" if name == "lm_head" and format in ("int4", "nf4") else format
            # integers are rotated, as their activations are
            rotation = rotation_block(linear.in_features) if kind in ("int8", "int4") else 0
            linear.weight.copy_(quantize_weight(linear.weight, kind, rotation).dequantize(torch.float32))
    return model


@pytest.mark.parametrize("format", ["int8", "int4", "nf4", "fp8"])
def test_weight_rounding_cost_matches_transformers(model: Any, format: str) -> None:
    exact, targets = logits_of(model)
    expected = compare(logits_of(rounded(model, format))[0], exact, targets)
    cost = measure(msgspec.structs.replace(CONFIG, quantize=format))
    assert expected.mean_divergence > 1e-4
    assert cost.num_positions == 256
    assert cost.weights.top1_agreement == pytest.approx(expected.top1_agreement, abs=1.5 / 256)
    for field in ("mean_difference", "max_difference", "mean_divergence"):
        assert getattr(cost.weights, field) == pytest.approx(getattr(expected, field), rel=1e-3, abs=1e-4)
    loss = torch.nn.functional.cross_entropy(exact, targets)
    assert cost.loss == pytest.approx(float(loss), abs=1e-4)


def test_unrounded_base_loses_no_precision() -> None:
    cost = measure(CONFIG)
    assert (cost.arithmetic, cost.weights.max_difference, cost.total.top1_agreement) == ("fp32", 0.0, 1.0)
    assert cost.total.max_difference < 1e-4
    assert cost.served_loss == pytest.approx(cost.loss, abs=1e-4)


def test_only_rounded_activations_cost_precision() -> None:
    config = msgspec.structs.replace(CONFIG, quantize="int8")
    row = measure(config)
    whole = measure(msgspec.structs.replace(config, activation_dtype="float"))
    assert row.arithmetic in ("w8a8-row-h64", "w8a7-row-h64")
    assert row.activations.max_difference > 0.01
    assert whole.arithmetic == "w8a16"
    assert whole.activations.max_difference < 1e-4
    assert whole.total.mean_divergence < 1.5 * row.total.mean_divergence


def test_a_short_context_is_measured_in_windows(model: Any) -> None:
    cost = measure(msgspec.structs.replace(CONFIG, quantize="fp8", max_model_len=101, max_num_batched_tokens=32))
    assert cost.num_positions == 256
    tokens = Tokenizer(base_dir()).encode(PASSAGE)[:257]
    windows = [tokens[start : start + 101] for start in (0, 100, 200)]
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                model(torch.tensor([window[:-1]])).logits[0], torch.tensor(window[1:]), reduction="sum"
            )
            for window in windows
        ]
    assert cost.loss == pytest.approx(float(sum(losses)) / 256, abs=1e-4)


def test_a_text_of_too_few_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="17 are needed"):
        measure(CONFIG, text="the table")


def test_differences_compare_next_token_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_precision, "_ROWS_AT_A_TIME", 2)
    expected = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.7, 0.1]]).log()
    found = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8], [0.2, 0.7, 0.1]]).log() + 7
    one = compare(found, expected, torch.tensor([1, 2, 0]))
    assert one.top1_agreement == pytest.approx(2 / 3)
    log2 = 0.6931471805599453
    assert (one.mean_difference, one.max_difference) == (pytest.approx(log2 / 3), pytest.approx(log2))
    assert one.mean_divergence == pytest.approx(0.25 * log2 / 3)


def test_passage_is_long_enough_for_large_vocabulary() -> None:
    # no tokenizer makes much less than a token of each word
    assert len(PASSAGE.split()) > 300
