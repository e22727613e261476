"""Answers that come in pieces: server-sent events, each a typed chunk, ended by ``[DONE]``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Generic, TypeVar

import httpx2

from loraserve import errors
from loraserve.sdk.answers import Answer, error_from_body
from loraserve.sdk.call import Result, parse
from loraserve.sdk.transport.transport import error_from_failure

C = TypeVar("C", bound=Result)
DONE = "[DONE]"
_ENDED = "The stream ended without its last event: the answer is incomplete."
_ENDED_HINT = "The server, or a proxy before it, went away. Ask again."


class Stream(Generic[C]):
    """Chunks as they come; iterate once. Leaving the `with` block (or `close`) tells the server to stop generating.

    An error that happens after the first byte is raised where the next chunk would have been. Nothing is asked twice:
    the text so far has been seen.
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
        """Hang up. The server frees the request within one step."""
        self._response.close()

    def _read(self, kind: type[C], url: str) -> Iterator[C]:
        try:
            for event in httpx2.EventSource(self._response):
                if event.data == DONE:
                    return
                yield _chunk(event.data, kind, self.answer)
        except httpx2.TransportError as failure:
            raise _stream_error(failure, url, self.answer) from failure
        finally:
            self._response.close()
        raise _incomplete(self.answer)


class AsyncStream(Generic[C]):
    """As `Stream`, with `async for` and `async with`."""

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
        """Hang up. The server frees the request within one step."""
        await self._response.aclose()

    async def _read(self, kind: type[C], url: str) -> AsyncIterator[C]:
        try:
            async for event in httpx2.EventSource(self._response):
                if event.data == DONE:
                    return
                yield _chunk(event.data, kind, self.answer)
        except httpx2.TransportError as failure:
            raise _stream_error(failure, url, self.answer) from failure
        finally:
            await self._response.aclose()
        raise _incomplete(self.answer)


def _chunk(data: str, kind: type[C], answer: Answer) -> C:
    """The event's chunk.

    Raises:
        LoraserveError: the event is an error (``{"error": {…}}``).
        UnexpectedAnswer: it is neither.
    """
    if '"error"' in data:
        body = _load(data)
        if isinstance(body, dict) and body.get("error"):
            error = error_from_body(body, status_code=None)
            error.request_id = answer.request_id
            raise error
    return parse(kind, data)


def _load(data: str) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _stream_error(failure: httpx2.TransportError, url: str, answer: Answer) -> errors.LoraserveError:
    error: errors.LoraserveError
    if isinstance(failure, httpx2.SSEError):
        error = errors.UnexpectedAnswer(f"The answer isn't a stream of events: {failure}")
    else:
        error = error_from_failure(failure, url)
    error.request_id = answer.request_id
    return error


def _incomplete(answer: Answer) -> errors.LoraserveError:
    error = errors.ConnectionFailed(_ENDED, hint=_ENDED_HINT)
    error.request_id = answer.request_id
    return error
