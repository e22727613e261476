"""Steps in flight: launched, collected in order, and recomputed when the device raises."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from loraserve.engine.execution.batch import Batch, build_batch
from loraserve.engine.execution.runner import StepHandle, StepRunner
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.scheduling.scheduler import Scheduler
from loraserve.errors import EngineError
from loraserve.memory.devices.base import AdapterHandle
from loraserve.types import Digest, TokenOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched step."""

    batch: Batch
    handle: StepHandle


class StepPipeline:
    """Launch steps and hand their results to the scheduler.

    With `overlap` one step stays in flight, so that the device computes it while the host prepares
    the next. A step that raises is recomputed in halves, until the request at fault stands alone
    and only that one fails.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        *,
        block_size: int,
        handle_of: Callable[[Digest], AdapterHandle],
        overlap: bool,
    ) -> None:
        """Make an empty pipeline.

        Args:
            handle_of: returns the adapter that some scheduled request has pinned.
        """
        self._runner, self._scheduler = runner, scheduler
        self._block_size, self._handle_of, self._overlap = block_size, handle_of, overlap
        # oldest first: none between steps, or one with `overlap`; within a step one more
        self._in_flight: deque[_Step] = deque()

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def entries(self) -> list[ScheduledRequest]:
        """Parts of requests in the steps in flight."""
        return [entry for step in self._in_flight for entry in step.batch.entries]

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> list[TokenOutput]:
        """Launch a step, unless it is empty.

        Return outputs only if that raised and all steps were completed here.
        """
        if not scheduled:
            return []
        try:
            self._in_flight.append(self._start(scheduled))
        except Exception as error:
            outputs = []
            while self._in_flight:
                outputs += self._update()
            return outputs + self._recompute(scheduled, error)
        return []

    def collect(self, scheduled: Sequence[ScheduledRequest]) -> list[TokenOutput]:
        """Update the scheduler with the results of all steps but those that may stay in flight.

        Return the outputs.

        Args:
            scheduled: the step launched last; empty if none was.
        """
        outputs: list[TokenOutput] = []
        num_left = self._num_left(scheduled)
        while len(self._in_flight) > num_left:
            outputs += self._update()
        return outputs

    def _num_left(self, scheduled: Sequence[ScheduledRequest]) -> int:
        """Compute how many steps may run on while the next is scheduled.

        None may if that depends on what this one samples, or how many tokens.
        """
        if not self._overlap or not scheduled:
            return 0
        needs_results = any(
            e.proposed or (e.is_sampled and self._runner.needs_results_first(e.request)) for e in scheduled
        )
        return 0 if needs_results else 1

    def _start(self, scheduled: Sequence[ScheduledRequest]) -> _Step:
        previous = self._in_flight[-1].batch if self._in_flight else None
        batch = build_batch(scheduled, self._block_size, self._handle_of, previous)
        return _Step(batch, self._runner.launch(batch))

    def _update(self) -> list[TokenOutput]:
        """Wait for the oldest step and update its requests."""
        step = self._in_flight.popleft()
        try:
            results = step.handle.results()
        except Exception as error:
            self._drop_in_flight()
            return self._recompute(step.batch.entries, error)
        return self._scheduler.update(step.batch.entries, results)

    # steps that raise

    def _drop_in_flight(self) -> None:
        """Forget the steps launched after one that raised: it may have fed them.

        Their requests are scheduled again.
        """
        while self._in_flight:
            step = self._in_flight.pop()
            with suppress(Exception):
                # the device must be done with it
                step.handle.results()
            self._scheduler.forget(step.batch.entries)

    def _recompute(self, scheduled: Sequence[ScheduledRequest], error: Exception) -> list[TokenOutput]:
        """Compute what is left of a step that raised, with no other step in flight."""
        logger.warning("a step of %d requests raised %s: computing it again", len(scheduled), type(error).__name__)
        self._scheduler.forget([entry for entry in scheduled if not entry.is_current])
        # without guesses: a request must not fail for a token that it didn't sample
        return self._bisect([entry.without_proposed() for entry in scheduled if entry.is_current])

    def _bisect(self, scheduled: Sequence[ScheduledRequest]) -> list[TokenOutput]:
        """Compute rows synchronously.

        If that raises, halve them until the request at fault stands alone, and fail it.

        Computing rows twice is safe: they don't see each other, and KV is written to the same slots
        again.
        """
        if not scheduled:
            return []
        try:
            step = self._start(scheduled)
            results = step.handle.results()
        except Exception as error:
            if len(scheduled) == 1:
                logger.exception("request %s failed in a step", scheduled[0].request.request_id)
                reason = EngineError(f"The step that computed this request failed: {type(error).__name__}.")
                return [self._scheduler.fail(scheduled[0].request, reason)]
            logger.warning(
                "a step of %d requests raised %s: computing each half of it", len(scheduled), type(error).__name__
            )
            middle = len(scheduled) // 2
            return self._bisect(scheduled[:middle]) + self._bisect(scheduled[middle:])
        return self._scheduler.update(step.batch.entries, results)
