"""Find where the last tokens of a text occurred before, in constant time and bounded memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MATCH_LENGTHS = (8, 4, 2)
"""Numbers of last tokens that are looked up, the longest first.

On JSON rows, code edits and quoted passages answers take at most 5% more steps than with a
suffix automaton, which has every length and takes twelve times the memory.
"""
LONGEST = MATCH_LENGTHS[0]
SEPARATOR = -1
"""Stands between texts: nothing is proposed beyond it."""
MIN_CAPACITY = 256
_ENTRIES_PER_TOKEN = 8
"""Size of the table by the capacity. Each token has an entry for each match length: in a full index
one in six is lost to another.
"""
TOKEN_BYTES = 4 + 4 * _ENTRIES_PER_TOKEN
"""Bytes of an index per token of its capacity."""
_MIN_BULK = 32
"""Tokens from which on they are hashed by NumPy."""
_PAIR, _FOUR, _EIGHT, _SCRAMBLE, _WORD = 0x01000193, 0x85EBCA77, 0xC2B2AE3D, 0x9E3779B1, 0xFFFFFFFF
_HASHED_LENGTHS = MATCH_LENGTHS[::-1]


class Match(NamedTuple):
    """An earlier place of a text's last tokens.

    Attributes:
        length: how many of them are the same, at least; one of `MATCH_LENGTHS`.
        position: of the token that followed them.
    """

    length: int
    position: int


class TokenIndex:
    """Tokens in the order of their addition, and a hash table of the last place after each n-gram.

    The table's entry is compared with the tokens. So an n-gram whose entry another one took isn't
    found, and nothing else goes wrong. A full index forgets the older half of its tokens.
    """

    __slots__ = ("_capacity", "_max_tokens", "_shift", "_table", "_tokens")

    def __init__(self, max_tokens: int) -> None:
        """Make an empty index.

        Args:
            max_tokens: tokens that it holds at most; a power of two, `MIN_CAPACITY` at least.
        """
        self._max_tokens = max_tokens
        self._tokens: array[int] = array("i")
        self._resize(MIN_CAPACITY)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tokens and the table."""
        return self._capacity * TOKEN_BYTES

    def add(self, token_ids: Sequence[int]) -> None:
        """Append tokens; of more than half of `max_tokens`, only the last ones."""
        kept = self._max_tokens // 2
        if len(self._tokens) + len(token_ids) > self._max_tokens:
            self._tokens = self._tokens[-kept:] if len(token_ids) <= kept else array("i")
            self._resize(self._capacity)
        token_ids = token_ids[-kept:]
        capacity = self._capacity
        while capacity < len(self._tokens) + len(token_ids):
            capacity *= 2
        if capacity > self._capacity:
            self._resize(capacity)
        first = len(self._tokens)
        self._tokens.extend(token_ids)
        self._insert(first)

    def find(self, hashes: Sequence[int], last: Sequence[int]) -> Match | None:
        """Find the latest place after the last `LONGEST` tokens of a text, or after fewer.

        If the text is the index's own, its end isn't found.

        Args:
            hashes: of the text's end, as `end_hashes` returns them.
            last: the last tokens of the text, `LONGEST` if it has as many.
        """
        tokens, shift = self._tokens, self._shift
        for number in range(len(hashes) - 1, -1, -1):
            position = self._table[(hashes[number] & _WORD) >> shift]
            # in texts without repetition this is all that is done
            if position and tokens[position - 1] == last[-1]:
                length = _HASHED_LENGTHS[number]
                if tokens[max(0, position - length) : position] == array("i", last[-length:]):
                    return Match(length, position)
        return None

    def read(self, position: int, count: int) -> tuple[int, ...]:
        """Read `count` tokens from a position on, or as many as their text has.

        A text that continues, as the index's last one does, is taken to repeat what begins there.
        """
        token_ids = tuple(self._tokens[position : position + count])
        if SEPARATOR in token_ids:
            return token_ids[: token_ids.index(SEPARATOR)]
        return (token_ids * -(-count // len(token_ids)))[:count] if token_ids else ()

    def _resize(self, capacity: int) -> None:
        """Make a table for that many tokens, and enter those that are there."""
        size = capacity * _ENTRIES_PER_TOKEN
        self._capacity, self._shift = capacity, 33 - size.bit_length()
        self._table = array("i", bytes(4 * size))
        self._insert(0)

    def _insert(self, first: int) -> None:
        """Enter the places of the tokens from `first` on: each stands behind some n-grams."""
        tokens, table, shift = self._tokens, self._table, self._shift
        if len(tokens) - first >= _MIN_BULK:
            self._insert_many(first)
            return
        for position in range(first, len(tokens)):
            for hashed in end_hashes(tokens[max(0, position - LONGEST) : position]):
                table[(hashed & _WORD) >> shift] = position

    def _insert_many(self, first: int) -> None:
        tokens, table = np.frombuffer(self._tokens, np.uint32), np.frombuffer(self._table, np.int32)
        # hashes of the n-grams before each token that has as many before it
        pairs = (tokens[1:-1] * np.uint32(_PAIR) + tokens[:-2] + np.uint32(1)) * np.uint32(_SCRAMBLE)
        fours = (pairs[2:] * np.uint32(_FOUR) + pairs[:-2]) * np.uint32(_SCRAMBLE)
        eights = (fours[4:] * np.uint32(_EIGHT) + fours[:-4]) * np.uint32(_SCRAMBLE)
        for hashes, length in ((pairs, 2), (fours, 4), (eights, 8)):
            start = max(first, length)
            # of equal n-grams, the last place stays
            table[hashes[start - length :] >> np.uint32(self._shift)] = np.arange(start, len(tokens))


def end_hashes(last: Sequence[int]) -> tuple[int, ...]:
    """Hash a text's ends of 2, 4 and 8 tokens, as far as it is as long.

    They are right modulo 2**32.

    Args:
        last: its last tokens, `LONGEST` if it has as many.
    """
    if len(last) < LONGEST:
        count = len(last)
        if count < 2:
            return ()
        pair = (last[-1] * _PAIR + last[-2] + 1) * _SCRAMBLE
        return (
            (pair,) if count < 4 else (pair, (pair * _FOUR + (last[-3] * _PAIR + last[-4] + 1) * _SCRAMBLE) * _SCRAMBLE)
        )
    h, g, f, e, d, c, b, a = last[-LONGEST:]
    pair = (a * _PAIR + b + 1) * _SCRAMBLE & _WORD
    four = (pair * _FOUR + (c * _PAIR + d + 1) * _SCRAMBLE) * _SCRAMBLE & _WORD
    other = ((e * _PAIR + f + 1) * _SCRAMBLE * _FOUR + (g * _PAIR + h + 1) * _SCRAMBLE) * _SCRAMBLE
    return pair, four, (four * _EIGHT + other) * _SCRAMBLE
