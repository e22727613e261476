"""A request between admission and its end; it outlives the engine process."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from loraserve.engine_client.messages import AddRequest, GenerateRequest
from loraserve.engine_client.output import merge
from loraserve.errors import LoraserveError, error_from_code, timeout_error
from loraserve.types import TIMEOUT, FinishReason, TokenOutput

_NUM_STEPS_IN_FLIGHT = 2
"""Outputs after which a step of the present engine certainly went well.

The engine may launch a step before it sends the results of another.
"""
TIMEOUT_GRACE_S = 2.0
"""Seconds beyond a request's timeout that its end is left to the engine.

The engine looks at the clock between steps.
"""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between admission and its end, as the server sees it.

    Its tokens outlive any engine process.

    Attributes:
        deadline_s: end of its own timeout, by `time.monotonic`; infinite if it has none.
        outputs: received and not yet read.
        is_sent: whether the present engine has it.
        num_crashes: consecutive engine deaths while it was in flight, without a token in between.
        num_outputs_since_sent: outputs of the present engine.
        has_progressed: set once a step of the present engine was certainly computed for it, or it
            is over.
        has_begun: whether its first output has come, of any engine.
        is_finished: whether the engine sent its last token; its reader may be behind.
        taker: offered each output but the last while the reader waits for it; returns whether it
            took it. It may not wait: it's called by what receives.
    """

    request: GenerateRequest
    deadline_s: float = math.inf
    output_token_ids: list[int] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)
    error: Exception | None = None
    is_sent: bool = False
    num_crashes: int = 0
    num_outputs_since_sent: int = 0
    has_progressed: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: bool = False
    is_finished: bool = False
    taker: Callable[[TokenOutput], bool] | None = None
    _reader: asyncio.Future[None] | None = None

    def begin_sending(self) -> AddRequest:
        """Build the message that starts this request in an engine, or continues it there."""
        self.is_sent = True
        self.num_outputs_since_sent = 0
        request = self.request
        return AddRequest(
            request_id=request.request_id,
            tenant=request.tenant,
            adapter=request.adapter,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            output_token_ids=tuple(self.output_token_ids),
            priority=request.priority,
            weight=request.weight,
            kv_share=request.kv_share,
            timeout_s=self.remaining_s(time.monotonic()),
            pooling=request.pooling,
        )

    def receive(self, output: TokenOutput) -> None:
        """Take an output of the present engine."""
        self.output_token_ids.extend(output.token_ids)
        self.is_finished = output.finish_reason is not None
        self.num_crashes = 0
        self.has_begun = True
        self.num_outputs_since_sent += 1
        if self.is_finished or self.num_outputs_since_sent >= _NUM_STEPS_IN_FLIGHT:
            self.has_progressed.set()
        has_read_all = self._reader is not None and not self._reader.done()
        if has_read_all and self.taker is not None and not self.is_finished:
            try:
                if self.taker(output):
                    return
            except Exception as error:
                # the reader's, like any error of what it would have done with the output
                self.error = error
                self._wake()
                return
        self.outputs.append(output)
        self._wake()

    def fail(self, error: LoraserveError) -> None:
        """End the request with an error."""
        self.error = error
        self.has_progressed.set()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def remaining_s(self, now_s: float) -> float | None:
        """Compute the seconds left of its own timeout; None if it has none."""
        return None if math.isinf(self.deadline_s) else max(0.0, self.deadline_s - now_s)

    async def next(self, max_wait_s: float | None = None) -> TokenOutput:
        """Wait for everything that came since the last call, as one output.

        Raise the error that ended it otherwise.

        The engine ends a request whose own timeout is over. If it hangs or is being replaced, this
        does, a little later.

        Raises:
            TimeoutError: nothing came within `max_wait_s`.
            DeadlineExceeded: its own timeout is over, and there is no token.
        """
        if self.outputs:
            return self._take()
        remaining_s = self.remaining_s(time.monotonic())
        patience_s = None if remaining_s is None else remaining_s + TIMEOUT_GRACE_S
        is_own = patience_s is not None and (max_wait_s is None or patience_s <= max_wait_s)
        limit_s = patience_s if is_own else max_wait_s
        if limit_s is None:
            await self._wait()
        else:
            try:
                async with asyncio.timeout(limit_s):
                    await self._wait()
            except TimeoutError:
                if not is_own:
                    raise
                return self._end_overdue()
        return self._take()

    def _take(self) -> TokenOutput:
        output = merge(self.outputs)
        self.outputs.clear()
        if output.finish_reason is FinishReason.ERROR:
            raise error_from_code(output.error_code or "", output.error_message or "The request failed.")
        return output

    def _end_overdue(self) -> TokenOutput:
        if not self.output_token_ids:
            raise timeout_error(self.request.timeout_s or 0.0) from None
        return TokenOutput(request_id=self.request.request_id, finish_reason=FinishReason.LENGTH, stop_reason=TIMEOUT)

    async def _wait(self) -> None:
        while not self.outputs:
            if self.error is not None:
                raise self.error
            # an Event's bookkeeping costs as much as what is woken
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
