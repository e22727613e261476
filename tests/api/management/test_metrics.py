"""Every metric is on the page for operators, adds up, and has no more samples for more adapters."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loraserve.types import TIME_BOUNDS_S, EngineStats, Histogram

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


async def scrape(client: httpx2.AsyncClient) -> str:
    response = await client.get("http://loraserve/metrics")
    assert response.status_code == 200
    return response.text


async def test_page_lists_exactly_exported_metrics_with_types(admin: httpx2.AsyncClient) -> None:
    shown = set(re.findall(r"^# TYPE (\S+) (\w+)$", await scrape(admin), re.MULTILINE))
    told = re.findall(r"^\| `([a-z_:]+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert len(told) == len(set(told))
    assert set(told) == shown


async def test_labels_on_page_match_samples(push: Any, admin: httpx2.AsyncClient) -> None:
    await push(admin)
    # a scrape counts itself only after its answer
    await scrape(admin)
    told = {
        name: set(re.findall(r"`(\w+)`", labels))
        for name, labels in re.findall(r"^\| `([a-z_:]+)` \| \w+ \|([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    }
    for name, labels in re.findall(r"^([a-z_:]+)(?:\{(.*)\})? ", await scrape(admin), re.MULTILINE):
        family = name if name in told else re.sub(r"_(bucket|sum|count)$", "", name)
        assert set(re.findall(r'(\w+)="', labels)) - {"le"} == told[family], name


async def test_queries_on_page_use_existing_metrics(admin: httpx2.AsyncClient) -> None:
    shown = set(re.findall(r"^([a-z_:]+)", await scrape(admin), re.MULTILINE))
    queries = PAGE.read_text().partition("## Questions")[2]
    asked = set(re.findall(r"loraserve_\w+", queries))
    assert asked
    assert asked <= shown


async def test_engine_counters_are_exported_by_tier_and_cause(admin: httpx2.AsyncClient, engine: Any) -> None:
    engine.stats = EngineStats(
        adapter_lookups_device=90,
        adapter_lookups_host=7,
        adapter_lookups_disk=3,
        device_evictions=5,
        device_evictions_for_kv=2,
        host_evictions=4,
        kv_evictions=10,
        kv_evictions_for_adapters=1,
        device_bytes=100,
        kv_bytes_used=40,
        kv_bytes_idle=30,
        adapter_bytes_used=15,
        adapter_bytes_idle=10,
        free_bytes=5,
    )
    text = await scrape(admin)
    for line in (
        'loraserve_adapter_lookups_total{tier="device"} 90.0',
        'loraserve_adapter_lookups_total{tier="host"} 7.0',
        'loraserve_adapter_lookups_total{tier="disk"} 3.0',
        'loraserve_adapter_evictions_total{cause="adapter",tier="device"} 3.0',
        'loraserve_adapter_evictions_total{cause="kv",tier="device"} 2.0',
        'loraserve_adapter_evictions_total{cause="adapter",tier="host"} 4.0',
        'loraserve_kv_block_evictions_total{cause="kv"} 9.0',
        'loraserve_kv_block_evictions_total{cause="adapter"} 1.0',
        "loraserve_device_memory_budget_bytes 100.0",
        'loraserve_device_memory_bytes{use="kv_used"} 40.0',
        'loraserve_device_memory_bytes{use="kv_idle"} 30.0',
        'loraserve_device_memory_bytes{use="adapters_used"} 15.0',
        'loraserve_device_memory_bytes{use="adapters_idle"} 10.0',
        'loraserve_device_memory_bytes{use="free"} 5.0',
    ):
        assert f"\n{line}\n" in text, line


@pytest.mark.parametrize(
    ("field", "name", "labels"),
    [
        ("host_load_s", "loraserve_adapter_load_duration_seconds", {"tier": "host"}),
        ("device_load_s", "loraserve_adapter_load_duration_seconds", {"tier": "device"}),
        ("adapter_wait_s", "loraserve_adapter_wait_seconds", {}),
        ("step_adapter_s", "loraserve_step_loading_delay_seconds", {}),
    ],
)
async def test_histogram_buckets_are_cumulative(
    admin: httpx2.AsyncClient, engine: Any, field: str, name: str, labels: dict[str, str]
) -> None:
    counts = [0] * (len(TIME_BOUNDS_S) + 1)
    counts[TIME_BOUNDS_S.index(0.001)], counts[TIME_BOUNDS_S.index(1.0)], counts[-1] = 2, 1, 4
    engine.stats = EngineStats(**{field: Histogram(counts=tuple(counts), sum_s=3.5)})
    (family,) = (one for one in text_string_to_metric_families(await scrape(admin)) if one.name == name)
    samples = [sample for sample in family.samples if labels.items() <= sample.labels.items()]
    by_bound = {float(s.labels["le"]): s.value for s in samples if "le" in s.labels}
    assert list(by_bound) == [*TIME_BOUNDS_S, math.inf]
    assert [by_bound[bound] for bound in (0.0005, 0.001, 0.5, 1.0, 600.0, math.inf)] == [0, 2, 2, 3, 3, 7]
    assert [s.value for s in samples if s.name == f"{name}_count"] == [7]
    assert [s.value for s in samples if s.name == f"{name}_sum"] == [3.5]


async def test_more_adapters_make_no_more_samples(push: Any, admin: httpx2.AsyncClient) -> None:
    async def num_samples() -> int:
        return sum(not line.startswith("#") for line in (await scrape(admin)).splitlines())

    async def push_and_warm(name: str, seed: int) -> None:
        await push(admin, name, seed)
        assert (await admin.post(f"/adapters/{name}/versions/1/warm")).status_code == 200

    await push_and_warm("first", 0)
    await num_samples()
    before = await num_samples()
    for seed in range(1, 4):
        await push_and_warm(f"more-{seed}", seed)
    assert await num_samples() == before
