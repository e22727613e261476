"""Live requests of an engine, or of a cluster's engines: admission, text and end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from loraserve.engine_client.admission import QueueBounds
from loraserve.engine_client.chunk import Chunk
from loraserve.engine_client.live_request import LiveRequest
from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.output import OutputProcessor
from loraserve.errors import EngineUnavailable, InvariantViolation, Overloaded
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import RequestId

_LOOK_S = 0.02
"""Seconds between two looks at what is alive, while it ends."""


class LiveRequests:
    """Admit requests within bounds, make their text, and end them.

    Args:
        bounds: bounds on live requests.
        tokenizer: tokenizer of the base; None: `generate` isn't called.
        max_queue_wait_s: seconds that a request waits for its first token.
        check_engine: check that raises EngineUnavailable where no engine can be had.

    Attributes:
        by_id: requests between admission and end.
        is_stopping: whether new requests are refused.
    """

    def __init__(
        self,
        bounds: QueueBounds,
        tokenizer: Tokenizer | None,
        *,
        max_queue_wait_s: float,
        check_engine: Callable[[], None] = lambda: None,
    ) -> None:
        self.by_id: dict[RequestId, LiveRequest] = {}
        self.is_stopping = False
        self.bounds = bounds
        self._tokenizer = tokenizer
        self._max_queue_wait_s = max_queue_wait_s
        self._check_engine = check_engine

    def admit(self, request: GenerateRequest) -> LiveRequest:
        """Count the request as alive; `leave` must follow.

        Raises:
            EngineUnavailable, Overloaded, RateLimited
        """
        self._check_engine()
        if self.is_stopping:
            raise Overloaded("The server is shutting down.", retry_after_s=5.0)
        if not request.is_background:
            self.bounds.enter(request)
        live = LiveRequest(request)
        if request.timeout_s is not None:
            live.deadline_s = time.monotonic() + request.timeout_s
        self.by_id[request.request_id] = live
        return live

    def note_began(self, live: LiveRequest) -> None:
        """Note the first output of the request, before the request receives it."""
        if not live.request.is_background:
            self.bounds.note_began(live.request.tenant)

    def leave(self, live: LiveRequest) -> None:
        """Stop counting the request, however it ended."""
        self.by_id.pop(live.request.request_id, None)
        if not live.request.is_background:
            self.bounds.leave(live.request.tenant, has_begun=live.has_begun)
        live.has_progressed.set()

    async def generate(
        self, request: GenerateRequest, send: Callable[[LiveRequest], Callable[[], object]]
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the answer as `EngineClient.generate` does, with its errors.

        Args:
            send: function that starts the request at an engine, and returns the one that ends it
                there, which is called at every end.
        """
        if self._tokenizer is None:
            raise InvariantViolation("An engine client without a tokenizer makes no text.")
        processor = OutputProcessor(request, self._tokenizer)
        live = self.admit(request)
        taker = processor.direct_taker
        end: Callable[[], object] | None = None
        try:
            end = send(live)
            try:
                output = await live.next(self._max_queue_wait_s)
            except TimeoutError:
                raise Overloaded(
                    f"The request got no token within {self._max_queue_wait_s:.0f} s, the server's limit."
                ) from None
            while True:
                chunk = processor.push(output)
                yield chunk
                if chunk.finish_reason is not None:
                    return
                live.taker = taker
                output = await live.next()
        finally:
            self.leave(live)
            if end is not None:
                end()

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, and wait up to `grace_s` for those alive; the others fail."""
        self.is_stopping = True
        deadline = time.monotonic() + grace_s
        while self.by_id and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        for live in list(self.by_id.values()):
            live.fail(EngineUnavailable("The server is shutting down."))
