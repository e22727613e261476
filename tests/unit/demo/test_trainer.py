"""The trainer and the scorer, run for a few steps and on the shipped pack."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("peft")

import torch

from loraserve.demo.frames import ADAPTERS
from loraserve.demo.pack import adapter_dirs, base_dir, pack_dir
from loraserve.demo.score import load_model, round_to_int8, score_pack
from loraserve.demo.trainer import ADAPTER_RECIPE, BASE_RECIPE, train_models

pytestmark = pytest.mark.slow


def train_briefly(directory: Path, seed: int) -> list[str]:
    """Weights' hashes, and the stages that were told of as a side effect in `stages.json`."""
    stages: list[tuple[str, int, int]] = []
    recipes = (replace(BASE_RECIPE, num_steps=3), replace(ADAPTER_RECIPE, num_steps=2))
    train_models(directory, seed, lambda *stage: stages.append(stage), *recipes)
    (directory / "stages.json").write_text(json.dumps(stages))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.rglob("*.safetensors"))]


def test_the_same_seed_trains_the_same_weights(tmp_path: Path) -> None:
    first, again, other = (train_briefly(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert first == again
    assert first != other
    assert len(first) == 1 + len(ADAPTERS)
    stages = json.loads((tmp_path / "a" / "stages.json").read_text())
    assert [stage for stage, done, total in stages if done == total] == ["base", *ADAPTERS]


def test_training_leaves_only_a_packs_files(tmp_path: Path) -> None:
    train_briefly(tmp_path, 1)
    found = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file() and path.name != "stages.json"}
    shipped = {path.relative_to(pack_dir()) for path in pack_dir().rglob("*") if path.is_file()}
    assert found == {path for path in shipped if path.parts[0] in ("base", "adapters")}


def test_the_shipped_pack_scores_what_its_card_promises() -> None:
    scores = score_pack(pack_dir(), num_prompts=24, seed=2)
    assert [score.style for score in scores if score.exact < 0.9 or score.exact_int8 < 0.85] == []


def test_an_adapter_in_another_ones_place_scores_nothing(tmp_path: Path) -> None:
    (tmp_path / "base").symlink_to(base_dir())
    names = (*ADAPTERS[1:], ADAPTERS[0])
    for name, other in zip(ADAPTERS, names, strict=True):
        (tmp_path / "adapters").mkdir(exist_ok=True)
        (tmp_path / "adapters" / name).symlink_to(adapter_dirs()[other])
    scores = score_pack(tmp_path, num_prompts=8, seed=2)
    assert {score.style: score.num_exact for score in scores if score.style != "plain"} == dict.fromkeys(ADAPTERS, 0)


def test_int8_rounds_every_linear_of_the_base_and_no_adapter() -> None:
    model = load_model(pack_dir(), "sql")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    round_to_int8(model)
    after = model.state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert len([name for name in changed if name.endswith("_proj.base_layer.weight")]) == 4 * 7
    assert not [name for name in changed if "lora_" in name or "norm" in name or "embed_tokens" in name]
