"""Validity of names of adapters, tenants and aliases, and equality of adapters' names."""

from __future__ import annotations

import re

from loraserve.limits import ADAPTER_NAME_PATTERN, LIMITS, NAME_PATTERN

ADAPTER_NAME_RULE = (
    f"1 to {LIMITS.max_adapter_name_length} letters, digits and the characters . _ - / : "
    "that begin with a letter or a digit, as does (or with _) what follows each / and :"
)
"""Rule of adapters' names in messages."""

_NAME = re.compile(NAME_PATTERN, re.ASCII)
_ADAPTER_NAME = re.compile(ADAPTER_NAME_PATTERN, re.ASCII)
_LETTER = re.compile(r"[A-Za-z0-9._/:-]", re.ASCII)


def is_name(text: str) -> bool:
    """Check whether `text` matches `NAME_PATTERN`.

    Then it fits its column and may be repeated in messages.
    """
    return _NAME.fullmatch(text) is not None


def is_adapter_name(text: str) -> bool:
    """Check whether `text` is a valid name of an adapter.

    Then it fits its column and may be repeated in messages. Each `is_name` is one.
    """
    return len(text) <= LIMITS.max_adapter_name_length and _ADAPTER_NAME.fullmatch(text) is not None


def name_key(name: str) -> str:
    """Convert an adapter's name to its key: names that differ in case only have the same."""
    # some letters of other scripts become ASCII in lower case
    return name.lower() if name.isascii() else name


def split_owner(text: str) -> tuple[str, str] | None:
    """Split ``OWNER/NAME`` to the names of a tenant and its adapter; None: it can't be that."""
    owner, slash, name = text.partition("/")
    owner = name_key(owner)
    return (owner, name) if slash and is_name(owner) and is_adapter_name(name) else None


def name_fault(text: str) -> str:
    """Describe why `text` isn't a valid name of an adapter, without repeating it."""
    if not text:
        return "it is empty"
    if len(text) > LIMITS.max_adapter_name_length:
        return f"it has {len(text)} characters"
    for letter in text:
        if not _LETTER.fullmatch(letter):
            is_plain = letter.isascii() and letter.isprintable()
            return f"it has the character {letter!r}" if is_plain else f"it has the character U+{ord(letter):04X}"
    if not text[0].isalnum():
        return f"it begins with {text[0]}"
    if text[-1] in "/:":
        return f"it ends with {text[-1]}"
    return "what follows one of its / or : begins with another character"
