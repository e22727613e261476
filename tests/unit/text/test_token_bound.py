"""The fewest tokens that a text can have: never more than it has,
for any tokenizer of which a bound is claimed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from loraserve.demo.pack import base_dir
from loraserve.text.token_bound import TokenBound
from loraserve.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog " * 4,
    "def main():\n        return            1\n\n\n\n" * 8,
    "été déjà vu, Åsa ölvatten 東京都 ﬁne ffi 한국어 ▁▁ mark " * 4,
    "=" * 40 + "-" * 40 + " " * 64,
]
TEXTS = st.one_of(
    st.text(max_size=200),
    st.text(alphabet=" \t\nab=-e\u0301\u0327\u0323\u1100\u1161\u11a8\u2126\u1fef\u037eﬁ▁<>|x0", max_size=200),
    st.lists(st.sampled_from([*CORPUS, " " * 70, "<|end|>", "<mask>", " <mask> ", "<0x41>", "ﬁ"]), max_size=5).map(
        "".join
    ),
)


def byte_level(normalizer: Any = None, added: tuple[AddedToken, ...] = (), extra: Any = None) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizer
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=extra is None)
    made.pre_tokenizer = split if extra is None else pre_tokenizers.Sequence([extra, split])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens(list(added))
    return made


def with_fallback(normalizer: Any, split: Any = None, added: tuple[AddedToken, ...] = ()) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizer
    if split is not None:
        made.pre_tokenizer = split
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    made.train_from_iterator([text[:60] for text in CORPUS], trainer)
    # the 256 are vocabulary, as in a checkpoint, not added tokens
    definition = json.loads(made.to_str())
    definition["added_tokens"] = definition["added_tokens"][:1]
    made = tokenizers.Tokenizer.from_str(json.dumps(definition))
    made.add_tokens(list(added))
    return made


def marks() -> Any:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


PROVEN: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level, its own split": lambda: byte_level(
        extra=pre_tokenizers.Split(tokenizers.Regex(r"\s+|\w+"), "isolated")
    ),
    "byte-level, no split": lambda: byte_level(extra=pre_tokenizers.Digits(individual_digits=True)),
    "NFC": lambda: byte_level(normalizers.NFC()),
    "NFKC": lambda: byte_level(normalizers.NFKC()),
    "NFD": lambda: byte_level(normalizers.NFD()),
    "greedy added": lambda: byte_level(
        None, (AddedToken("<mask>", lstrip=True, rstrip=True), AddedToken("<|end|>", special=True))
    ),
    "long added": lambda: byte_level(normalizers.NFC(), (AddedToken("=-" * 50, normalized=True), AddedToken("ab" * 9))),
    "marks": lambda: with_fallback(marks()),
    "marks and NFKC": lambda: with_fallback(normalizers.Sequence([normalizers.NFKC(), marks()])),
    "marks, added": lambda: with_fallback(marks(), None, (AddedToken("<mask>", lstrip=True),)),
    "metaspace": lambda: with_fallback(None, pre_tokenizers.Metaspace()),
    "the demo's": lambda: tokenizers.Tokenizer.from_file(str(base_dir() / "tokenizer.json")),
}

made: dict[str, tuple[tokenizers.Tokenizer, TokenBound]] = {}


def of(name: str) -> tuple[tokenizers.Tokenizer, TokenBound]:
    if name not in made:
        tokenizer = PROVEN[name]()
        made[name] = tokenizer, TokenBound(json.loads(tokenizer.to_str()))
    return made[name]


@pytest.mark.parametrize("name", PROVEN)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_text_never_has_fewer_tokens_than_bound(name: str, text: str) -> None:
    tokenizer, bound = of(name)
    assert bound.is_proven
    assert bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", PROVEN)
def test_a_long_text_has_a_bound_worth_having(name: str) -> None:
    _, bound = of(name)
    assert bound.least_tokens("The quick brown fox jumps over the lazy dog. " * 1000) > 1000


def test_single_token_never_weighs_more_than_encoded() -> None:
    for name in PROVEN:
        tokenizer, bound = of(name)
        for token in tokenizer.get_vocab():
            text = tokenizer.decoder.decode([token]) if tokenizer.decoder else token.replace("▁", " ")
            if text:
                assert bound.least_tokens(text) <= max(1, len(tokenizer.encode(text, add_special_tokens=False).ids))


def lowercased() -> tokenizers.Tokenizer:
    return byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]))


def without_a_byte() -> tokenizers.Tokenizer:
    definition = json.loads(byte_level().to_str())
    vocabulary = definition["model"]["vocab"]
    missing = "ÿ"
    definition["model"]["vocab"] = {token: id_ for token, id_ in vocabulary.items() if missing not in token}
    definition["model"]["merges"] = [pair for pair in definition["model"]["merges"] if missing not in "".join(pair)]
    return tokenizers.Tokenizer.from_str(json.dumps(definition))


def dropping_template() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.post_processor = processors.TemplateProcessing(single="[UNK] $A", special_tokens=[("[UNK]", 0)])
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [
        lowercased,
        without_a_byte,
        dropping_template,
        lambda: byte_level(normalizers.Strip()),
        lambda: byte_level(normalizers.Replace(tokenizers.Regex(r"\s+"), " ")),
        lambda: byte_level(extra=pre_tokenizers.Split(" ", "removed")),
        lambda: byte_level(extra=pre_tokenizers.Whitespace()),
        lambda: byte_level(normalizers.NFKC(), (AddedToken("ﬁ" * 9, normalized=True),)),
        lambda: tokenizers.Tokenizer(models.Unigram([("a", 0.0), ("▁", -1.0)], 0, True)),
        lambda: tokenizers.Tokenizer(models.BPE({"a": 0}, [])),
    ],
)
def test_text_dropping_tokenizer_has_no_bound(make: Callable[[], tokenizers.Tokenizer]) -> None:
    bound = TokenBound(json.loads(make().to_str()))
    assert not bound.is_proven
    assert bound.least_tokens("a b c " * 1000) == 0


def test_short_and_long_texts_are_encoded_as_before(tmp_path: Path) -> None:
    tokenizer = Tokenizer(base_dir())
    plain = tokenizers.Tokenizer.from_file(str(base_dir() / "tokenizer.json"))
    for text in ("", "a", "list the tickets with age over 81", *CORPUS, "".join(CORPUS) * 20):
        for special in (True, False):
            assert tokenizer.encode(text, special) == plain.encode(text, add_special_tokens=special).ids
        ids = tokenizer.encode(text, False)
        assert tokenizer.decode(ids) == plain.decode(ids, skip_special_tokens=True)
