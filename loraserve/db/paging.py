"""Pages of a list: at most `limit` items in a fixed order, and a cursor.

The cursor encodes where the next page starts.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS

T = TypeVar("T")
R = TypeVar("R")
MAX_CURSOR_BYTES = 200


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Page of a list.

    Items added or removed between requests never make a later page repeat or skip other items.
    """

    items: tuple[T, ...]
    next_cursor: str | None
    """Cursor of the next page; None on the last page."""


def make_page(rows: Sequence[R], limit: int, position: Callable[[R], str], convert: Callable[[R], T]) -> Page[T]:
    """Build the page of the first `limit` rows; one more row means that there is a next page."""
    shown = rows[:limit]
    more = len(rows) > limit
    return Page(tuple(convert(row) for row in shown), encode_cursor(position(shown[-1])) if more else None)


def check_limit(limit: int) -> int:
    """Check that `limit` is a valid page size, and return it.

    Raises:
        InvalidRequest: the size isn't in 1 … `LIMITS.max_page_size`.
    """
    if not 1 <= limit <= LIMITS.max_page_size:
        raise InvalidRequest(f"limit should be between 1 and {LIMITS.max_page_size}; it is {limit}.", param="limit")
    return limit


def encode_cursor(position: str) -> str:
    return base64.urlsafe_b64encode(position.encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None) -> str | None:
    """Decode the position in a cursor of `encode_cursor`; None for the first page.

    Raises:
        InvalidRequest: the cursor isn't one of ours.
    """
    if cursor is None:
        return None
    try:
        position = base64.b64decode(cursor.encode() + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        position = ""
    if not position or len(cursor) > MAX_CURSOR_BYTES or not position.isprintable():
        raise InvalidRequest(
            "cursor is invalid: it isn't a next_cursor of this server.",
            param="cursor",
            hint="Pass next_cursor of the page before, or none.",
        )
    return position


def decode_number_cursor(cursor: str | None) -> int | None:
    """Decode a cursor of a list ordered by number, as `decode_cursor` does."""
    position = decode_cursor(cursor)
    if position is None:
        return None
    if not (position.isascii() and position.isdigit() and len(position) <= 18):
        raise wrong_cursor()
    return int(position)


def wrong_cursor() -> InvalidRequest:
    """Build the error for a cursor of another list."""
    return InvalidRequest(
        "cursor is invalid: it isn't a next_cursor of this list.",
        param="cursor",
        hint="Pass next_cursor of the page before.",
    )
