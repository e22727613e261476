"""Counters of the server: its own for HTTP, and the engine's heartbeat read at each scrape."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loraserve.api.inference.shadow import OUTCOMES as SHADOW_OUTCOMES
from loraserve.api.metrics.adapter_load import AdapterLoad
from loraserve.api.metrics.memory import memory_metrics
from loraserve.api.metrics.tenancy import share_metrics, tenancy_metrics
from loraserve.registry.health.certificates import REJECTED, VERDICTS
from loraserve.registry.health.checks import FAILED, PASSED
from loraserve.registry.operations import ENDED

if TYPE_CHECKING:
    from loraserve.api.services import Services

# "When was this counter made" beside every counter: twice the samples, and nobody asks.
disable_created_metrics()  # type: ignore[no-untyped-call]

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
_DURATION_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The server's own counters. One instance per application: tests run several in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "loraserve_http_requests", "HTTP requests answered.", ["route", "method", "status"], registry=self.registry
        )
        self.request_s = Histogram(
            "loraserve_http_request_duration_seconds",
            "From a request's headers to the end of its answer.",
            ["route"],
            buckets=_DURATION_BUCKETS,
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "loraserve_prompt_tokens", "Prompt tokens of admitted requests.", registry=self.registry
        )
        self.generation_tokens = Counter(
            "loraserve_generation_tokens", "Tokens sent to clients.", registry=self.registry
        )
        self.ttft_s = Histogram(
            "loraserve_time_to_first_token_seconds",
            "From admission to the first token.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.tpot_s = Histogram(
            "loraserve_time_per_output_token_seconds",
            "Mean time between the tokens of one answer, after its first.",
            buckets=_TPOT_BUCKETS,
            registry=self.registry,
        )
        self.finished = Counter(
            "loraserve_completions",
            "Choices that ended, by reason (abort: the client left).",
            ["reason"],
            registry=self.registry,
        )
        self.fallbacks = Counter(
            "loraserve_fallbacks",
            "Requests that another version or the base answered, by the code of what the one asked for failed with.",
            ["reason"],
            registry=self.registry,
        )
        self.shadow_requests = Counter(
            "loraserve_shadow_requests",
            "Copies of requests for shadow versions, by what became of them.",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in SHADOW_OUTCOMES:
            self.shadow_requests.labels(outcome)
        self.shadow_tokens = Counter(
            "loraserve_shadow_tokens", "Tokens of answers that a shadow answered too.", registry=self.registry
        )
        self.shadow_agreed_tokens = Counter(
            "loraserve_shadow_agreed_tokens",
            "Of those, the ones before the first that differs.",
            registry=self.registry,
        )
        self.live_requests = Gauge(
            "loraserve_http_requests_live", "HTTP requests being answered.", registry=self.registry
        )
        self.adapter_load = AdapterLoad()


class EngineCollector(Collector):
    """The engine's last heartbeat and the registry's counts as metrics; vLLM's names too, for the routers that look for those."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        stats, engine = self._services.engine.stats, self._services.engine

        def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
            return GaugeMetricFamily(name, text, value=value)

        def counter(name: str, text: str, value: float) -> CounterMetricFamily:
            return CounterMetricFamily(name, text, value=value)

        yield gauge("loraserve_engine_up", "Whether the engine computes.", float(engine.is_ready))
        yield counter("loraserve_engine_restarts", "Engines started after the first.", engine.num_restarts)
        yield counter("loraserve_engine_hangs", "Engines killed for want of progress.", engine.num_hangs)
        yield gauge("loraserve_requests_running", "Sequences that are scheduled.", stats.num_running)
        yield gauge("loraserve_requests_waiting", "Sequences in the queue.", stats.num_waiting)
        yield gauge(
            "loraserve_requests_waiting_for_adapter",
            "Of those waiting, for an adapter's weights.",
            stats.num_waiting_for_adapter,
        )
        yield counter("loraserve_engine_steps", "Forward passes.", stats.num_steps)
        yield counter("loraserve_engine_step_seconds", "Seconds spent in forward passes.", stats.step_s)
        yield counter("loraserve_preemptions", "Sequences that were put back and start over.", stats.num_preemptions)
        yield counter(
            "loraserve_fair_preemptions",
            "Of those, for a tenant that had less than its part, or by one that held more than it may.",
            stats.num_fair_preemptions,
        )
        yield counter(
            "loraserve_request_timeouts", "Requests that ended since their own time was over.", stats.num_timeouts
        )
        yield gauge("loraserve_tenants_active", "Tenants with a request in the engine.", stats.num_tenants)
        yield counter("loraserve_engine_prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens)
        yield counter("loraserve_engine_generation_tokens", "Tokens sampled.", stats.generation_tokens)
        blocks = GaugeMetricFamily("loraserve_kv_blocks", "KV blocks by state.", labels=["state"])
        blocks.add_metric(["used"], stats.num_kv_blocks_used)
        blocks.add_metric(["cached"], stats.num_kv_blocks_cached)
        blocks.add_metric(["free"], max(0, stats.num_kv_blocks - stats.num_kv_blocks_used - stats.num_kv_blocks_cached))
        yield blocks
        yield counter(
            "loraserve_prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_tokens_queried,
        )
        yield counter("loraserve_prefix_cache_hits", "Of those, found.", stats.prefix_tokens_hit)
        yield counter(
            "loraserve_prefix_cache_base_hits",
            "Of those found, for activated adapters, before they act.",
            stats.base_prefix_tokens_hit,
        )
        yield from memory_metrics(stats)
        yield counter("loraserve_invariant_violations", "Broken invariants of ours.", stats.invariant_violations)
        yield from tenancy_metrics(self._services.admissions)
        yield from share_metrics((*self._services.rooms.all(), *self._services.registry.uploads.shares()))
        yield from self._registry()
        yield from self._vllm()

    def _registry(self) -> Iterator[Metric]:
        registry = self._services.registry
        certificates = CounterMetricFamily(
            "loraserve_certificates",
            "Answers to the question for a certificate (skipped: the engine was away; rejected: it can never serve it).",
            labels=["verdict"],
        )
        for verdict in VERDICTS:
            certificates.add_metric([verdict], registry.certificates.num_by_verdict[verdict])
        yield certificates
        late = CounterMetricFamily(
            "loraserve_late_certificates",
            "Of those, for versions that had none for how this server computes its base.",
            labels=["verdict"],
        )
        for verdict in (PASSED, FAILED, REJECTED):
            late.add_metric([verdict], registry.certificate_backfill.num_by_verdict[verdict])
        yield late
        yield CounterMetricFamily(
            "loraserve_quarantined_refusals",
            "Uses of versions in quarantine, which were refused.",
            value=registry.num_quarantined_refused,
        )
        yield CounterMetricFamily(
            "loraserve_base_mismatch_refusals",
            "Uses of versions that were made for another base, which were refused.",
            value=registry.num_of_another_base_refused,
        )

        yield CounterMetricFamily(
            "loraserve_numerics_strikes",
            "Answers of versions that were not finite, by requests of their owners.",
            value=registry.numeric_failures.num_failures,
        )
        yield CounterMetricFamily(
            "loraserve_numerics_quarantines",
            "Versions quarantined for them.",
            value=registry.numeric_failures.num_quarantined,
        )
        yield GaugeMetricFamily(
            "loraserve_shadow_requests_live",
            "Copies of requests that run on shadow versions, or wait to be compared.",
            value=self._services.shadows.num_live,
        )
        yield CounterMetricFamily(
            "loraserve_shadow_comparisons_lost",
            "Comparisons that the database couldn't be given.",
            value=registry.shadow_hours.num_lost,
        )
        yield CounterMetricFamily(
            "loraserve_damaged_versions",
            "Versions quarantined because their stored bytes were found damaged or gone.",
            value=registry.corruption.num_quarantined,
        )
        operations = CounterMetricFamily(
            "loraserve_operations", "Operations that ended on this server.", labels=["state"]
        )
        for state in ENDED:
            operations.add_metric([state], registry.operations.num_ended[state])
        yield operations
        yield GaugeMetricFamily(
            "loraserve_operations_running", "Those under way on it.", value=registry.operations.num_running
        )
        collector = registry.collector
        yield CounterMetricFamily(
            "loraserve_collected_blobs", "Blobs deleted since nothing referred to them.", value=collector.num_blobs
        )
        yield CounterMetricFamily("loraserve_collected_bytes", "Bytes of them.", value=collector.num_bytes)
        yield GaugeMetricFamily(
            "loraserve_doomed_blobs",
            "Blobs that nothing refers to, which will be deleted after the grace period.",
            value=collector.num_gc_candidates,
        )
        yield GaugeMetricFamily(
            "loraserve_operator_pins", "Adapters that operators have pinned.", value=registry.pins.num_wanted
        )
        yield GaugeMetricFamily(
            "loraserve_operator_pins_held",
            "Of those, the ones that are on this server's device.",
            value=registry.pins.num_held,
        )

    def _vllm(self) -> Iterator[Metric]:
        stats = self._services.engine.stats
        yield GaugeMetricFamily("vllm:num_requests_running", "As vLLM's.", value=stats.num_running)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "As vLLM's.", value=stats.num_waiting)
        usage = stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "As vLLM's: 1 is full.", value=usage)
        yield GaugeMetricFamily("vllm:num_gpu_loaded_lora_adapters", "As vLLM's.", value=stats.device_adapters)
        yield GaugeMetricFamily("vllm:num_cpu_loaded_lora_adapters", "As vLLM's.", value=stats.host_adapters)
        # The routers of the Gateway API Inference Extension read which adapters are in use from the labels, and when from the value.
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "As vLLM's: the value is the time.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        load = self._services.metrics.adapter_load
        # Adapters have no slots here: each sequence of a step may use another one.
        max_lora = str(self._services.settings.max_num_seqs)
        info.add_metric([max_lora, ",".join(load.running_names()), ",".join(load.waiting_names())], time.time())
        yield info
