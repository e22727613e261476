"""The summary of a tokenizer: what decides a text's tokens, compared with the base's."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from loraserve.demo.pack import base_dir
from loraserve.sdk.files.peft_directory import read_extra_files
from loraserve.tokenizer_identity import MAX_BYTES, TokenizerIdentity, TokenizerSummary

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def definition() -> dict[str, Any]:
    value: dict[str, Any] = json.loads((base_dir() / "tokenizer.json").read_bytes())
    return value


def summary_of(definition: dict[str, Any], **files: dict[str, Any]) -> TokenizerSummary:
    given = {"tokenizer.json": definition, **{f"{name}.json": value for name, value in files.items()}}
    found = TokenizerSummary.of_files({name: json.dumps(value).encode() for name, value in given.items()})
    assert found is not None
    return found


def changed(definition: dict[str, Any], change: Change) -> dict[str, Any]:
    value = copy.deepcopy(definition)
    change(value)
    return value


def num_tokens(definition: dict[str, Any]) -> int:
    return TokenizerIdentity.of(definition).num_tokens


def add(content: str, id_: int | None = None, **flags: bool) -> Change:
    def change(value: dict[str, Any]) -> None:
        token_id = num_tokens(value) if id_ is None else id_
        value["added_tokens"].append({"id": token_id, "content": content, "special": True, **flags})

    return change


def test_summary_stays_when_transformers_saves(tmp_path: Path, definition: dict[str, Any]) -> None:
    """A trainer saves the tokenizer that it used, with its padding and truncation."""
    tokenizer = AutoTokenizer.from_pretrained(base_dir())
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=8)
    tokenizer.save_pretrained(tmp_path)
    base = TokenizerSummary.read(base_dir())
    assert base is not None
    own = TokenizerSummary.parse(read_extra_files(tmp_path)["tokenizer"])
    assert own is not None
    assert own.conflict(base) is None
    assert not own.reduced(base).has_differences
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(tmp_path)
    own = TokenizerSummary.read(tmp_path)
    assert own is not None
    assert own.conflict(base) is None
    assert [token.content for token in own.reduced(base).added] == ["<|new|>"]


def swap_ids(value: dict[str, Any]) -> None:
    vocab = value["model"]["vocab"]
    first, second = [token for token, id_ in vocab.items() if id_ in (300, 301)]
    vocab[first], vocab[second] = vocab[second], vocab[first]


def reverse_merges(value: dict[str, Any]) -> None:
    value["model"]["merges"] = value["model"]["merges"][::-1]


def rename(value: dict[str, Any]) -> None:
    value["added_tokens"][0]["content"] = "<|renamed|>"


def remove(value: dict[str, Any]) -> None:
    del value["added_tokens"][0]


def big_rules(value: dict[str, Any]) -> None:
    value["normalizer"] = {"type": "Replace", "pattern": {"String": "x" * 70_000}, "content": ""}


def set_rule(name: str, rule: dict[str, Any]) -> Change:
    return lambda value: value.update({name: rule})


def replace_by(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


SLOW = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("name", "rule", "words"),
    [
        ("pre_tokenizer", SLOW, "the step 'Split'"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [SLOW]}, "the step 'Split'"),
        ("normalizer", replace_by({"Regex": "(a+)+$"}, ""), "a Replace by a regex"),
        ("normalizer", replace_by({"String": "a"}, "aa"), "or by a longer text"),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 9}, "a long Prepend"),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 17}, "more than 16 steps"),
        ("post_processor", {"type": "Unknown"}, "the step 'Unknown'"),
        ("normalizer", {"type": ["NFC"]}, "the step ['NFC']"),
        ("normalizer", replace_by({"String": " "}, "_"), ""),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]}, ""),
    ],
)
def test_rules_are_left_out_unless_bounded(definition: dict[str, Any], name: str, rule: Any, words: str) -> None:
    own, base = summary_of(changed(definition, set_rule(name, rule))), summary_of(definition)
    assert own.conflict(base) is None
    assert words in own.unserved_rules(base).get(name, "")
    assert bool(own.unserved_rules(base)) == bool(words)
    assert set(own.reduced(base).parts) == (set() if words else {name})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap_ids, "another vocabulary: .* the first that differs has an id from 256 to 511"),
        (reverse_merges, "merges tokens by other rules"),
        (rename, r"has the token '<\|renamed\|>' where the base has "),
        (remove, "lacks the base's token"),
    ],
)
def test_conflict_names_changed_part(definition: dict[str, Any], change: Change, words: str) -> None:
    found = summary_of(changed(definition, change)).conflict(summary_of(definition))
    assert found is not None

    assert re.search(words, found)


def test_id_of_two_tokens_is_refused(definition: dict[str, Any]) -> None:
    base, number = summary_of(definition), num_tokens(definition)
    found = summary_of(changed(changed(definition, add("<|x|>", number)), add("<|y|>", number)))
    assert f"gives the id {number:,} to two tokens, '<|x|>' and '<|y|>'" in (found.conflict(base) or "")


def test_large_part_is_left_out(definition: dict[str, Any]) -> None:
    base, own = summary_of(definition), summary_of(changed(definition, big_rules))
    whole = replace(own, parts={**own.parts, "normalizer": changed(definition, big_rules)["normalizer"]})
    for summary in (own, whole):
        assert summary.unserved_rules(base) == {"normalizer": "more than 65,536 bytes"}
        assert "normalizer" not in summary.reduced(base).parts


def lower_case(value: dict[str, Any]) -> None:
    value["normalizer"] = {"type": "Lowercase"}


def test_differences_hold_only_own_parts(definition: dict[str, Any]) -> None:
    base = summary_of(definition, tokenizer_config={"eos_token": "<|a|>"})
    value = changed(changed(definition, lower_case), add("<|new|>"))
    own = summary_of(value, tokenizer_config={"eos_token": {"content": "<|new|>"}, "add_bos_token": True})
    reduced = own.reduced(base)
    assert [(token.id, token.content) for token in reduced.added] == [(num_tokens(definition), "<|new|>")]
    assert reduced.parts == {"normalizer": {"type": "Lowercase"}}
    assert (reduced.special, reduced.add_bos) == ({"eos_token": "<|new|>"}, True)
    assert len(reduced.text()) < 2048
    applied = reduced.applied_to(definition)
    assert TokenizerIdentity.of(applied) == TokenizerIdentity.of(value)


@pytest.mark.parametrize(
    ("mine", "other", "is_same"),
    [
        ({"type": "ByteLevel"}, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}, True),
        (
            {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
            True,
        ),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}]}, {"type": "Sequence", "decoders": []}, False),
        ({"type": "ByteLevel"}, None, False),
    ],
)
def test_decoders_are_compared_by_effect(definition: dict[str, Any], mine: Any, other: Any, is_same: bool) -> None:
    found = [summary_of({**definition, "decoder": rule}) for rule in (mine, other)]
    assert (found[0].decoder == found[1].decoder) == is_same
    assert found[0].conflict(found[1]) is None
    assert not found[0].reduced(found[1]).has_differences


def test_summary_is_read_back_from_text(definition: dict[str, Any]) -> None:
    base = summary_of(definition)
    found = summary_of(changed(definition, add("<|new|>", lstrip=True)), tokenizer_config={"chat_template": "{{ 1 }}"})
    assert found.chat_templates == {"default": "{{ 1 }}"}
    assert len(found.text()) < MAX_BYTES
    for one in (found, found.reduced(base)):
        read = TokenizerSummary.parse(one.text())
        assert read == one
        assert read.text() == one.text()
        assert read.reduced(base).text() == found.reduced(base).text()
    for text in (
        "",
        "[]",
        "null",
        "1",
        '{"added": [[1]]}',
        '{"identity": {}}',
        '{"parts": []}',
        '{"special": {"x": "y"}}',
        '{"special": {"eos_token": "\\ud800"}}',
        '{"added": [[2147483648, "a", 0, 0, 0, 0, 0]]}',
        '{"add_bos": 1}',
    ):
        assert TokenizerSummary.parse(text) is None


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer.json": b""}, "tokenizer.json isn't JSON"),
        ({"tokenizer.json": b"[]"}, "tokenizer.json isn't an object"),
        ({"tokenizer.json": b"{}"}, "tokenizer.json isn't a tokenizer"),
        ({"tokenizer_config.json": b'{"eos_token": "\\ud800"}'}, "has half of a surrogate pair"),
        ({"tokenizer.json": b'{"model": {"vocab": {"a": 0}, "merges": 3}}'}, "tokenizer.json isn't a tokenizer"),
        (
            {"tokenizer_config.json": b'{"eos_token": "a"}', "special_tokens_map.json": b'{"eos_token": "b"}'},
            "tokenizer_config.json has the eos_token 'a', and special_tokens_map.json 'b'",
        ),
        (
            {"tokenizer.json": b'{"model": {"vocab": {"a": 0}}}', "added_tokens.json": b'{"b": 1}'},
            "added_tokens.json gives the token 'b' the id 1, and tokenizer.json None",
        ),
    ],
)
def test_bad_files_are_named(files: dict[str, bytes], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TokenizerSummary.of_files(files)
