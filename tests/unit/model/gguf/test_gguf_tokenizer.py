"""A tokenizer out of a GGUF file's vocabulary encodes as the one that the file was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from loraserve.errors import ModelError
from loraserve.model.gguf.gguf_file import Gguf
from loraserve.model.gguf.gguf_tokenizer import GgufVocabulary

TEXT = Path(__file__).read_text() * 3 + " Grüße, it's 12345 o'clock!\r\n\n  Über ALLES: naïve café 東京 🙂 don't WE'LL"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED: dict[str, list[Any]] = {
    "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
    "qwen2": [pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
    "tekken": [pre_tokenizers.Split(Regex(TEKKEN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False, use_regex=True)],
    "gpt-2": [pre_tokenizers.ByteLevel(False, use_regex=True)],
}
"""As the models' own tokenizer.json have them."""


def byte_level(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED[pre])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    definition = json.loads(tokenizer.to_str())
    tokens = sorted(definition["model"]["vocab"], key=definition["model"]["vocab"].__getitem__)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in ("<s>", "</s>") else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in definition["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def made(metadata: dict[str, Any]) -> Tokenizer:
    vocabulary = GgufVocabulary(Gguf((Path("base.gguf"),), metadata, {}))
    return Tokenizer.from_str(json.dumps(vocabulary.tokenizer()))


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Tokenizer, Tokenizer]]:
    found = {pre: byte_level(pre) for pre in PUBLISHED}
    return {pre: (tokenizer, made(metadata_of(tokenizer, pre))) for pre, tokenizer in found.items()}


@pytest.mark.parametrize("pre", PUBLISHED)
@settings(max_examples=60)
@given(text=st.text(max_size=60) | st.sampled_from([TEXT, "<s>Hi</s> 12 1234 ABCdef Äx\n\n /a"]))
def test_byte_level_text_has_the_same_tokens(
    pre: str, pairs: dict[str, tuple[Tokenizer, Tokenizer]], text: str
) -> None:
    theirs, ours = pairs[pre]
    expected = theirs.encode(text)
    assert ours.encode(text).ids == expected.ids
    for skips in (True, False):
        assert ours.decode(expected.ids, skips) == theirs.decode(expected.ids, skips)


def sentence_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    octets = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *octets], show_progress=False)
    tokenizer.train_from_iterator(TEXT.split("\n"), trainer)
    definition = json.loads(tokenizer.to_str())
    # bytes are tokens of the model, not added ones
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["id"] < 3]
    # a vocabulary of scores has each way to make a token: those merges that training took first are
    # of the same order
    return Tokenizer.from_str(json.dumps(definition))


@settings(max_examples=60)
@given(text=st.text(max_size=60) | st.sampled_from([TEXT, "a  b", " lead", "<s>x</s>", "東京\t🙂"]))
def test_sentence_piece_text_has_the_same_tokens(text: str) -> None:
    theirs, ours = _pieces()
    expected = theirs.encode(text)
    assert ours.encode(text).ids == expected.ids
    assert ours.decode(expected.ids) == theirs.decode(expected.ids)


_MADE: list[tuple[Tokenizer, Tokenizer]] = []


def _pieces() -> tuple[Tokenizer, Tokenizer]:
    if not _MADE:
        tokenizer = sentence_piece()
        definition = json.loads(tokenizer.to_str())
        vocab, merges = definition["model"]["vocab"], definition["model"]["merges"]
        tokens = sorted(vocab, key=vocab.__getitem__)
        scores = dict.fromkeys(tokens, -1e9)
        for rank, (left, right) in enumerate(merges):
            scores[left + right] = max(scores[left + right], -float(rank))
        kinds = [2 if token == "<unk>" else 3 if token in ("<s>", "</s>") else 1 for token in tokens]
        metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [
                6 if token.startswith("<0x") else kind for token, kind in zip(tokens, kinds, strict=True)
            ],
            "tokenizer.ggml.scores": [scores[token] for token in tokens],
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
        }
        _MADE.append((tokenizer, made(metadata)))
    return _MADE[0]


def test_bos_token_is_added_when_file_requests() -> None:
    tokenizer = byte_level("gpt-2")
    metadata = {**metadata_of(tokenizer, "gpt-2"), "tokenizer.ggml.add_bos_token": True}
    assert made(metadata).encode("ab").ids == [0, *tokenizer.encode("ab").ids]


def test_end_tokens_come_from_file_and_known_words() -> None:
    metadata = metadata_of(byte_level("gpt-2"), "gpt-2")
    metadata["tokenizer.ggml.tokens"][5] = "<|im_end|>"
    metadata["tokenizer.ggml.token_type"][5] = 3
    metadata["tokenizer.ggml.eot_token_id"] = 7
    vocabulary = GgufVocabulary(Gguf((Path("base.gguf"),), metadata, {}))
    assert vocabulary.generation_config() == {"eos_token_id": [1, 7, 5]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer of the kind 't5'; expected gpt2"),
        ({"tokenizer.ggml.pre": "deepseek-v3"}, r"splits texts as 'deepseek-v3' \(tokenizer.ggml.pre\)"),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": "x"}, "tokenizer.ggml.merges isn't an array"),
    ],
)
def test_other_vocabulary_is_refused(changes: dict[str, Any], message: str) -> None:
    metadata = {**metadata_of(byte_level("gpt-2"), "gpt-2"), **changes}
    with pytest.raises(ModelError, match=message):
        made({key: value for key, value in metadata.items() if value is not None})
