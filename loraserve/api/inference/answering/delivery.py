"""Deliver an answer to its client: write its bytes, and bill what goes out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from loraserve.api.http.json_body import dump_json
from loraserve.api.http.request_record import RequestRecord
from loraserve.api.http.sse import EventSource, EventStream, JSONAnswer
from loraserve.api.inference.answering.direct_reader import DirectReader

if TYPE_CHECKING:
    from loraserve.api.http.connection import PieceWriter
    from loraserve.api.inference.answering.answer import Answer
    from loraserve.api.inference.answering.generation import Generation
    from loraserve.api.inference.answering.metering import RequestUsage
    from loraserve.engine_client.client import Chunk
    from loraserve.errors import LoraserveError

T = TypeVar("T")


class Delivery(EventSource):
    """Way of one answer from the engine's chunks into the client's connection.

    However it ends, the generation is closed, and its usage: at the latest when the stream is.
    """

    def __init__(self, request: Request, generation: Generation, answer: Answer, usage: RequestUsage) -> None:
        self._request, self._generation, self._answer, self._usage = request, generation, answer, usage
        self.ending = answer.ending
        self.on_deliver = usage.bill_last
        self._record: RequestRecord = request.state.record
        self._record.inference = generation.record
        self.note_piece = self._record.note_piece
        self._reader: DirectReader | None = None
        if answer.is_stream:
            self._reader = DirectReader(self.render, self.on_deliver, self.note_piece)
            generation.read_with(self._reader)

    async def respond(self) -> Response:
        """Return the response, once the first chunk has come; a whole answer's, once it is there.

        Raises:
            LoraserveError: it failed before the first byte of the answer.
            ClientDisconnect: the client has left.
        """
        request, generation, answer, usage = self._request, self._generation, self._answer, self._usage
        try:
            first = await while_connected(request, generation.start())
            headers = {**answer.headers(first), **generation.headers}
            if answer.is_stream:
                return EventStream(self, headers)
            await while_connected(request, self._collect())
            await generation.close()
            await while_connected(request, answer.finish())
            data = await generation.run(lambda: dump_json(answer.whole()))
            return JSONAnswer(data, headers, usage.bill_all, self._end)
        except BaseException:
            await self.close()
            raise

    async def _collect(self) -> None:
        async for index, chunk in self._generation:
            self._usage.add(index, chunk)
            self._answer.add(index, chunk)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the stream, but for what its reader writes meanwhile."""
        if data := self._answer.opening():
            yield data
        async for index, chunk in self._generation:
            if data := self.render(index, chunk):
                yield data
        if data := await self._answer.closing():
            yield data

    def render(self, index: int, chunk: Chunk) -> bytes:
        """Add a chunk to the usage, and return its events."""
        self._usage.add(index, chunk)
        return self._answer.render(index, chunk)

    def connect(self, pieces: PieceWriter) -> None:
        if self._reader is not None:
            self._reader.connect(pieces)

    def failure(self, error: LoraserveError) -> bytes:
        self._record.code = error.code
        return self._answer.failure(error)

    async def close(self) -> None:
        try:
            await self._generation.close()
        finally:
            self._end()

    def _end(self) -> None:
        generation = self._generation
        generation.note_answered()
        self._usage.close(generation.num_tokens, has_engine_work=generation.has_engine_work)
        self._usage.note(generation.record)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it once the client has left.

    The body must have been read: what comes next on the connection is its end.

    Raises:
        ClientDisconnect: the client left before.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    finally:
        watcher.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await asyncio.shield(asyncio.gather(task, watcher, return_exceptions=True))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
