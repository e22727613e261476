"""Several engines' statistics and adapters as one's."""

from __future__ import annotations

from loraserve.cluster.summary import StatsSum, merge_residency
from loraserve.types import AdapterResidency, Digest, EngineStats, Histogram, RankTraffic, Tier


def test_sums_add_counters_gauges_and_histograms() -> None:
    counts = (1,) + (0,) * (len(Histogram().counts) - 1)
    one = EngineStats(num_steps=5, num_running=2, kv_block_size=16, host_load_s=Histogram(counts=counts, sum_s=0.5))
    found = StatsSum().of({"a": one, "b": one})
    assert (found.num_steps, found.num_running, found.kv_block_size) == (10, 4, 16)
    assert (found.host_load_s.num, found.host_load_s.sum_s) == (2, 1.0)


def test_counts_received_by_ranks_are_summed() -> None:
    total = StatsSum()
    two = EngineStats(num_steps=1, ranks=(RankTraffic(sum_bytes=3), RankTraffic(transfer_s=0.5, transfer_bytes=4)))
    found = total.of({"a": two, "b": EngineStats(num_steps=2, ranks=(RankTraffic(sum_bytes=1),))})
    assert found.ranks == (RankTraffic(sum_bytes=4), RankTraffic(transfer_s=0.5, transfer_bytes=4))
    # what a replica counted that left stays
    assert total.of({}).ranks == found.ranks


def test_lost_replica_keeps_counts_and_loses_holdings() -> None:
    total = StatsSum()
    total.of({"a": EngineStats(num_steps=5, num_running=2), "b": EngineStats(num_steps=1)})
    found = total.of({"b": EngineStats(num_steps=2)})
    assert (found.num_steps, found.num_running) == (7, 0)
    assert total.of({"b": EngineStats(num_steps=2)}).num_steps == 7


def test_a_replaced_engine_counts_on() -> None:
    total = StatsSum()
    total.of({"a": EngineStats(num_steps=5)})
    assert total.of({"a": EngineStats(num_steps=1)}).num_steps == 6


def row(tier: Tier, **fields: object) -> AdapterResidency:
    known: dict[str, object] = {
        "device_bytes": 0,
        "host_bytes": 0,
        "num_pins": 0,
        "is_pinned": False,
        "last_used_s": 9.0,
    }
    return AdapterResidency(digest=Digest("a" * 64), tier=tier, **(known | fields))  # type: ignore[arg-type]


def test_adapter_on_two_replicas_is_single_nearest_row() -> None:
    (found,) = merge_residency(
        [[row(Tier.HOST, host_bytes=10)], [row(Tier.DEVICE, device_bytes=5, num_pins=1, last_used_s=1.0)]]
    )
    assert (found.tier, found.host_bytes, found.device_bytes) == (Tier.DEVICE, 10, 5)
    assert (found.num_pins, found.last_used_s) == (1, 1.0)
