"""The plain evaluation that certificates rest on: it is transformers' and PEFT's, and shares no code with what it judges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.ir import AdapterIR
from loraserve.adapters.peft_format import read_adapter
from loraserve.model.plain import evaluate
from loraserve.types import BaseSpec

from .conftest import build_model, load, random_tokens, reference_logits, save_model
from .test_adapter_kinds import KINDS, save_adapter
from .test_equality import CASES

# PEFT remarks on tied embeddings and on what it saves of them
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

PROMPTS = [random_tokens(5, seed=1), random_tokens(17, seed=2)]
TOLERANCE = 1e-4


def compile_saved(directory: Path, base: BaseSpec) -> AdapterIR:
    files = [(directory / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")]
    adapter = read_adapter(*files)
    return compile_adapter(adapter.config, adapter.tensors, base)


@pytest.mark.parametrize("case", CASES)
def test_base_is_what_transformers_computes(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    model = build_model(kind, **options)
    evaluation = evaluate(load(save_model(model, tmp_path)), PROMPTS, [])
    for prompt, base, adapted in zip(PROMPTS, evaluation.base, evaluation.adapted, strict=True):
        torch.testing.assert_close(base, reference_logits(model, prompt), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(adapted, base, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_is_what_peft_computes(kind: str, tmp_path: Path) -> None:
    model = build_model("qwen2", num_hidden_layers=2)
    save_model(model, tmp_path / "base")
    adapted = save_adapter(tmp_path / "base", tmp_path / "adapter", KINDS[kind], seed=3)
    decoder = load(tmp_path / "base")
    evaluation = evaluate(decoder, PROMPTS, [(compile_saved(tmp_path / "adapter", decoder.spec), 1.0)])
    for prompt, own, base in zip(PROMPTS, evaluation.adapted, evaluation.base, strict=True):
        torch.testing.assert_close(own, reference_logits(adapted, prompt), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(base, reference_logits(model, prompt), atol=TOLERANCE, rtol=0)
