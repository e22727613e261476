"""Where adapters are, as operators are told."""

from __future__ import annotations

from collections.abc import Container

from loraserve.memory.arena import Arena, Owner
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.load_queue import LoadQueue
from loraserve.types import AdapterResidency, Digest, Tier


def residency_rows(
    pool: DeviceCache,
    host_cache: HostCache,
    line: LoadQueue,
    loading: Container[Digest],
    operator_pins: Container[Digest],
    now_s: float,
) -> list[AdapterResidency]:
    """Each adapter that has a place on the device, is in the host's memory or waits, once.

    Args:
        loading: whose loads are in flight.
        operator_pins: what an operator has pinned, wherever it is.
        now_s: by the clock of the pool and the line.
    """
    in_host = dict(host_cache.items())

    def uses_per_s(digest: Digest) -> float:
        return pool.popularity.per_second(digest, now_s)

    rows = [
        AdapterResidency(
            digest=digest,
            tier=Tier.DEVICE if resident.has_landed else Tier.LOADING,
            device_bytes=resident.footprint.num_bytes,
            host_bytes=in_host[digest].adapter.num_bytes if digest in in_host else 0,
            num_pins=resident.num_pins,
            is_pinned=digest in operator_pins,
            last_used_s=now_s - resident.last_used_s,
            dtype=resident.metadata.dtype,
            precision_loss=resident.metadata.precision_loss,
            uses_per_s=uses_per_s(digest),
        )
        for digest, resident in pool.items()
    ]
    rows += [
        AdapterResidency(
            digest=digest,
            tier=Tier.HOST,
            device_bytes=0,
            host_bytes=entry.adapter.num_bytes,
            num_pins=0,
            is_pinned=digest in operator_pins,
            last_used_s=now_s - entry.last_used_s,
            dtype=entry.adapter.metadata.dtype,
            precision_loss=entry.adapter.metadata.precision_loss,
            uses_per_s=uses_per_s(digest),
        )
        for digest, entry in in_host.items()
        if digest not in pool
    ]
    rows += [
        AdapterResidency(
            digest=digest,
            tier=Tier.LOADING if digest in loading else Tier.DISK,
            device_bytes=0,
            host_bytes=0,
            num_pins=0,
            is_pinned=digest in operator_pins,
            last_used_s=now_s - wait.asked_s,
            uses_per_s=uses_per_s(digest),
        )
        for wait in line
        if (digest := wait.ref.digest) not in pool and digest not in in_host
    ]
    return rows


def memory_usage(arena: Arena) -> dict[str, int]:
    """The arena's part of EngineStats, by its names: what is used, idle and free, which together are all there is."""
    page = arena.page_num_bytes
    sums = {"device_bytes": arena.num_pages * page, "free_bytes": arena.num_free * page}
    for owner, name in ((Owner.KV, "kv"), (Owner.ADAPTERS, "adapter")):
        client = arena.client(owner)
        num_idle = 0 if client.cache is None else client.cache.num_idle_pages
        sums[f"{name}_bytes_used"] = (client.num_allocated - num_idle) * page
        sums[f"{name}_bytes_idle"] = num_idle * page
    return sums


def adapter_usage(pool: DeviceCache, host_cache: HostCache) -> dict[str, int]:
    """The part of EngineStats that says what adapters have of both tiers, and how many had to leave them, by its names."""
    return {
        "device_adapters": len(pool),
        "device_adapter_bytes": pool.num_bytes,
        "device_adapter_budget_bytes": pool.budget_bytes,
        "host_adapters": len(host_cache),
        "host_adapter_bytes": host_cache.num_bytes,
        "host_adapter_budget_bytes": host_cache.budget_bytes,
        "num_pins": pool.num_pins,
        "device_evictions": pool.num_evictions,
        "device_evictions_for_kv": pool.num_evictions_for[Owner.KV],
        "host_evictions": host_cache.num_evictions,
    }
