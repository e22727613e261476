"""Which tokenizers are the same, and what is said of those that aren't."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from loraserve.demo.pack import base_dir
from loraserve.errors import TokenizerMismatch
from loraserve.text.same_tokenizer import check_same_tokenizer

BPE: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [{"id": 3, "content": "<end>", "special": True}],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    "post_processor": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


def changed(**changes: Any) -> dict[str, Any]:
    definition = copy.deepcopy(BPE)
    for name, value in changes.items():
        place = definition["model"] if name in ("vocab", "merges", "type") else definition
        place[name] = value
    return definition


def check(tmp_path: Path, draft: Any, base: Any = BPE) -> None:
    for name, definition in (("base", base), ("draft", draft)):
        (tmp_path / name).mkdir(exist_ok=True)
        text = definition if isinstance(definition, str) else json.dumps(definition)
        (tmp_path / name / "tokenizer.json").write_text(text)
    check_same_tokenizer(tmp_path / "base", tmp_path / "draft")


def test_equal_tokenizers_may_differ_in_surrounding_settings(tmp_path: Path) -> None:
    check_same_tokenizer(base_dir(), base_dir())
    around = {"post_processor": {"type": "ByteLevel"}, "padding": {"length": 5}, "truncation": {"max_length": 9}}
    check(tmp_path, changed(**around))
    # merges are written in two ways
    check(tmp_path, changed(merges=[["a", "b"]]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab": {"a": 0, "b": 2, "ab": 1}}, "the token 'b' has the id 1 in the base's and has the id 2"),
        ({"vocab": {"a": 0, "b": 1}}, "the token 'ab' has the id 2 in the base's and doesn't exist"),
        ({"vocab": {"a": 0, "b": 1, "ab": 2, "c": 9}}, "the token 'c' of the draft's, with the id 9, doesn't exist"),
        ({"added_tokens": []}, "the token '<end>' has the id 3 in the base's and doesn't exist"),
        ({"added_tokens": [{"id": 3, "content": "<stop>"}]}, "the token '<end>'"),
        ({"merges": []}, "their merges differ"),
        ({"type": "WordPiece"}, "the base's is of type BPE, the draft's WordPiece"),
        ({"normalizer": None}, "they have another normalizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "they have another pre-tokenizer"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TokenizerMismatch) as caught:
        check(tmp_path, changed(**changes))
    assert said in caught.value.message
    assert "--draft-model" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "{}",
        '{"model": []}',
        '{"model": {"vocab": [1]}}',
        '{"model": {"vocab": {}}, "added_tokens": [1]}',
        '{"model": {"vocab": 7}}',
        '{"model": {"vocab": {"a": 0, "b": 1, "ab": 2, "<end>": "x"}}}',
    ],
)
def test_unreadable_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TokenizerMismatch):
        check(tmp_path, text)


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMismatch, match=r"The draft base's tokenizer can't be compared: .*tokenizer\.json"):
        check_same_tokenizer(base_dir(), tmp_path)


def test_scored_tokens_are_compared_in_order(tmp_path: Path) -> None:
    scored = changed(vocab=[["a", -1.0], ["b", -2.0], ["ab", -3.0]], type="Unigram", merges=[])
    check(tmp_path, scored, base=scored)
    with pytest.raises(TokenizerMismatch, match="the token 'b' has the id 1"):
        check(tmp_path, changed(vocab=[["a", -1.0], ["ab", -3.0], ["b", -2.0]], type="Unigram", merges=[]), base=scored)
