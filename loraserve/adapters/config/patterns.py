"""PEFT's rule for the keys of ``rank_pattern`` and ``alpha_pattern``.

PEFT takes the first key for which ``re.match(rf"(.*\\.)?({key})$", module_name)`` succeeds: a key
is a regex for the last components of a name. Most keys are a plain text, where only these mean more
than themselves: ``^`` at the start, ``$`` at the end, ``.`` (any one character, as in PEFT) and a
backslash before a punctuation character. Such a key has a fixed length, so that matching is a
comparison, and thousands of them cost little. Every other key is a regex (`regexes`).

The first key is the first in the file. PEFT's save_pretrained sorts the keys, so that an adapter
whose keys overlap may have been trained with another first key than PEFT itself uses after loading
it back; we do as PEFT does then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loraserve.adapters.config.expressions import Budget
from loraserve.adapters.config.regexes import Regex, compile_regex
from loraserve.limits import LIMITS, Limits

_FRAME = r"(.*\.)?({})$"
_META = set("*+?{}[]()|^$\\")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A key that is a plain text.

    `text` has one character per character to match; None matches any.
    """

    key: str
    is_anchored: bool
    text: tuple[str | None, ...]


def parse_pattern(key: str, limits: Limits = LIMITS, budget: Budget | None = None) -> Pattern | Regex | str:
    """Parse the key for `first_matches`, or return why it can't be taken.

    `budget` is `compile_regex`'s.
    """
    if not key.isascii() or not key.isprintable():
        return "it isn't plain ASCII"
    is_anchored = key.startswith("^")
    body = key[1:] if is_anchored else key
    if body in ("", "$"):
        return "it is empty"
    text: list[str | None] = []
    position = 0
    while position < len(body):
        char = body[position]
        if char == "\\" and position + 1 < len(body) and not body[position + 1].isalnum():
            position += 1
            text.append(body[position])
        elif char == "$" and position == len(body) - 1:
            break
        elif char in _META:
            return compile_regex(key, _FRAME, limits, budget)
        else:
            text.append(None if char == "." else char)
        position += 1
    return Pattern(key, is_anchored, tuple(text))


def first_matches(patterns: Sequence[Pattern | Regex], names: Iterable[str]) -> dict[str, int]:
    """Find the index of the first pattern that matches each name by PEFT's rule.

    Names that none matches are left out.
    """
    if not patterns:
        return {}
    # suffix (from the start of a component to the end) → names that have it; many names share their
    # short suffixes
    by_length: dict[int, dict[str, list[tuple[str, bool]]]] = {}
    names = list(dict.fromkeys(names))
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
        if isinstance(pattern, Regex):
            for name in names:
                if name not in matches and pattern.is_match(name):
                    matches[name] = index
            continue
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
