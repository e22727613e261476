"""Lists that come in pages, read as one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TypeVar

from loraserve.sdk.call import Call, Result, read_into
from loraserve.sdk.transport.transport import AsyncTransport, Transport
from loraserve.sdk.types.management import Page

R = TypeVar("R", bound=Result)
PAGE_SIZE = 100


NO_PARAMS: Mapping[str, str] = {}


def page_call(path: str, kind: type[R], params: Mapping[str, str], cursor: str | None) -> Call[Page[R]]:
    """The call for one page: the first where `cursor` is None."""
    params = {**params, "limit": str(PAGE_SIZE)} | ({} if cursor is None else {"cursor": cursor})
    return Call("GET", path, read_into(Page[kind]), params=params)  # type: ignore[valid-type]


def all_rows(transport: Transport, path: str, kind: type[R], params: Mapping[str, str] = NO_PARAMS) -> Iterator[R]:
    """Every row, asking for the next page only when its turn comes."""
    cursor: str | None = None
    while True:
        page = transport.send(page_call(path, kind, params, cursor))
        yield from page.data
        cursor = page.next_cursor
        if cursor is None:
            return


async def all_rows_async(
    transport: AsyncTransport, path: str, kind: type[R], params: Mapping[str, str] = NO_PARAMS
) -> AsyncIterator[R]:
    """As `all_rows`."""
    cursor: str | None = None
    while True:
        page = await transport.send(page_call(path, kind, params, cursor))
        for row in page.data:
            yield row
        cursor = page.next_cursor
        if cursor is None:
            return
