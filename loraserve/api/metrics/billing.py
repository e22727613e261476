"""Metering as metrics: what was billed, and whether it gets where it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from loraserve.api.services import Services


class UsageCollector(Collector):
    """This server's own usage since its start; no labels name tenants. Nothing where nobody is billed."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        meter = self._services.usage
        if meter is None:
            return
        recorded = meter.recorded
        tokens = CounterMetricFamily(
            "loraserve_billed_tokens",
            "Tokens that clients were given answers for (prompt; cached: of those) or were given (completion).",
            labels=["kind"],
        )
        tokens.add_metric(["prompt"], recorded.prompt_tokens)
        tokens.add_metric(["cached"], recorded.cached_tokens)
        tokens.add_metric(["completion"], recorded.completion_tokens)
        yield tokens
        yield CounterMetricFamily(
            "loraserve_undelivered_tokens",
            "Tokens made for clients that had left, or for answers that failed.",
            value=recorded.undelivered_tokens,
        )
        yield GaugeMetricFamily(
            "loraserve_usage_lag_seconds",
            "Since the first use that isn't in the database yet; 0: all of it is.",
            value=meter.lag_s,
        )
        yield GaugeMetricFamily(
            "loraserve_usage_journal_bytes", "Of the server's own record of it.", value=meter.journal_bytes
        )
        failures = CounterMetricFamily(
            "loraserve_usage_write_failures", "Attempts to keep usage that failed, by where.", labels=["where"]
        )
        failures.add_metric(["journal"], meter.num_failed_writes)
        failures.add_metric(["database"], meter.num_failed_flushes)
        yield failures
        yield CounterMetricFamily(
            "loraserve_usage_journals_recovered",
            "Journals that killed servers left, and this one counted.",
            value=meter.num_recovered_journals,
        )
