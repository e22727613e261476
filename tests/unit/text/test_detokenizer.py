from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraserve.text.detokenizer import decode_stream
from loraserve.text.tokenizer import Tokenizer

KINDS = ["byte_level", "llama2", "gemma", "metaspace", "wordpiece"]
_makers: list[Callable[..., Path]] = []


@pytest.fixture(autouse=True)
def _maker(make_model_dir: Callable[..., Path]) -> None:
    _makers[:] = [make_model_dir]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(_makers[0](kind))


def stream(
    tokenizer: Tokenizer, token_ids: Sequence[int], sizes: Sequence[int], skip: bool, prompt: Sequence[int] = ()
) -> list[str]:
    """Push `token_ids` in pieces of `sizes` (repeated), and return every delta."""
    detokenizer = decode_stream(tokenizer, skip, prompt)
    deltas, start, turn = [], 0, 0
    while start < len(token_ids):
        size = sizes[turn % len(sizes)]
        deltas.append(detokenizer.push(token_ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*deltas, detokenizer.finish()]


@st.composite
def tokens_and_sizes(draw: st.DrawFn) -> tuple[str, list[int], list[int], bool]:
    kind = draw(st.sampled_from(KINDS))
    # a few ids past the vocabulary: a model's logits are often wider than its tokenizer
    ids = draw(st.lists(st.integers(0, tokenizer_of(kind).vocab_size + 3), max_size=40))
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    return kind, ids, sizes, draw(st.booleans())


@given(tokens_and_sizes())
@settings(max_examples=600, deadline=None)
def test_deltas_add_up_to_full_decoding(case: tuple[str, list[int], list[int], bool]) -> None:
    kind, ids, sizes, skip = case
    tokenizer = tokenizer_of(kind)
    assert "".join(stream(tokenizer, ids, sizes, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma", "metaspace"])
def test_special_tokens_can_be_shown_individually(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    special = sorted(tokenizer.special_token_ids)
    token_ids = [*special, tokenizer.vocab_size - 1, *special]
    for shown in ([], special[:1], special):
        detokenizer = decode_stream(tokenizer, True, shown=shown)
        text = "".join([*(detokenizer.push([id_]) for id_ in token_ids), detokenizer.finish()])
        kept = [id_ for id_ in token_ids if id_ not in special or id_ in shown]
        assert text == tokenizer.decode(kept, skip_special_tokens=False)


@st.composite
def fallback_runs(draw: st.DrawFn) -> list[int]:
    """Mostly bytes, so that runs, broken runs and special tokens inside runs are common."""
    tokenizer = tokenizer_of("llama2")
    byte = st.one_of(
        st.sampled_from([tokenizer.token_to_id(f"<0x{b:02X}>") for b in (*"é中👩".encode(), 0xFF, 0x80, 0x41)]),
    )
    return draw(st.lists(st.one_of(byte, byte, byte, st.integers(0, tokenizer.vocab_size - 1)), max_size=30))


@given(fallback_runs(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_runs_of_fallback_bytes_decode_as_a_whole(ids: list[int], skip: bool) -> None:
    tokenizer = tokenizer_of("llama2")
    assert "".join(stream(tokenizer, ids, [1], skip)) == tokenizer.decode(ids, skip)


@given(st.text(max_size=40), st.text(min_size=1, max_size=40))
@settings(max_examples=300, deadline=None)
def test_completion_text_extends_decoded_prompt(prompt: str, text: str) -> None:
    for kind in ("byte_level", "llama2", "gemma"):
        tokenizer = tokenizer_of(kind)
        prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(text, add_special_tokens=False)
        added = "".join(stream(tokenizer, ids, [1], True, prompt_ids))
        assert tokenizer.decode(prompt_ids) + added == tokenizer.decode([*prompt_ids, *ids])


@given(st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_invalid_utf8_streams_without_waiting_for_the_end(data: bytes) -> None:
    tokenizer = tokenizer_of("byte_level")
    byte_ids = {tokenizer.token_bytes(id_): id_ for id_ in range(tokenizer.vocab_size)}
    detokenizer = decode_stream(tokenizer)
    text = ""
    for count, byte in enumerate(data, start=1):
        text += detokenizer.push([byte_ids[bytes((byte,))]])
        # at most an unfinished character of three bytes is held back
        settled = data[: max(0, count - 3)].decode("utf-8", "replace").rstrip("�")
        assert text.startswith(settled)
    assert text + detokenizer.finish() == data.decode("utf-8", "replace")


def test_emoji_appears_only_after_last_byte() -> None:
    tokenizer = tokenizer_of("llama2")
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "👩".encode()]
    assert stream(tokenizer, [*ids, tokenizer.token_to_id("a")], [1], True) == ["", "", "", "", "👩a", ""]


def test_first_word_after_prompt_keeps_space() -> None:
    tokenizer = tokenizer_of("llama2")
    assert "".join(stream(tokenizer, [tokenizer.token_to_id("▁b")], [1], True, tokenizer.encode("a"))) == " b"


def test_character_begun_by_prompt_belongs_to_completion() -> None:
    for kind in ("byte_level", "llama2"):
        tokenizer = tokenizer_of(kind)
        byte = {tokenizer.token_bytes(id_): id_ for id_ in range(tokenizer.vocab_size)}
        ids = [byte[bytes((b,))] for b in "👩".encode()]
        assert "".join(stream(tokenizer, ids[2:], [1], True, [*tokenizer.encode("a"), *ids[:2]])) == "👩"


def test_complete_character_at_prompt_end_is_not_repeated() -> None:
    tokenizer = tokenizer_of("llama2")
    assert "".join(stream(tokenizer, [tokenizer.token_to_id("a")], [1], True, tokenizer.encode("b👩"))) == "a"


def test_space_survives_any_number_of_skipped_tokens() -> None:
    tokenizer = tokenizer_of("llama2")
    ids = [tokenizer.token_to_id("a"), *[1] * 40, tokenizer.token_to_id("▁b")]
    assert "".join(stream(tokenizer, ids, [1], True)) == "a b"
    assert "".join(stream(tokenizer, ids[-1:], [1], True, ids[:-1])) == " b"
