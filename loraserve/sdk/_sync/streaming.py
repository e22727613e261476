# Generated from loraserve/sdk/_async/streaming.py by `make sdk`: don't edit.
"""Answers that come in pieces: server-sent events, each a typed chunk, ended by ``[DONE]``."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

import httpx2

from loraserve.contract.result import Answer, Result
from loraserve.sdk import events

C = TypeVar("C", bound=Result)


class Stream(Generic[C]):
    """Yield chunks as they come; iterate once.

    Leaving the `with` block (or `close`) makes the server stop generating.

    An error after the first byte is raised where the next chunk would have been. The request isn't
    repeated: the caller has seen the text so far.
    """

    def __init__(self, response: httpx2.Response, kind: type[C], url: str) -> None:
        self.answer = Answer.of(response)
        self._response = response
        self._chunks = self._read(kind, url)

    def __iter__(self) -> Iterator[C]:
        return self._chunks

    def __next__(self) -> C:
        return next(self._chunks)

    def __enter__(self) -> Stream[C]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The server frees the request within one step."""
        self._response.close()

    def _read(self, kind: type[C], url: str) -> Iterator[C]:
        try:
            for event in httpx2.EventSource(self._response):
                if event.data == events.DONE:
                    return
                yield events.parse_chunk(event.data, kind, self.answer)
        except httpx2.TransportError as failure:
            raise events.stream_error(failure, url, self.answer) from failure
        finally:
            self._response.close()
        raise events.incomplete(self.answer)
