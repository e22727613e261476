"""What the engine's heartbeat says of memory: where adapters are found, how long loads take, who gives way to whom, and what it costs the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from loraserve.types import TIME_BOUNDS_S, EngineStats, Histogram


def memory_metrics(stats: EngineStats) -> Iterator[Metric]:
    """Labels are tiers, uses and causes: a fixed number of samples, however many adapters and tenants there are."""
    yield from _adapters(stats)
    yield from _device(stats)
    yield from _evictions(stats)
    yield CounterMetricFamily("loraserve_adapter_loads", "Adapters read into memory.", stats.adapter_loads)
    yield CounterMetricFamily("loraserve_adapter_load_failures", "Loads that failed.", stats.adapter_load_failures)
    yield CounterMetricFamily(
        "loraserve_adapters_brought_back",
        "Loads that nobody waited for, of popular adapters that had lost their place.",
        stats.adapters_brought_back,
    )
    yield CounterMetricFamily(
        "loraserve_adapter_load_seconds", "Seconds of loading threads, failed loads too.", stats.adapter_load_s
    )
    load_s = HistogramMetricFamily(
        "loraserve_adapter_load_duration_seconds",
        "Loads that went well, by the tier that they lead to: host (read, verified, compiled, packed) or device (copied).",
        labels=["tier"],
    )
    _add(load_s, ["host"], stats.host_load_s)
    _add(load_s, ["device"], stats.device_load_s)
    yield load_s
    yield _histogram(
        "loraserve_adapter_wait_seconds",
        "How long requests for an adapter waited for it; 0 for those that found it on the device.",
        stats.adapter_wait_s,
    )
    yield _histogram(
        "loraserve_step_loading_delay_seconds",
        "How long the step's thread was kept from each step by adapters: asking for them, taking loads in, giving places.",
        stats.step_adapter_s,
    )


def _adapters(stats: EngineStats) -> Iterator[Metric]:
    yield _by(
        "loraserve_adapters_resident",
        "Adapters by memory tier.",
        "tier",
        {"device": stats.device_adapters, "host": stats.host_adapters},
    )
    yield _by(
        "loraserve_adapter_bytes",
        "Adapter bytes by memory tier.",
        "tier",
        {"device": stats.device_adapter_bytes, "host": stats.host_adapter_bytes},
    )
    yield _by(
        "loraserve_adapter_budget_bytes",
        "What adapters may take of a tier.",
        "tier",
        {"device": stats.device_adapter_budget_bytes, "host": stats.host_adapter_budget_bytes},
    )
    yield GaugeMetricFamily("loraserve_adapter_pins", "Pins held by running sequences.", stats.num_pins)
    lookups = CounterMetricFamily(
        "loraserve_adapter_lookups", "Requests for an adapter, by where it was when they came.", labels=["tier"]
    )
    lookups.add_metric(["device"], stats.adapter_lookups_device)
    lookups.add_metric(["host"], stats.adapter_lookups_host)
    lookups.add_metric(["disk"], stats.adapter_lookups_disk)
    yield lookups


def _device(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "loraserve_device_memory_budget_bytes",
        "What KV blocks and adapters may take together.",
        stats.device_bytes,
    )
    yield _by(
        "loraserve_device_memory_bytes",
        "That budget by what it is used for now.",
        "use",
        {
            "kv_used": stats.kv_bytes_used,
            "kv_idle": stats.kv_bytes_idle,
            "adapters_used": stats.adapter_bytes_used,
            "adapters_idle": stats.adapter_bytes_idle,
            "free": stats.free_bytes,
        },
    )


def _evictions(stats: EngineStats) -> Iterator[Metric]:
    adapters = CounterMetricFamily(
        "loraserve_adapter_evictions",
        "Adapters that lost their place, by tier and for whom: another adapter, or KV blocks.",
        labels=["tier", "cause"],
    )
    adapters.add_metric(["device", "adapter"], stats.device_evictions - stats.device_evictions_for_kv)
    adapters.add_metric(["device", "kv"], stats.device_evictions_for_kv)
    adapters.add_metric(["host", "adapter"], stats.host_evictions)
    yield adapters
    blocks = CounterMetricFamily(
        "loraserve_kv_block_evictions",
        "Idle prefix blocks that lost their content, by for whom: another sequence's KV, or an adapter.",
        labels=["cause"],
    )
    blocks.add_metric(["kv"], stats.kv_evictions - stats.kv_evictions_for_adapters)
    blocks.add_metric(["adapter"], stats.kv_evictions_for_adapters)
    yield blocks


def _by(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=())
    _add(family, [], histogram)
    return family


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    """Prometheus' buckets hold what is in those below them too."""
    buckets, num = [], 0
    for bound, count in zip((*TIME_BOUNDS_S, float("inf")), histogram.counts, strict=True):
        num += count
        le = floatToGoString(bound)  # type: ignore[no-untyped-call]
        buckets.append((le, float(num)))
    family.add_metric(labels, buckets, sum_value=histogram.sum_s)
