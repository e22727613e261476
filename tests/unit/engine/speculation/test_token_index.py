from __future__ import annotations

import random

import pytest

from loraserve.engine.speculation.token_index import (
    MATCH_LENGTHS,
    MIN_CAPACITY,
    SEPARATOR,
    TOKEN_BYTES,
    Match,
    TokenIndex,
    end_hashes,
)


def find(index: TokenIndex, text: list[int]) -> Match | None:
    return index.find(end_hashes(text[-8:]), text[-8:])


def expected(tokens: list[int], last: list[int]) -> tuple[int, int] | None:
    """The latest place after the longest end, found by looking everywhere."""
    for length in MATCH_LENGTHS:
        if len(last) < length:
            continue
        for position in range(len(tokens) - 1, length - 1, -1):
            if tokens[position - length : position] == last[-length:]:
                return length, position
    return None


@pytest.mark.parametrize("piece", [1, 3, 40, 500])
@pytest.mark.parametrize("vocab", [2, 12, 32_000])
def test_latest_position_of_longest_suffix_is_usually_found(vocab, piece):
    rng = random.Random(vocab)
    motif = [rng.randrange(vocab) for _ in range(30)]
    tokens: list[int] = []
    while len(tokens) < 600:
        tokens += motif if rng.random() < 0.5 else [rng.randrange(vocab) for _ in range(20)]
    index, num_lost = TokenIndex(4096), 0
    for first in range(0, len(tokens), piece):
        index.add(tokens[first : first + piece])
        here = tokens[: first + piece]
        found, wanted = find(index, here), expected(here, here)
        if found is not None:
            assert here[found.position - found.length : found.position] == here[-found.length :]
        # an entry may be lost to another n-gram's, and a shorter match is found then
        num_lost += found != wanted
    assert num_lost <= max(1, len(tokens) // piece // 5)


def test_index_from_pieces_nearly_equals_whole_index():
    rng = random.Random(0)
    tokens = [rng.randrange(9) for _ in range(200)]
    whole, pieces = TokenIndex(1024), TokenIndex(1024)
    whole.add(tokens)
    for token in tokens:
        pieces.add([token])
    # which of two n-grams has an entry that both want depends on the order
    num_equal = sum(find(whole, tokens[:end]) == find(pieces, tokens[:end]) for end in range(1, 200))
    assert num_equal > 180


def test_token_after_end_of_text_is_not_read():
    index = TokenIndex(1024)
    index.add([1, 2, 3, 4, SEPARATOR, 5, 6])
    match = find(index, [9, 1, 2])
    assert match is not None
    assert index.read(match.position, 10) == (3, 4)
    assert index.read(5, 5) == (5, 6, 5, 6, 5)
    assert index.read(7, 5) == ()


@pytest.mark.parametrize("last", [[], [1], [5, 5], [2**31 - 1] * 8])
def test_absent_suffix_is_not_found(last):
    index = TokenIndex(1024)
    assert find(index, last) is None
    index.add([1, 2, 3, 1])
    assert find(index, last) is None


def test_full_index_stays_within_bytes_and_keeps_recent():
    rng = random.Random(1)
    index = TokenIndex(MIN_CAPACITY * 4)
    tokens: list[int] = []
    for count in [1, 100, 37, 5000, 3, 600, 2, 511, 513] * 3:
        tokens += (piece := [rng.randrange(1000) for _ in range(count)])
        index.add(piece)
        assert len(index) <= MIN_CAPACITY * 4
        assert index.num_bytes <= MIN_CAPACITY * 4 * TOKEN_BYTES
        assert list(index.read(0, len(index))) == tokens[-len(index) :]
    last = tokens[-20:-12]
    match = find(index, last)
    assert match is not None
    assert index.read(match.position, 3) == tuple(tokens[-12:-9])
