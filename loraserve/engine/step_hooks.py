"""Hooks around an engine's steps for work that isn't serving, and the steps' timer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from loraserve.engine.scheduled import ScheduledRequest
from loraserve.memory.eviction import CostEstimate
from loraserve.memory.timings import Stopwatch, Timings
from loraserve.types import Histogram, TokenOutput

MIN_PREFILL_ROWS = 16
"""Rows over two per request from which a step counts as prefill."""


class StepListener:
    """Hooks of an engine that do nothing; a listener overrides those it needs."""

    def before_launch(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Note the requests of the step that is about to be launched."""

    def on_idle(self) -> None:
        """Note that no tenant's request is alive, though no step reports it."""

    def take_outputs(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Take the outputs of this listener's own requests; return the others."""
        return outputs


class StepTimer:
    """Count steps and measure what they take, and how much of that goes to adapters.

    Attributes:
        num_steps: steps that computed anything.
        total_s: seconds spent in steps.
    """

    def __init__(
        self, adapter_time: Stopwatch, prefill_cost: CostEstimate, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Make hooks that have seen no step.

        Args:
            adapter_time: runs while the steps' thread works on adapters.
            prefill_cost: notes what computing prompt tokens costs.
        """
        self._adapter_time, self._prefill_cost, self._clock = adapter_time, prefill_cost, clock
        self.num_steps = 0
        self.total_s = 0.0
        self._adapter_s = Timings()
        self._began_s = 0.0

    @property
    def adapter_s(self) -> Histogram:
        """Seconds of each step that went to adapters."""
        return self._adapter_s.histogram

    def begin(self, *, is_idle: bool) -> None:
        """Begin a step.

        Args:
            is_idle: nothing was running: time spent on adapters so far held up no step.
        """
        self._began_s = self._clock()
        if is_idle:
            self._adapter_time.take_s()

    def end(self, scheduled: Sequence[ScheduledRequest]) -> float:
        """End a step that computed or collected something; return its seconds.

        With overlapping steps the time is that of the step which ran meanwhile.
        """
        self.num_steps += bool(scheduled)
        if scheduled:
            self._adapter_s.add(self._adapter_time.take_s())
        elapsed_s = self._clock() - self._began_s
        self.total_s += elapsed_s
        num_tokens = sum(entry.num_tokens - len(entry.proposed) for entry in scheduled)
        if num_tokens >= MIN_PREFILL_ROWS + 2 * len(scheduled):
            self._prefill_cost.note(num_tokens, elapsed_s)
        return elapsed_s
