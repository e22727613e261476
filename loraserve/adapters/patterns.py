"""PEFT's rule for the keys of ``rank_pattern`` and ``alpha_pattern``, without running anybody's regular expression.

PEFT takes the first key for which ``re.match(rf"(.*\\.)?({key})$", module_name)`` succeeds: a key is a regex for the last components of a
name. We take the keys whose regex is a plain text, where only these mean more than themselves: ``^`` at the start, ``$`` at the end,
``.`` (any one character, as in PEFT) and a backslash before a punctuation character. Such a key has a fixed length, so that matching
is a comparison. Every other key is refused by name.

The first key is the first in the file. PEFT's save_pretrained sorts the keys, so that an adapter whose keys overlap may have been trained
with another first key than PEFT itself uses after loading it back; we do as PEFT does then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_META = set("*+?{}[]()|^$\\")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A key that was understood. `text` has one character per character to match; None matches any."""

    key: str
    is_anchored: bool
    text: tuple[str | None, ...]


def parse_pattern(key: str) -> Pattern | str:
    """The key as a `Pattern`, or why it can't be taken."""
    if not key.isascii() or not key.isprintable():
        return "it isn't plain ASCII"
    is_anchored = key.startswith("^")
    body = key[1:] if is_anchored else key
    text: list[str | None] = []
    position = 0
    while position < len(body):
        char = body[position]
        if char == "\\":
            position += 1
            if position == len(body) or body[position].isalnum():
                return f'"{body[position - 1 : position + 1]}" is a regex that this server doesn\'t run'
            text.append(body[position])
        elif char == "$" and position == len(body) - 1:
            break
        elif char in _META:
            return f'"{char}" makes it a regex that this server doesn\'t run; list the modules by name instead'
        else:
            text.append(None if char == "." else char)
        position += 1
    if not text:
        return "it is empty"
    return Pattern(key, is_anchored, tuple(text))


def first_matches(patterns: Sequence[Pattern], names: Iterable[str]) -> dict[str, int]:
    """For each name that some pattern matches by PEFT's rule, the index of the first such pattern."""
    # suffix (from the start of a component to the end) → names that have it; many names share their short suffixes
    by_length: dict[int, dict[str, list[tuple[str, bool]]]] = {}
    for name in names:
        start = 0
        while True:
            suffix = name[start:]
            by_length.setdefault(len(suffix), {}).setdefault(suffix, []).append((name, start == 0))
            dot = name.find(".", start)
            if dot < 0:
                break
            start = dot + 1
    matches: dict[str, int] = {}
    for index, pattern in enumerate(patterns):
        suffixes = by_length.get(len(pattern.text))
        if not suffixes:
            continue
        # fixed length, no repetition: linear whatever the key
        regex = re.compile("".join("." if c is None else re.escape(c) for c in pattern.text))
        for suffix, owners in suffixes.items():
            if regex.fullmatch(suffix):
                for name, is_whole in owners:
                    if is_whole or not pattern.is_anchored:
                        matches.setdefault(name, index)
    return matches
