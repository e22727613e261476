"""Where adapters are, as operators are told."""

from __future__ import annotations

from collections.abc import Container

from loraserve.memory.residency.device_cache import AdapterPool
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.load_queue import PlaceLine
from loraserve.types import AdapterResidency, Digest, Tier


def residency_rows(
    pool: AdapterPool,
    host_cache: HostCache,
    line: PlaceLine,
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
            dtype=resident.facts.dtype,
            precision_loss=resident.facts.precision_loss,
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
            dtype=entry.adapter.facts.dtype,
            precision_loss=entry.adapter.facts.precision_loss,
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
