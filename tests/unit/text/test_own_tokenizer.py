"""A version's tokenizer, made of the base's and its differences: as one read from its own file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from loraserve.errors import ConfigError, InvalidRequest
from loraserve.text import grammar
from loraserve.text.detokenizer import decode_stream
from loraserve.text.grammar import GrammarCompiler
from loraserve.text.tokenizer import Tokenizer
from loraserve.tokenizer_identity import TokenizerSummary

MakeDir = Callable[..., Path]
KINDS = ("byte_level", "llama2", "gemma", "metaspace")
TEXT = "a <call>b ab <|fin|> naïve 中文 <CALL>  a <call> c"


def make_own(base: Path, target: Path, **config: Any) -> Path:
    """Write the files of a tokenizer with two tokens more than the base's."""
    own = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
    own.add_tokens([tokenizers.AddedToken("<call>", lstrip=True, normalized=True)])
    own.add_special_tokens([tokenizers.AddedToken("<|fin|>", rstrip=True)])
    own.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def differences(own: Path, base: Path) -> TokenizerSummary:
    mine, other = TokenizerSummary.read(own), TokenizerSummary.read(base)
    assert mine is not None
    assert other is not None
    assert mine.conflict(other) is None
    return mine.reduced(other)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_as_from_versions_file(make_model_dir: MakeDir, tmp_path: Path, kind: str) -> None:
    path = make_model_dir(kind)
    base, read = Tokenizer(path), Tokenizer(make_own(path, tmp_path, eos_token="<|fin|>"))
    made = base.with_differences(differences(tmp_path, path))
    assert made.base is base
    for text in (TEXT, TEXT * 40, "<call>", "a<|fin|>  b"):
        ids = read.encode(text)
        assert made.encode(text) == ids != base.encode(text)
        for skip in (True, False):
            assert made.decode(ids, skip) == read.decode(ids, skip)
            stream = decode_stream(made, skip)
            assert "".join(stream.push([id_]) for id_ in ids) + stream.finish() == read.decode(ids, skip)
        assert [made.token_bytes(id_) for id_ in ids] == [read.token_bytes(id_) for id_ in ids]
        assert [made.id_to_token(id_) for id_ in ids] == [read.id_to_token(id_) for id_ in ids]
        assert made.least_tokens(text) <= len(ids)
    assert made.special_token_ids == read.special_token_ids
    assert (made.eos_token, made.eos_token_id) == ("<|fin|>", read.token_to_id("<|fin|>"))
    # the base's own is as before
    assert base.token_to_id("<call>") is None
    assert base.encode(TEXT) == Tokenizer(path).encode(TEXT)


def test_own_rules_are_used(make_model_dir: MakeDir, tmp_path: Path) -> None:
    path = make_model_dir("byte_level")
    own = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    own.normalizer = tokenizers.normalizers.Lowercase()
    own.post_processor = tokenizers.processors.TemplateProcessing(single="$A <|eos|>", special_tokens=[("<|eos|>", 1)])
    own.save(str(tmp_path / "tokenizer.json"))
    made = Tokenizer(path).with_differences(differences(tmp_path, path))
    assert made.encode("The QUICK") == Tokenizer(tmp_path).encode("The QUICK") == [*made.encode("the quick")]
    assert made.encode("a")[-1] == 1


def test_unknown_end_token_is_refused(make_model_dir: MakeDir, tmp_path: Path) -> None:
    path = make_model_dir("byte_level")
    make_own(path, tmp_path, eos_token="<|nowhere|>")
    with pytest.raises(ConfigError, match=r"its eos_token '<\|nowhere\|>' isn't one of its tokens"):
        Tokenizer(path).with_differences(differences(tmp_path, path))


ROBERTA = {"type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": False}
TEXT_PIECE, OTHER_PIECE = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (ROBERTA | {"sep": ["<|eos|>", 1], "cls": ["<|eos|>", 99_999]}, "puts the id 99,999 around texts"),
        (
            {"type": "TemplateProcessing", "single": [TEXT_PIECE], "pair": [OTHER_PIECE] * 2}
            | {"single": [OTHER_PIECE], "special_tokens": {}},
            "its post-processor can't be used",
        ),
        (
            {"type": "TemplateProcessing", "single": [TEXT_PIECE], "pair": [TEXT_PIECE, OTHER_PIECE]}
            | {"single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "special_tokens": {}},
            "its post-processor can't be used",
        ),
    ],
)
def test_post_processor_is_refused_with_unknown_ids(make_model_dir: MakeDir, rule: Any, words: str) -> None:
    summary = TokenizerSummary(parts={"post_processor": rule}, is_reduced=True)
    with pytest.raises(ConfigError, match=words):
        Tokenizer(make_model_dir("byte_level")).with_differences(summary)


def test_grammar_ends_with_own_token(make_model_dir: MakeDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model_dir("byte_level")
    base = Tokenizer(path)
    found = differences(make_own(path, tmp_path, eos_token="<|fin|>"), path)
    compiler = GrammarCompiler(path, base.vocab_size + 8, [1])
    own = compiler.of(found.text())
    made = base.with_differences(found)
    call, end = made.token_to_id("<call>"), made.token_to_id("<|fin|>")
    assert call is not None
    assert end is not None
    # Lark names a token so; in quotes it is text
    lark = 'start: <call> "a"'
    matcher = own.compile(lark)
    assert matcher.consume_token(call)
    assert matcher.consume_token(made.encode("a", add_special_tokens=False)[0])
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    assert {id_ for id_ in range(own.vocab_size) if mask >> id_ & 1} == {1, end}
    # the base's vocabulary has neither
    with pytest.raises(InvalidRequest, match="a special token that this model doesn't have"):
        compiler.of("").compile(lark)
    assert compiler.own_bytes == 0 < own.own_bytes
    assert compiler.of(found.text()) is own
    monkeypatch.setattr(grammar, "MAX_OWN_TOKENIZERS", 1)
    compiler.of(TokenizerSummary(special={"eos_token": "<|eos|>"}, is_reduced=True).text())
    assert compiler.of(found.text()) is not own
