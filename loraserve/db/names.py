"""Validity of names of adapters, tenants and aliases."""

from __future__ import annotations

import re

from loraserve.limits import NAME_PATTERN

_NAME = re.compile(NAME_PATTERN, re.ASCII)


def is_name(text: str) -> bool:
    """Return whether `text` matches `NAME_PATTERN`.

    Then it fits its column and may be repeated in messages.
    """
    return _NAME.fullmatch(text) is not None
