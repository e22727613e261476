"""Who has how much of a device's memory now."""

from __future__ import annotations

from loraserve.memory.arena import Arena, Tenure


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
