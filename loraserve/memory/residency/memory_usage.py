"""Who has how much of a device's memory now, and of the host's that is for adapters."""

from __future__ import annotations

from loraserve.memory.arena import Arena, Tenure
from loraserve.memory.residency.device_cache import AdapterPool
from loraserve.memory.residency.host_cache import HostCache


def memory_usage(arena: Arena) -> dict[str, int]:
    """The arena's part of EngineStats, by its names: what is used, idle and free, which together are all there is."""
    page = arena.page_num_bytes
    sums = {"device_bytes": arena.num_pages * page, "free_bytes": arena.num_free * page}
    for tenure, name in ((Tenure.KV, "kv"), (Tenure.ADAPTERS, "adapter")):
        lease = arena.lease(tenure)
        num_idle = 0 if lease.renter is None else lease.renter.num_idle_pages
        sums[f"{name}_bytes_used"] = (lease.num_rented - num_idle) * page
        sums[f"{name}_bytes_idle"] = num_idle * page
    return sums


def adapter_usage(pool: AdapterPool, host_cache: HostCache) -> dict[str, int]:
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
        "device_evictions_for_kv": pool.num_evictions_for[Tenure.KV],
        "host_evictions": host_cache.num_evictions,
    }
