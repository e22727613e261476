"""Send spans to a collector from a thread, out of a bounded queue; count those that get lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from loraserve.background import SERVER_NICENESS, lower_thread_priority

if TYPE_CHECKING:
    from prometheus_client import Counter

logger = logging.getLogger("loraserve.tracing")

BATCH_SIZE = 128
"""Spans that are encoded at once: the event loop waits for the interpreter about 5 ms at most."""


class CountingExporter(SpanExporter):
    """Counts what another exporter sends and what it can't, which is logged once until it can.

    Runs on the queue's thread, which gives way to the event loop's.
    """

    def __init__(self, exporter: SpanExporter, num_spans: Counter) -> None:
        self._exporter = exporter
        self._num_spans = num_spans
        self._is_failing = False
        self._has_lowered_priority = False
        self.num_taken = 0
        """Spans that left the queue."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if not self._has_lowered_priority:
            self._has_lowered_priority = True
            lower_thread_priority(SERVER_NICENESS)
        self.num_taken += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            # one that can't be encoded, or a bug of the exporter's: the next batch may go
            logger.warning("spans could not be exported: %s", type(error).__name__)
            result = SpanExportResult.FAILURE
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            logger.warning("the collector takes no traces; they are lost until it does")
        elif self._is_failing and not is_failing:
            logger.info("the collector takes traces again")
        self._is_failing = is_failing
        # last: spans that are counted have been reported
        self._num_spans.labels("failed" if is_failing else "exported").inc(len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class SpanQueue(BatchSpanProcessor):
    """Queue of spans that have ended: adding to it costs microseconds, whatever the collector does.

    A span for which there is no room is dropped and counted.

    Args:
        max_spans: size of the queue.
        num_spans: metric of spans by outcome: exported, failed, dropped.
    """

    def __init__(self, exporter: SpanExporter, num_spans: Counter, *, max_spans: int) -> None:
        self._counting = CountingExporter(exporter, num_spans)
        super().__init__(self._counting, max_queue_size=max_spans, max_export_batch_size=min(BATCH_SIZE, max_spans))
        self._num_spans = num_spans
        self._max_spans = max_spans
        self._num_added = 0

    @property
    def num_queued(self) -> int:
        """Spans that wait for the thread."""
        return self._num_added - self._counting.num_taken

    def on_end(self, span: ReadableSpan) -> None:
        """Add the span. On the event loop's thread alone."""
        if self.num_queued >= self._max_spans:
            self._num_spans.labels("dropped").inc()
            return
        self._num_added += 1
        super().on_end(span)

    def close(self, timeout_s: float) -> None:
        """Send what is queued, for as long as that; then give up. Blocks.

        What an unreachable collector didn't take is lost: the server's end doesn't wait for it.
        """
        ending = threading.Thread(target=self.shutdown, name="span-queue-end", daemon=True)
        ending.start()
        ending.join(timeout_s)
        if ending.is_alive():
            # ends the waiting between two tries
            self._counting.shutdown()
