"""The trainer of the demo's adapters: a tree of questions computes what each alone computes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("peft")

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loraserve.demo.smollm.adapter_card import CARD_FILE, AdapterRecipe
from loraserve.demo.smollm.smollm_demo import ADAPTER_FILES

TOOL = Path(__file__).resolve().parents[4] / "tools" / "train_demo.py"
QUESTIONS = [([1, 2, 3, 4], [5, 6, 0]), ([1, 2, 3, 7], [5, 0]), ([1, 2, 9], [8, 8, 8, 0]), ([4, 2], [0])]


@pytest.fixture(scope="module")
def trainer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_demo", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["train_demo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def make_row(trainer: ModuleType) -> Any:
    row = trainer.TokenTree()
    for prompt, answer in QUESTIONS:
        row.add(prompt, answer)
    return row


def test_common_beginning_is_in_row_once(trainer: ModuleType) -> None:
    row = make_row(trainer)
    assert row.token_ids == [1, 2, 3, 4, 5, 6, 0, 7, 5, 0, 9, 8, 8, 8, 0, 4, 2, 0]
    assert row.positions == [0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 2, 3, 4, 5, 6, 0, 1, 2]
    assert row.num_questions == 4
    assert row.num_new([1, 2, 3, 3]) == 1
    assert row.num_new([1, 2, 3, 4]) == 0


def test_tree_computes_logits_of_questions_alone(trainer: ModuleType) -> None:
    model, row = make_llama(), make_row(trainer)
    runner = trainer.RowRunner(model, row)
    with torch.inference_mode():
        hidden = runner.run(runner.run(None, 0, 1), 1, 3)
        found = model.lm_head(model.model.norm(hidden[0, [node for node, _ in row.targets]]))
        expected, targets = [], []
        for prompt, answer in QUESTIONS:
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
            expected.append(logits[len(prompt) - 1 : -1])
            targets += answer
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert [token_id for _, token_id in row.targets] == targets


def test_training_changes_upper_layers_alone(trainer: ModuleType, tmp_path: Path) -> None:
    base = make_llama()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    recipe = AdapterRecipe(num_rows=2, num_epochs=30, num_layers=2, rank=4, learning_rate=1e-2)
    model = trainer.with_adapter(base, recipe)
    last = trainer.fit(base, [make_row(trainer), make_row(trainer)], recipe, "test")
    assert last < 0.2
    trainer.save(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config["layers_to_transform"] == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {*ADAPTER_FILES} - {CARD_FILE}
    # as anybody would load it
    loaded = peft.PeftModel.from_pretrained(make_llama(), str(tmp_path)).eval()
    with torch.inference_mode():
        prompt, answer = QUESTIONS[0]
        found = loaded(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].argmax(-1)
    assert found.tolist() == answer
    after = loaded.get_base_model().state_dict()
    unchanged = [name for name in before if torch.equal(before[name], after.get(name, after.get(_wrapped(name))))]
    assert len(unchanged) == len(before)


def _wrapped(name: str) -> str:
    """Return a linear's weight's name where PEFT has wrapped the linear."""
    return name.removesuffix(".weight") + ".base_layer.weight"
