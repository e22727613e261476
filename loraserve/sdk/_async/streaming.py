"""Answers that come in pieces: server-sent events, each a typed chunk, ended by ``[DONE]``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Generic, TypeVar

import httpx2

from loraserve.contract.result import Answer, Result
from loraserve.sdk import events

C = TypeVar("C", bound=Result)


class AsyncStream(Generic[C]):
    """Yield chunks as they come; iterate once.

    Leaving the `async with` block (or `close`) makes the server stop generating.

    An error after the first byte is raised where the next chunk would have been. The request isn't
    repeated: the caller has seen the text so far.
    """

    def __init__(self, response: httpx2.Response, kind: type[C], url: str) -> None:
        self.answer = Answer.of(response)
        self._response = response
        self._chunks = self._read(kind, url)

    def __aiter__(self) -> AsyncIterator[C]:
        return self._chunks

    async def __anext__(self) -> C:
        return await anext(self._chunks)

    async def __aenter__(self) -> AsyncStream[C]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. The server frees the request within one step."""
        await self._response.aclose()

    async def _read(self, kind: type[C], url: str) -> AsyncIterator[C]:
        try:
            async for event in httpx2.EventSource(self._response):
                if event.data == events.DONE:
                    return
                yield events.parse_chunk(event.data, kind, self.answer)
        except httpx2.TransportError as failure:
            raise events.stream_error(failure, url, self.answer) from failure
        finally:
            await self._response.aclose()
        raise events.incomplete(self.answer)
