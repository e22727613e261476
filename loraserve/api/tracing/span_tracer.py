"""Make the spans of a request that has ended, from the times that were taken while it ran.

Nothing is traced while a request runs: no span is kept for it, and a request that isn't sampled
costs the decision alone. Names and attributes follow OpenTelemetry's semantic conventions for HTTP
servers and for generative AI (in development); `docs/observability.md` lists them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from loraserve import __version__
from loraserve.api.tracing.span_queue import SpanQueue
from loraserve.limits import LIMITS

if TYPE_CHECKING:
    from loraserve.api.http.request_record import ChoiceRecord, InferenceRecord, RequestRecord
    from loraserve.api.metrics.counters import ServerMetrics

logger = logging.getLogger("loraserve.tracing")

CLOSE_S = 2.0
"""Seconds that the server's end waits for the collector."""
_MAX_TRACESTATE = 512
"""Characters of `tracestate`, which goes out with each span; a longer one is dropped."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
_TEXT_ROUTES = ("/v1/completions", "/generate", "/generate_stream", "/")
"""Ends of routes that complete a text; the others that make tokens are chats."""

_EMPTY = Context()


class SpanTracer:
    """Traces requests to one collector. It belongs to the event loop's thread."""

    def __init__(self, exporter: SpanExporter, sample: float | None, metrics: ServerMetrics) -> None:
        """Make a tracer that sends to `exporter`.

        Args:
            sample: share of the requests without a decision of their own; None: OTEL_TRACES_SAMPLER
                decides, or all are.
        """
        # its own lines come with every batch that fails; ours with the first
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._queue = SpanQueue(exporter, metrics.trace_spans, max_spans=LIMITS.max_queued_spans)
        provider = TracerProvider(
            sampler=None if sample is None else ParentBased(TraceIdRatioBased(sample)),
            resource=Resource.create({"service.name": "loraserve", "service.version": __version__}),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_span_attribute_length=LIMITS.max_span_attribute_length),
        )
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer("loraserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_collector(cls, endpoint: str | None, sample: float | None, metrics: ServerMetrics) -> SpanTracer:
        """Build a tracer that posts to `endpoint`; None: where OpenTelemetry's variables point.

        Raises:
            ValueError: a variable of OpenTelemetry's is wrong.
        """
        return cls(OTLPSpanExporter(endpoint=endpoint), sample, metrics)

    def trace(self, record: RequestRecord, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Make the spans of a request that has ended; return its trace's id, or an empty one.

        Never raises: a request is answered whatever becomes of its spans.
        """
        try:
            return self._trace(record, self._propagator.extract(_trace_headers(headers)))
        except Exception:
            logger.exception("request %s could not be traced", record.request_id)
            return ""

    @property
    def num_queued(self) -> int:
        """Spans that wait for the collector."""
        return self._queue.num_queued

    def flush(self) -> None:
        """Send what is queued now. Blocks: for tests."""
        self._queue.force_flush()

    async def close(self) -> None:
        """Send what is queued, for `CLOSE_S` at most."""
        await asyncio.to_thread(self._queue.close, CLOSE_S)

    def _trace(self, record: RequestRecord, context: Context) -> str:
        method = record.method if record.method in _METHODS else "_OTHER"
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "http.response.status_code": record.status,
            "loraserve.request_id": record.request_id,
        }
        name = "HTTP" if method == "_OTHER" else method
        if record.route != "unmatched":
            name, attributes["http.route"] = f"{name} {record.route}", record.route
        if record.tenant:
            attributes["loraserve.tenant"] = record.tenant
        if record.code:
            attributes["error.type"] = record.code
        root = self._tracer.start_span(
            name, context, SpanKind.SERVER, attributes, start_time=record.started_ns, record_exception=False
        )
        if not root.is_recording():
            return ""
        is_cut = bool(record.code) and record.status < 400
        if record.status >= 500 or is_cut:
            root.set_status(StatusCode.ERROR)
        if record.inference is not None and record.inference.choices:
            self._trace_inference(record, record.inference, root)
        root.end(_instant(record, record.ended_s))
        return format_trace_id(root.get_span_context().trace_id)

    def _trace_inference(self, record: RequestRecord, inference: InferenceRecord, root: Span) -> None:
        choices = inference.choices
        sent_s = min(choice.sent_s for choice in choices)
        ended_s = max(record.ended_s if choice.ended_s is None else choice.ended_s for choice in choices)
        self._add("admission", root, record, record.started_s, sent_s)
        operation = _operation(record, inference)
        answer = self._add(
            f"{operation} {record.model}", root, record, sent_s, ended_s, _inference_attributes(record, operation)
        )
        for choice in choices[: LIMITS.max_traced_choices]:
            self._trace_choice(record, choice, answer)
        if record.num_pieces > 1 and record.first_byte_s is not None:
            pieces = {"loraserve.stream.num_pieces": record.num_pieces}
            self._add("stream", root, record, record.first_byte_s, record.ended_s, pieces)

    def _trace_choice(self, record: RequestRecord, choice: ChoiceRecord, answer: Span) -> None:
        """Add the choice's stages.

        The engine reports how long each took, not when it began: they are laid end to end before
        the first token. The waits for a turn and for the adapter may have alternated.
        """
        index: dict[str, AttributeValue] = {"loraserve.choice": choice.index}
        ended_s = record.ended_s if choice.ended_s is None else choice.ended_s
        if choice.is_replayed:
            self._add("replay", answer, record, choice.sent_s, ended_s, index)
            return
        if choice.first_s is None:
            # what it waited for isn't known: the engine reports it with the first token
            self._add("wait", answer, record, choice.sent_s, ended_s, index | {"error.type": choice.finish_reason})
            return
        prefill_s = max(choice.sent_s, choice.first_s - choice.prefill_s)
        adapter_s = max(choice.sent_s, prefill_s - choice.adapter_s)
        queue_s = max(choice.sent_s, adapter_s - choice.queue_s)
        self._add("queue", answer, record, queue_s, adapter_s, index)
        if choice.adapter_tier:
            tier = {"loraserve.adapter.tier": choice.adapter_tier}
            load = self._add("adapter_load", answer, record, adapter_s, prefill_s, index | tier)
            if choice.adapter_read_s:
                read_s = max(adapter_s, prefill_s - choice.adapter_read_s)
                self._add("adapter_read", load, record, read_s, prefill_s, index)
        cached = {"loraserve.prefill.cached_tokens": choice.num_cached_tokens}
        self._add("prefill", answer, record, prefill_s, choice.first_s, index | cached)
        made: dict[str, AttributeValue] = {
            "loraserve.decode.tokens": choice.num_tokens,
            "loraserve.finish_reason": choice.finish_reason,
        }
        self._add("decode", answer, record, choice.first_s, ended_s, index | made)

    def _add(
        self,
        name: str,
        parent: Span,
        record: RequestRecord,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Span:
        """Add a span of the request inside `parent`."""
        span = self._tracer.start_span(
            name,
            set_span_in_context(parent, _EMPTY),
            attributes=attributes,
            start_time=_instant(record, start_s),
            record_exception=False,
        )
        span.end(_instant(record, max(start_s, end_s)))
        return span


def _instant(record: RequestRecord, at_s: float) -> int:
    """Convert an instant of `time.monotonic` to nanoseconds since 1970."""
    return record.started_ns + round((at_s - record.started_s) * 1e9)


def _trace_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Select the headers of W3C's Trace Context; none that are ambiguous or too long."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1:
        return {}
    state = b",".join(value for name, value in headers if name == b"tracestate")
    found = {"traceparent": parents[0].decode("latin-1")}
    if 0 < len(state) <= _MAX_TRACESTATE:
        found["tracestate"] = state.decode("latin-1")
    return found


def _operation(record: RequestRecord, inference: InferenceRecord) -> str:
    if inference.is_pooled:
        # embeddings, score, rerank; Ollama's embed
        name = record.route.rpartition("/")[2]
        return "embeddings" if name == "embed" else name
    return "text_completion" if record.route.endswith(_TEXT_ROUTES) else "chat"


def _inference_attributes(record: RequestRecord, operation: str) -> dict[str, AttributeValue]:
    inference = record.inference
    if inference is None:
        return {}
    version = "" if inference.version is None else f"@{inference.version}"
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "loraserve",
        "gen_ai.response.model": f"{record.model}{version}",
        "gen_ai.response.finish_reasons": inference.finish_reasons,
        "gen_ai.usage.input_tokens": inference.num_prompt_tokens,
        "gen_ai.usage.output_tokens": inference.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": inference.num_cached_tokens,
    }
    if record.asked_model:
        attributes["gen_ai.request.model"] = record.asked_model
    num_choices = len({choice.index for choice in inference.choices})
    if num_choices > 1:
        attributes["gen_ai.request.choice.count"] = num_choices
    if record.ttft_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.ttft_s
    if inference.fell_back_for:
        attributes["loraserve.fallback_for"] = inference.fell_back_for
    return attributes
