"""A request that the server waits for, whatever becomes of the engine process meanwhile."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.output import merge
from loraserve.engine_client.timeouts import TIMEOUT, timeout_error
from loraserve.errors import LoraserveError, error_from_code
from loraserve.types import FinishReason, TokenOutput

_NUM_STEPS_IN_FLIGHT = 2
"""An engine may launch a step before it has sent the results of the one before: a request's step is known to have gone well once the token after its own is there."""
TIMEOUT_GRACE_S = 2.0
"""The engine looks at the clock between steps: for so long it is waited for beyond a request's own time."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between admission and its end, as the server sees it. Its tokens outlive any engine process.

    Attributes:
        deadline_s: when its own time is over, by `time.monotonic`; infinite where it named none.
    """

    request: GenerateRequest
    deadline_s: float = math.inf
    output_token_ids: list[int] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)
    """Received and not yet read."""
    error: LoraserveError | None = None
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    is_sent: bool = False
    """Whether the present engine process has it."""
    num_crashes: int = 0
    """Engine deaths in a row that it was in flight at, without a token in between."""
    num_outputs_since_sent: int = 0
    """Of the present engine process."""
    has_progressed: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether a step of the present engine process was computed for it, for certain; or nobody waits for it any more."""
    has_begun: bool = False
    """Whether its first output has come, of any engine process."""
    is_finished: bool = False
    """Whether the engine sent its last token; its reader may be behind."""

    def receive(self, output: TokenOutput) -> None:
        self.output_token_ids.extend(output.token_ids)
        self.outputs.append(output)
        self.is_finished = output.finish_reason is not None
        self.num_crashes = 0
        self.has_begun = True
        self.num_outputs_since_sent += 1
        if self.is_finished or self.num_outputs_since_sent >= _NUM_STEPS_IN_FLIGHT:
            self.has_progressed.set()
        self.has_news.set()

    def fail(self, error: LoraserveError) -> None:
        self.error = error
        self.has_progressed.set()
        self.has_news.set()

    def remaining_s(self, now_s: float) -> float | None:
        """What is left of its own time; None where it named none."""
        return None if math.isinf(self.deadline_s) else max(0.0, self.deadline_s - now_s)

    async def next(self, max_wait_s: float | None = None) -> TokenOutput:
        """Return everything that came since the last call, as one output; raise what ended it otherwise.

        The engine ends it when its own time is over. Where that doesn't come, since the engine hangs or is being replaced, this does, a little later.

        Raises:
            TimeoutError: nothing came for so long.
            DeadlineExceeded: its own time is over, and there is no token.
        """
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
            self.has_news.clear()
            await self.has_news.wait()
