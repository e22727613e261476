"""Metrics that the server counts itself, as requests come and go."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from loraserve.api.metrics.activity import Activity
from loraserve.api.metrics.adapter_load import AdapterLoad

# A creation time with every counter would double the number of samples.
disable_created_metrics()  # type: ignore[no-untyped-call]

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
_DURATION_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    """Counters of one application.

    Tests run several applications in one process, so that nothing is global.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("loraserve_http_requests", "HTTP requests answered.", ["route", "method", "status"])
        self.live_requests = gauge("loraserve_http_requests_live", "HTTP requests being answered.")
        self.request_s = histogram(
            "loraserve_http_request_duration_seconds",
            "Time from a request's headers to the end of its answer.",
            ["route"],
            buckets=_DURATION_BUCKETS,
        )
        self.prompt_tokens = counter("loraserve_prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = counter("loraserve_generation_tokens", "Tokens sent to clients.")
        self.ttft_s = histogram(
            "loraserve_time_to_first_token_seconds", "Time from admission to the first token.", buckets=_TTFT_BUCKETS
        )
        self.tpot_s = histogram(
            "loraserve_time_per_output_token_seconds",
            "Mean time between the tokens of one answer, after its first.",
            buckets=_TPOT_BUCKETS,
        )
        self.finished = counter(
            "loraserve_completions", "Choices that ended, by reason (abort: the client left).", ["reason"]
        )
        self.tool_calls = counter("loraserve_tool_calls", "Tool calls in answers to chats.")
        self.pooling_s = histogram(
            "loraserve_pooling_duration_seconds",
            "Time from an input's admission to its vector or scores.",
            buckets=_TTFT_BUCKETS,
        )
        self.pooled_inputs = counter(
            "loraserve_pooled_inputs",
            "Inputs of embeddings and scores that ended, by pooling (classify: by an adapter's head) and reason.",
            ["pooling", "reason"],
        )
        self.fallbacks = counter(
            "loraserve_fallbacks",
            "Requests answered by another version or the base, by the error code of the requested version.",
            ["reason"],
        )
        self.shadow_requests = counter(
            "loraserve_shadow_requests", "Copies of requests on shadow versions, by outcome.", ["outcome"]
        )
        self.live_shadow_requests = gauge(
            "loraserve_shadow_requests_live", "Copies of requests that run on shadow versions, or wait to be compared."
        )
        self.shadow_tokens = counter("loraserve_shadow_tokens", "Tokens of answers that were compared with a shadow's.")
        self.shadow_agreed_tokens = counter(
            "loraserve_shadow_agreed_tokens", "Tokens of compared answers before the first that differs."
        )
        self.trace_spans = counter(
            "loraserve_trace_spans",
            "Spans of requests by outcome: exported, failed (not taken by the collector), dropped (no room).",
            ["outcome"],
        )
        self.settings_reloads = counter(
            "loraserve_settings_reloads", "SIGHUPs, by whether the settings were taken over: done, failed.", ["outcome"]
        )
        self.adapter_load = AdapterLoad()
        self.activity = Activity()
