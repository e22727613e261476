"""The trainer and the scorer, run for a few steps and on the shipped pack."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("peft")

import torch

from loraserve.demo.frames import ADAPTERS
from loraserve.demo.pack import CARD_FILES, adapter_dirs, base_dir, pack_dir
from loraserve.demo.score import load_model, round_to_int8, score_pack
from loraserve.demo.trainer import ADAPTER_RECIPE, BASE_RECIPE, train_models

pytestmark = pytest.mark.slow


Stage = tuple[str, int, int]


def train_briefly(directory: Path) -> list[Stage]:
    """A pack after a few steps, in `directory`; what was told of them."""
    stages: list[Stage] = []
    recipes = (replace(BASE_RECIPE, num_steps=3), replace(ADAPTER_RECIPE, num_steps=2))
    train_models(directory, 1, lambda *stage: stages.append(stage), *recipes)
    return stages


def files_of(pack: Path) -> dict[Path, str]:
    """The models' files, by path, with their hashes."""
    files = [path for path in pack.rglob("*") if path.is_file() and path.name not in CARD_FILES]
    return {path.relative_to(pack): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def brief_pack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Stage]]:
    directory = tmp_path_factory.mktemp("pack")
    return directory, train_briefly(directory)


def test_the_same_seed_makes_the_same_files(brief_pack: tuple[Path, list[Stage]], tmp_path: Path) -> None:
    train_briefly(tmp_path)
    assert files_of(tmp_path) == files_of(brief_pack[0])


def test_training_writes_exactly_pack_files(brief_pack: tuple[Path, list[Stage]]) -> None:
    assert files_of(brief_pack[0]).keys() == files_of(pack_dir()).keys()


def test_every_step_is_told(brief_pack: tuple[Path, list[Stage]]) -> None:
    base = [("base", step, 3) for step in (1, 2, 3)]
    assert brief_pack[1] == base + [(style, step, 2) for style in ADAPTERS for step in (1, 2)]


def test_shipped_pack_scores_as_promised_on_card() -> None:
    scores = score_pack(pack_dir(), num_prompts=24, seed=2)
    assert [score.style for score in scores if score.exact < 0.9 or score.exact_int8 < 0.85] == []


def test_adapter_in_wrong_slot_scores_zero(tmp_path: Path) -> None:
    (tmp_path / "base").symlink_to(base_dir())
    names = (*ADAPTERS[1:], ADAPTERS[0])
    for name, other in zip(ADAPTERS, names, strict=True):
        (tmp_path / "adapters").mkdir(exist_ok=True)
        (tmp_path / "adapters" / name).symlink_to(adapter_dirs()[other])
    scores = score_pack(tmp_path, num_prompts=8, seed=2)
    assert {score.style: score.num_exact for score in scores if score.style != "plain"} == dict.fromkeys(ADAPTERS, 0)


def test_int8_rounds_every_base_linear_and_no_adapter() -> None:
    model = load_model(pack_dir(), "sql")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    round_to_int8(model)
    after = model.state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert len([name for name in changed if name.endswith("_proj.base_layer.weight")]) == 4 * 7
    assert not [name for name in changed if "lora_" in name or "norm" in name or "embed_tokens" in name]
