"""Deliver an answer to its client: write its bytes, and bill what goes out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from loraserve.api.errors import error_response
from loraserve.api.http.disconnect import while_connected
from loraserve.api.http.json_body import dump_json
from loraserve.api.http.request_record import RequestRecord
from loraserve.api.http.sse import EventSource, EventStream, JSONAnswer
from loraserve.api.inference.answering.answer import StreamableAnswer
from loraserve.api.inference.answering.direct_reader import DirectReader
from loraserve.api.scopes import COLLECTED_USAGE
from loraserve.api.services import services_of

if TYPE_CHECKING:
    from loraserve.api.http.connection import PieceWriter
    from loraserve.api.inference.answering.answer import Answer
    from loraserve.api.inference.answering.generation import Generation
    from loraserve.api.inference.answering.metering import RequestUsage
    from loraserve.engine_client.client import Chunk
    from loraserve.errors import LoraserveError


_SPACE = b" "
"""White space before JSON, which parsers skip."""


class Delivery(EventSource):
    """Way of one answer from the engine's chunks into the client's connection.

    However it ends, the generation is closed, and its usage: at the latest when the stream is.
    """

    def __init__(self, request: Request, generation: Generation, answer: Answer, usage: RequestUsage) -> None:
        self._request, self._generation, self._answer, self._usage = request, generation, answer, usage
        self._record: RequestRecord = request.state.record
        self._record.inference = generation.record
        self._stream: StreamableAnswer | None = None
        self._reader: DirectReader | None = None
        self._starting: asyncio.Future[Chunk] | None = None
        self._making: asyncio.Future[bytes] | None = None
        """The whole answer, which the response may begin without."""
        self._headers: dict[str, str] = {}
        """Headers of a whole answer, once its first chunk has come."""
        self._is_whole_next = False
        self._silent_s: float | None = services_of(request).limits.silent_stream_s
        if isinstance(answer, StreamableAnswer) and answer.is_stream:
            self._stream, self.ending, self.media_type = answer, answer.ending, answer.media_type
            self._reader = DirectReader(answer, usage, self._record)
            generation.read_with(self._reader)

    async def respond(self) -> Response:
        """Build the response, once the first chunk has come; a whole answer's, once it is there.

        A stream begins after `Limits.silent_stream_s` in any case, a whole answer after
        `Settings.whole_answer_keep_alive_s` if that is set.

        Raises:
            LoraserveError: it failed before the first byte of the answer.
            ClientDisconnect: the client has left.
        """
        try:
            if self._stream is not None:
                first = await self._first_of_stream()
                return EventStream(self, {**self._answer.headers(first), **self._generation.headers})
            return await self._respond_whole()
        except BaseException:
            await self.close()
            raise

    async def _respond_whole(self) -> Response:
        # a batch's line has no connection, and its status tells whether it's tried again
        has_connection = COLLECTED_USAGE not in self._request.scope
        keep_alive_s = services_of(self._request).settings.whole_answer_keep_alive_s if has_connection else None
        self._making = making = asyncio.ensure_future(self._make_whole())
        await while_connected(self._request, _wait(making, keep_alive_s))
        if making.done():
            return JSONAnswer(making.result(), self._headers, self._usage.bill_all, self._end)
        self._silent_s, self.ending, self.media_type = keep_alive_s, b"", "application/json"
        return EventStream(self, self._headers or {**self._answer.headers(None), **self._generation.headers})

    async def _make_whole(self) -> bytes:
        """Make the whole answer once the last chunk has come, and its headers with the first."""
        generation, answer = self._generation, self._answer
        self._headers = {**answer.headers(await generation.start()), **generation.headers}
        async for index, chunk in generation:
            self._usage.add(index, chunk)
            answer.add(index, chunk)
        await generation.close()
        await answer.finish()
        return await generation.run(lambda: dump_json(answer.whole()))

    async def _first_of_stream(self) -> Chunk | None:
        """Wait for the first chunk; None if it takes so long that the stream begins without it."""
        self._starting = starting = asyncio.ensure_future(self._generation.start())
        await while_connected(self._request, _wait(starting, self._silent_s))
        return starting.result() if starting.done() else None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the stream, but for what its reader writes meanwhile."""
        stream = self._stream
        if stream is None:
            while self._making is not None and not self._making.done():
                yield _SPACE
                await _wait(self._making, self._silent_s)
            if self._making is not None:
                # its error is the body
                data, self._is_whole_next = self._making.result(), True
                yield data
            return
        while self._starting is not None and not self._starting.done():
            yield stream.ping()
            await _wait(self._starting, self._silent_s)
        if self._starting is not None:
            # its error ends the stream
            self._starting.result()
        if data := stream.opening():
            yield data
        async for index, chunk in self._generation:
            if data := self._render(index, chunk):
                yield data
        if data := await stream.closing():
            yield data

    def _render(self, index: int, chunk: Chunk) -> bytes:
        """Add a chunk to the usage, and return its events."""
        self._usage.add(index, chunk)
        return b"" if self._stream is None else self._stream.render(index, chunk)

    def on_deliver(self) -> None:
        if self._stream is not None:
            self._usage.bill_last()
        elif self._is_whole_next:
            self._usage.bill_all()

    def write(self, pieces: PieceWriter, data: bytes) -> None:
        """Write a piece past the middlewares, and note it as they do."""
        self._record.note_piece(data)
        super().write(pieces, data)

    def connect(self, pieces: PieceWriter) -> None:
        if self._reader is not None:
            self._reader.connect(pieces)

    def failure(self, error: LoraserveError) -> bytes:
        self._record.code = error.code
        if self._stream is not None:
            return self._stream.failure(error)
        state = self._request.state
        return bytes(error_response(error, path=self._request.scope["path"], request_id=state.request_id).body)

    async def close(self) -> None:
        futures = [future for future in (self._starting, self._making) if future is not None]
        # a failed task has its frames, which have this
        self._starting = self._making = None
        try:
            for future in futures:
                future.cancel()
            await asyncio.gather(*futures, return_exceptions=True)
        finally:
            try:
                await self._generation.close()
            finally:
                self._end()

    def _end(self) -> None:
        generation = self._generation
        generation.note_answered()
        self._usage.close(generation.num_tokens, has_engine_work=generation.has_engine_work)
        self._usage.note(generation.record)


async def _wait(future: asyncio.Future[Any], timeout_s: float | None) -> None:
    """Wait until it is done, or for that long; None: as long as it takes."""
    await asyncio.wait({future}, timeout=timeout_s)
