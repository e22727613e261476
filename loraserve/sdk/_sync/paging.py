# Generated from loraserve/sdk/_async/paging.py by `make sdk`: don't edit.
"""Lists that come in pages, read as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from loraserve.contract.result import Page, Result
from loraserve.sdk._sync.transport import Transport
from loraserve.sdk.call import Call, read_into

R = TypeVar("R", bound=Result)
PAGE_SIZE = 100
NO_PARAMS: Mapping[str, str] = {}


def all_rows(transport: Transport, path: str, kind: type[R], params: Mapping[str, str] = NO_PARAMS) -> Iterator[R]:
    """Yield every row; request the next page only when its first row is needed."""
    cursor: str | None = None
    while True:
        query = {**params, "limit": str(PAGE_SIZE)} | ({} if cursor is None else {"cursor": cursor})
        call: Call[Page[R]] = Call("GET", path, read_into(Page[kind]), params=query)  # type: ignore[valid-type]
        page = transport.send(call)
        yield from page.data
        cursor = page.next_cursor
        if cursor is None:
            return
