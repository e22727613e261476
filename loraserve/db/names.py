"""What may be a name of an adapter, a tenant or an alias."""

from __future__ import annotations

import re

from loraserve.limits import NAME_PATTERN

_NAME = re.compile(NAME_PATTERN, re.ASCII)


def is_name(text: str) -> bool:
    """Whether all of `text` matches `NAME_PATTERN`; so it fits its column and may be repeated in messages."""
    return _NAME.fullmatch(text) is not None
