"""Calls over HTTP, with retries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import BinaryIO, TypeVar

import httpx2

from loraserve.contract.result import Answer
from loraserve.sdk.attempt import Attempt
from loraserve.sdk.call import Call
from loraserve.sdk.concurrency import async_call, async_http_client, async_sleep
from loraserve.sdk.config import ClientConfig
from loraserve.sdk.file_piece import FilePiece

T = TypeVar("T")


class AsyncTransport:
    """Send calls to one server. Tasks may share it."""

    def __init__(self, config: ClientConfig, http: httpx2.AsyncClient | None = None) -> None:
        self.config = config
        self._is_ours = http is None
        self._http = http if http is not None else async_http_client(config.url)
        self._sleep = async_sleep

    async def send(self, call: Call[T]) -> T:
        """Return what the call's reader makes of the answer.

        Raises:
            LoraserveError: the server refused, didn't answer, or answered something else.
        """
        response = await self._exchange(call, is_stream=False)
        return call.read(Answer.of(response), response.content)

    async def open(self, call: Call[T]) -> httpx2.Response:
        """Return an accepted response whose body is still to come; the caller closes it."""
        return await self._exchange(call, is_stream=True)

    async def _exchange(self, call: Call[T], *, is_stream: bool) -> httpx2.Response:
        attempt = Attempt(self.config, call)
        while True:
            content = call.body if call.piece is None else _read(call.piece)
            try:
                response = await self._http.send(attempt.build(self._http, content), stream=is_stream)
                if response.is_success:
                    return response
                await response.aread()
                await response.aclose()
                delay = attempt.after_refusal(response)
            except httpx2.TransportError as failure:
                delay = attempt.after_failure(failure)
            await self._sleep(delay)

    async def pause(self, seconds: float) -> None:
        """Sleep, as between two tries."""
        await self._sleep(seconds)

    async def close(self) -> None:
        if self._is_ours:
            await self._http.aclose()


async def _read(piece: FilePiece) -> AsyncIterator[bytes]:
    """Yield the bytes of a piece, one chunk in memory at a time.

    Raises:
        AdapterFormatError: the file ends before the piece does.
    """
    file: BinaryIO = await async_call(piece.open)
    with file:
        at = piece.start
        while at < piece.end:
            piece.report(at)
            chunk = await async_call(piece.read_chunk, file, at)
            at += len(chunk)
            yield chunk
        piece.report(at)
