"""The first step: a base that can't answer never reports that it is ready."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraserve.engine.worker import startup
from loraserve.engine.worker.startup import build_engine
from loraserve.errors import ModelError

from ..conftest import World


def spoil(world: World, tmp_path: Path, name: str, value: float) -> str:
    """Return the directory of the world's base with another number at the start of a tensor."""
    directory = tmp_path / "spoiled"
    shutil.copytree(world.model_dir, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[0] = value
    save_file(tensors, file, {"format": "pt"})
    return str(directory)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lm_head.weight", float("nan")),
        ("model.norm.weight", float("inf")),
        ("model.layers.1.mlp.down_proj.weight", float("nan")),
        ("model.layers.2.input_layernorm.weight", float("nan")),
    ],
)
def test_non_finite_base_error_names_weight(name: str, value: float, world: World, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"its weight {name} has NaN or infinity"):
        build_engine(world.config(model_dir=spoil(world, tmp_path, name, value)))


def test_overflowing_base_error_names_dtype(world: World, tmp_path: Path) -> None:
    directory = spoil(world, tmp_path, "model.norm.weight", 3e38)
    tensors = load_file(Path(directory) / "model.safetensors")
    tensors["lm_head.weight"][:, 0] = 3e38
    save_file(tensors, Path(directory) / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="NaN or infinite in float32, although all of its weights are finite"):
        build_engine(world.config(model_dir=directory))


def test_first_step_leaves_no_request_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    check = startup.check_first_step

    def counted(*arguments: object) -> None:
        check(*arguments)  # type: ignore[arg-type]
        steps.append(1)

    monkeypatch.setattr(startup, "check_first_step", counted)
    parts = build_engine(world.config())
    try:
        assert steps == [1]
        assert not parts.engine.has_requests
        assert parts.engine.check() == []
        stats = parts.engine.stats()
        assert (stats.prompt_tokens, stats.generation_tokens) == (0, 0)
    finally:
        parts.close()


def test_last_logit_is_looked_at(world: World, tmp_path: Path) -> None:
    directory = Path(spoil(world, tmp_path, "lm_head.weight", 0.0))
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"][-1, -1] = torch.nan
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        build_engine(world.config(model_dir=str(directory)))
