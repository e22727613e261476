"""Statistics and adapters of several engines as those of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from loraserve.types import AdapterResidency, Digest, EngineStats, Histogram, RankTraffic, Tier

_LARGEST = frozenset({"kv_block_size", "num_tenants"})
"""Gauges of which the largest stands for all: replicas have the same block size, and tenants."""
_GAUGES = _LARGEST | {
    *("num_running", "num_waiting", "num_waiting_for_adapter"),
    *("num_kv_blocks", "num_kv_blocks_used", "num_kv_blocks_cached", "num_kv_blocks_available"),
    *("device_adapters", "device_adapter_bytes", "device_adapter_budget_bytes", "num_arriving_adapters"),
    *("max_device_adapters", "host_adapters", "host_adapter_bytes", "host_adapter_budget_bytes", "num_pins"),
    *("load_bytes", "load_budget_bytes"),
    *("device_bytes", "kv_bytes_used", "kv_bytes_idle", "adapter_bytes_used", "adapter_bytes_idle", "free_bytes"),
    *("num_constrained", "num_grammars", "grammar_bytes", "speculation_bytes"),
}
"""Fields of the present state; the others count from an engine's start."""
_NEARNESS = (Tier.DEVICE, Tier.LOADING, Tier.HOST, Tier.DISK)


class StatsSum:
    """Sum replicas' statistics; what those counted that left stays counted."""

    def __init__(self) -> None:
        self._last: dict[str, EngineStats] = {}
        self._ended = EngineStats()

    def of(self, stats: Mapping[str, EngineStats]) -> EngineStats:
        """Sum the present replicas' statistics, given by their ids."""
        for replica_id in self._last.keys() - stats.keys():
            self._ended = _sum([self._ended, _counters(self._last[replica_id])])
        for replica_id, now in stats.items():
            before = self._last.get(replica_id)
            # its engine was replaced, and counts from 0
            if before is not None and now.num_steps < before.num_steps:
                self._ended = _sum([self._ended, _counters(before)])
        self._last = dict(stats)
        return _sum([self._ended, *stats.values()])


def merge_residency(rows: Sequence[Sequence[AdapterResidency]]) -> tuple[AdapterResidency, ...]:
    """List each adapter once, where it is closest to a device, with the bytes of all replicas."""
    merged: dict[Digest, AdapterResidency] = {}
    for row in (row for of_replica in rows for row in of_replica):
        other = merged.get(row.digest)
        merged[row.digest] = row if other is None else _merge(row, other)
    return tuple(merged.values())


def _merge(one: AdapterResidency, other: AdapterResidency) -> AdapterResidency:
    nearest = min(one, other, key=lambda row: _NEARNESS.index(row.tier))
    rates = [row.uses_per_s for row in (one, other) if row.uses_per_s is not None]
    return msgspec.structs.replace(
        nearest,
        device_bytes=one.device_bytes + other.device_bytes,
        host_bytes=one.host_bytes + other.host_bytes,
        num_pins=one.num_pins + other.num_pins,
        is_pinned=one.is_pinned or other.is_pinned,
        last_used_s=min(one.last_used_s, other.last_used_s),
        uses_per_s=sum(rates) if rates else None,
    )


def _counters(stats: EngineStats) -> EngineStats:
    """Drop the gauges from the statistics."""
    kept = {name: getattr(stats, name) for name in stats.__struct_fields__ if name not in _GAUGES}
    return EngineStats(**kept)


def _sum(stats: Sequence[EngineStats]) -> EngineStats:
    values: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        found = [getattr(one, name) for one in stats]
        if isinstance(found[0], Histogram):
            values[name] = Histogram(
                counts=tuple(map(sum, zip(*(one.counts for one in found), strict=True))),
                sum_s=sum(one.sum_s for one in found),
            )
        elif name == "ranks":
            values[name] = tuple(map(_sum_traffic, zip_longest(*found, fillvalue=RankTraffic())))
        else:
            values[name] = max(found) if name in _LARGEST else sum(found)
    return EngineStats(**values)


def _sum_traffic(ranks: Sequence[RankTraffic]) -> RankTraffic:
    """Sum what ranks of one number received in all engines."""
    fields = RankTraffic.__struct_fields__
    return RankTraffic(**{name: sum(getattr(rank, name) for rank in ranks) for name in fields})
