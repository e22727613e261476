"""The identity of a tokenizer: what decides a text's tokens, and nothing else."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from loraserve.demo.pack import base_dir
from loraserve.sdk.files.peft_directory import read_extra_files
from loraserve.tokenizer_identity import MAX_BYTES, TokenizerIdentity


@pytest.fixture(scope="module")
def definition() -> dict[str, Any]:
    value: dict[str, Any] = json.loads((base_dir() / "tokenizer.json").read_bytes())
    return value


def test_identity_stays_when_transformers_saves(tmp_path: Path, definition: dict[str, Any]) -> None:
    """A trainer saves the tokenizer that it used, with its padding and truncation."""
    tokenizer = AutoTokenizer.from_pretrained(base_dir())
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=8)
    tokenizer.save_pretrained(tmp_path)
    own, base = TokenizerIdentity.read(tmp_path / "tokenizer.json"), TokenizerIdentity.of(definition)
    assert own is not None
    assert own.difference(base) is None
    assert read_extra_files(tmp_path)["tokenizer"] == base.text()
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(tmp_path)
    own = TokenizerIdentity.read(tmp_path / "tokenizer.json")
    assert own is not None
    assert "tokens, the base's" in (own.difference(base) or "")


def swap_ids(value: dict[str, Any]) -> None:
    *_, first, second = value["model"]["vocab"]
    vocab = value["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]


def reverse_merges(value: dict[str, Any]) -> None:
    value["model"]["merges"] = value["model"]["merges"][::-1]


def lower_case(value: dict[str, Any]) -> None:
    value["normalizer"] = {"type": "Lowercase"}


def add_beginning(value: dict[str, Any]) -> None:
    value["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap_ids, "gives tokens other ids"),
        (reverse_merges, "merges tokens by other rules"),
        (lower_case, "cuts texts by other rules"),
        (add_beginning, "puts other tokens around a text"),
    ],
)
def test_difference_names_changed_part(definition: dict[str, Any], change: Any, words: str) -> None:
    changed = copy.deepcopy(definition)
    change(changed)
    assert words in (TokenizerIdentity.of(changed).difference(TokenizerIdentity.of(definition)) or "")


def test_identity_is_read_back_from_its_text(definition: dict[str, Any]) -> None:
    found = TokenizerIdentity.of(definition)
    assert TokenizerIdentity.parse(found.text()) == found
    assert len(found.text()) < MAX_BYTES
    for text in ("", "{}", "[]", "null", found.text().replace(str(found.num_tokens), '"8"')):
        assert TokenizerIdentity.parse(text) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": []}', '{"model": {"vocab": {"a": 0}, "merges": 3}}'])
def test_broken_file_has_no_identity(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert TokenizerIdentity.read(tmp_path / "tokenizer.json") is None
    assert TokenizerIdentity.read(tmp_path / "missing.json") is None
