"""The peer that swaps are compared with has the values that the server computes with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.make_model import MODULES, SIZES, write_base
from benchmarks.peft_scores import PeftScores
from benchmarks.synthetic import Adapters
from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import read_adapter
from loraserve.model.checkpoint.loader import load_model
from loraserve.model.reference_model import evaluate
from loraserve.model.reference_pass import Subject
from loraserve_kernels.common.quantized import quantize

TINY = SIZES["tiny"]
PROMPT, ANSWER = [300, 301, 302, 303], [304, 305, 306]
# transformers' own remarks on loading
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    write_base(TINY, out, torch.bfloat16, 0)
    return out


@pytest.fixture(scope="module")
def adapters() -> Adapters:
    return Adapters(TINY, ranks=(4, 4), targets=MODULES)


@pytest.mark.parametrize("format", ["none", "int8", "nf4"])
def test_scores_match_reference_log_probabilities_of_same_base(model: Path, adapters: Adapters, format: str) -> None:
    scores = PeftScores(model, adapters, format)
    base = load_model(model, model_id="base", dtype=torch.float32, quantize=format, device="cpu", max_model_len=None)
    for number in (1, 2):
        read = read_adapter(*adapters.files(number))
        terms = [(compile_adapter(read.config, read.tensors, base.spec), 1.0)]
        # PEFT's activations aren't rounded
        (found,) = evaluate(base, [Subject([[*PROMPT, *ANSWER]], terms)], is_rounding=False)
        logits = torch.log_softmax(found.adapted[0][len(PROMPT) - 1 : -1], dim=-1)
        expected = logits.gather(1, torch.tensor(ANSWER)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scores.logprobs(number, PROMPT, ANSWER)), expected, atol=1e-4, rtol=0)


def test_quantized_base_has_dequantized_code_values(model: Path, adapters: Adapters) -> None:
    plain, rounded = (PeftScores(model, adapters, format) for format in ("none", "int8"))
    name = "base_model.model.model.layers.1.mlp.down_proj.base_layer.weight"
    exact, found = plain._model.get_parameter(name), rounded._model.get_parameter(name)
    assert not torch.equal(exact, found)
    # 128 inputs: rotated in blocks of 64, and back
    expected = quantize(exact.detach(), "int8", rotation=64).dequantize(torch.float32)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert (found - exact).abs().max() < exact.abs().max() / 100
    # the embedding isn't a linear
    embedding = "base_model.model.model.embed_tokens.weight"
    assert torch.equal(plain._model.get_parameter(embedding), rounded._model.get_parameter(embedding))
