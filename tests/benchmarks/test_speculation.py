"""What is made of measurements of speculation, and the base that they are made on."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import repetitive, speculation
from benchmarks.make_model import SIZES, Size
from benchmarks.repetitive import RANDOM, WORKS, walk, works
from benchmarks.speculation import AUTO, OFF, Case


def make_case(work: str = WORKS[0]) -> Case:
    return Case(
        work,
        1,
        {OFF: [10.0, 20.0, 10.0], AUTO: [30.0, 20.0, 20.0]},
        {"request": 8.0, "history": 2.0, "draft": 0.0, "grammar": 0.0},
        {"request": 4.0, "history": 1.0, "draft": 0.0, "grammar": 0.0},
        num_answers=6,
    )


def test_the_ratio_is_the_median_of_rounds() -> None:
    assert make_case().ratio == 2.0


def test_the_page_has_a_row_for_each_case() -> None:
    page = speculation.text(
        argparse.Namespace(size="S", quantize="int8", tokens=4, rounds=3), [make_case(), make_case(RANDOM)]
    )
    assert page.count("| 2.00 | 1.5 | 10 | 0.50 |  | 4 + 1 + 0 + 0 | 0 |") == 1
    assert page.count("| 2.00 | 0.98 | 10 | 0.50 |  | 4 + 1 + 0 + 0 | 0 |") == 1
    assert "12 answers were compared; 0 tokens differ" in page


def test_follower_probabilities_of_each_token_sum_to_1() -> None:
    for work in works().values():
        for following in work.table.values():
            assert sum(following.values()) == pytest.approx(1)
            assert following.keys() <= work.table.keys()
        assert {*work.prompt} <= work.table.keys()


def test_works_share_no_token() -> None:
    for one, other in itertools.combinations(works().values(), 2):
        assert not one.table.keys() & other.table.keys()


def test_a_file_is_nearly_copied() -> None:
    work = works()["code edit"]
    copied = walk(work.table, work.prompt[-1], 200, random.Random(1))[1:]
    assert 0.9 < len({*copied} & {*work.prompt}) / len({*copied}) < 1.0


def test_base_logits_are_log_probabilities_of_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = Size(768, 1, 2, 1, 8, 1100)
    monkeypatch.setitem(SIZES, "flat", size)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({}))
    names = {"model.embed_tokens.weight": (1100, 768), "lm_head.weight": (1100, 768)}
    save_file({name: torch.randn(shape) for name, shape in names.items()}, source / "model.safetensors")
    repetitive.write_repetitive("flat", source, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for work in works().values():
        token, following = next(iter(work.table.items()))
        x = tensors["model.embed_tokens.weight"][token]
        logits = tensors["lm_head.weight"] @ (x / x.pow(2).mean().sqrt())
        probabilities = logits.softmax(0)
        for follower, probability in following.items():
            assert float(probabilities[follower]) == pytest.approx(probability, rel=1e-3)


def test_draft_base_predicts_requested_share_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "flat", Size(768, 2, 2, 1, 8, 1100))
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    names = {"model.embed_tokens.weight": (1100, 768), "lm_head.weight": (1100, 768)}
    layers = {f"model.layers.{layer}.mlp.down_proj.weight": (8, 8) for layer in range(2)}
    save_file({name: torch.randn(shape) for name, shape in {**names, **layers}.items()}, source / "model.safetensors")
    heads = {}
    for share in (1.0, 0.8, 0.0):
        repetitive.write_draft("flat", source, tmp_path / str(share), share)
        tensors = load_file(tmp_path / str(share) / "model.safetensors")
        assert tensors.keys() == {*names, "model.layers.0.mlp.down_proj.weight"}
        assert json.loads((tmp_path / str(share) / "config.json").read_text())["num_hidden_layers"] == 1
        heads[share] = tensors["lm_head.weight"]
    num_tokens = sum(len(work.table) for work in works().values())
    shares = {
        share: 1 - int((head != heads[1.0]).any(dim=0)[:num_tokens].sum()) / num_tokens for share, head in heads.items()
    }
    assert shares[1.0] == 1.0
    assert 0.7 < shares[0.8] < 0.9
    assert shares[0.0] == 0.0
