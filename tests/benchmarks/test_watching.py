"""What is seen of a server all along."""

from __future__ import annotations

import pytest

from benchmarks.figures import parse
from benchmarks.watching import Seen


def make_scrape(kv: int, adapters: int, host: int = 0) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    lines = [
        "# TYPE loraserve_device_memory_budget_bytes gauge",
        "loraserve_device_memory_budget_bytes 100",
        "# TYPE loraserve_device_memory_bytes gauge",
        f'loraserve_device_memory_bytes{{use="kv_used"}} {kv}',
        'loraserve_device_memory_bytes{use="kv_idle"} 5',
        f'loraserve_device_memory_bytes{{use="adapters_used"}} {adapters}',
        'loraserve_device_memory_bytes{use="adapters_idle"} 5',
        'loraserve_device_memory_bytes{use="free"} 1000',
        "# TYPE loraserve_adapter_bytes gauge",
        f'loraserve_adapter_bytes{{tier="host"}} {host}',
        "# TYPE loraserve_adapter_budget_bytes gauge",
        'loraserve_adapter_budget_bytes{tier="host"} 40',
    ]
    return parse("\n".join(lines) + "\n")


def test_individual_and_combined_maxima_are_kept() -> None:
    seen = Seen()
    for kv, adapters in ((70, 10), (10, 60)):
        seen.take(make_scrape(kv, adapters))
    assert (seen.kv_on_device, seen.adapters_on_device, seen.device, seen.device_budget) == (75, 65, 90, 100)
    assert (seen.over_budget, seen.over_words()) == (0, "never")


def test_excess_over_either_budget_is_seen() -> None:
    seen = Seen()
    seen.take(make_scrape(50, 43))
    assert seen.over_budget == 3
    seen.take(make_scrape(0, 0, host=47))
    assert seen.over_budget == 7


def test_merge_keeps_maxima_and_adds_processor_time() -> None:
    merged = Seen.largest(
        [Seen(num_samples=2, host=5, engine_cpu_s=1.0), Seen(num_samples=3, host=4, engine_cpu_s=2.0)]
    )
    assert (merged.num_samples, merged.host, merged.engine_cpu_s) == (5, 5, 3.0)


def test_empty_observation_is_refused() -> None:
    with pytest.raises(ValueError, match="Nothing was seen"):
        Seen.largest([])
