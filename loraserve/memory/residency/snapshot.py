"""Places of adapters and the memory that they have, for operators and metrics."""

from __future__ import annotations

from collections.abc import Collection, Container

from loraserve.memory.arena import Arena, Owner
from loraserve.memory.loading.adapter_metadata import LoadedAdapter
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.load_queue import LoadQueue
from loraserve.memory.residency.resident_adapter import ResidentAdapter
from loraserve.types import AdapterResidency, Digest, Tier


def residency_rows(
    pool: DeviceCache,
    host_cache: HostCache,
    queue: LoadQueue,
    loading: Container[Digest],
    operator_pins: Container[Digest],
    now_s: float,
    only: Collection[Digest] | None = None,
) -> list[AdapterResidency]:
    """Build a row for each adapter that is on the device, in host memory or in the queue.

    Args:
        loading: adapters whose loads are in flight.
        operator_pins: adapters that an operator has pinned, wherever they are.
        now_s: time of the pool's and the queue's clock.
        only: adapters to return rows for; None: all.
    """
    on_device = dict(pool.items()) if only is None else pool.find(only)
    in_host = dict(host_cache.items()) if only is None else host_cache.find(only)
    waiting = {pending.ref.digest: pending for pending in queue if only is None or pending.ref.digest in only}

    def row(
        digest: Digest,
        tier: Tier,
        used_s: float,
        resident: ResidentAdapter | None = None,
        copy: LoadedAdapter | None = None,
    ) -> AdapterResidency:
        metadata = resident.metadata if resident is not None else None if copy is None else copy.metadata
        return AdapterResidency(
            digest=digest,
            tier=tier,
            device_bytes=0 if resident is None else resident.footprint.num_bytes,
            host_bytes=0 if copy is None else copy.num_bytes,
            num_pins=0 if resident is None else resident.num_pins,
            is_pinned=digest in operator_pins,
            last_used_s=now_s - used_s,
            uses_per_s=pool.popularity.per_second(digest, now_s),
            dtype="" if metadata is None else metadata.dtype,
            precision_loss=None if metadata is None else metadata.precision_loss,
        )

    rows = []
    for digest, resident in on_device.items():
        tier = Tier.DEVICE if resident.has_landed else Tier.LOADING
        copy = in_host[digest].adapter if digest in in_host else None
        rows.append(row(digest, tier, resident.last_used_s, resident, copy))
    for digest, entry in in_host.items():
        if digest not in on_device:
            rows.append(row(digest, Tier.HOST, entry.last_used_s, copy=entry.adapter))
    for digest, pending in waiting.items():
        if digest not in on_device and digest not in in_host:
            rows.append(row(digest, Tier.LOADING if digest in loading else Tier.DISK, pending.asked_s))
    return rows


def memory_usage(arena: Arena) -> dict[str, int]:
    """Sum EngineStats' fields for the arena: used, idle and free bytes, which add up to all."""
    page = arena.page_num_bytes
    sums = {"device_bytes": arena.num_pages * page, "free_bytes": arena.num_free * page}
    for owner, name in ((Owner.KV, "kv"), (Owner.ADAPTERS, "adapter")):
        client = arena.client(owner)
        num_idle = 0 if client.cache is None else client.cache.num_idle_pages
        sums[f"{name}_bytes_used"] = (client.num_allocated - num_idle) * page
        sums[f"{name}_bytes_idle"] = num_idle * page
    return sums


def adapter_usage(pool: DeviceCache, host_cache: HostCache) -> dict[str, int]:
    """Collect EngineStats' fields for adapters in both tiers: number, size and evictions."""
    return {
        "device_adapters": len(pool),
        "device_adapter_bytes": pool.num_bytes,
        "device_adapter_budget_bytes": pool.budget_bytes,
        "num_arriving_adapters": pool.num_arriving,
        "max_device_adapters": pool.max_residents,
        "host_adapters": len(host_cache),
        "host_adapter_bytes": host_cache.num_bytes,
        "host_adapter_budget_bytes": host_cache.budget_bytes,
        "num_pins": pool.num_pins,
        "device_evictions": pool.num_evictions,
        "device_evictions_for_kv": pool.num_evictions_for[Owner.KV],
        "host_evictions": host_cache.num_evictions,
    }
