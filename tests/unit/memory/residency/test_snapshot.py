"""Operators are told of each adapter once, wherever it is."""

from __future__ import annotations

from typing import Any

from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.load_queue import LoadQueue
from loraserve.memory.residency.snapshot import residency_rows
from loraserve.types import Digest, Tier


def test_snapshot_lists_each_adapter_in_highest_tier(make: Any) -> None:
    pool, host, line = DeviceCache(CpuDevice(make.base, 100 * make.rank_bytes)), HostCache(1 << 20), LoadQueue()
    size = make.loaded().num_bytes
    pool.admit(Digest("placed"), make.loaded(dtype="fp32", precision_loss=0.25), 1.0)
    pool.pin(Digest("placed"), 2.0)
    # a GPU's: a copy of what is on the device, and one that waits for it
    for name in ("placed", "held"):
        host.put(Digest(name), make.loaded(dtype="bf16"), 3.0)
    for name in ("held", "loading", "waiting"):
        line.join(make.ref(name), 4.0)
    rows = {row.digest: row for row in residency_rows(pool, host, line, {Digest("loading")}, {Digest("waiting")}, 10.0)}
    assert [(r.digest, r.tier, r.device_bytes, r.host_bytes, r.num_pins, r.last_used_s) for r in rows.values()] == [
        ("placed", Tier.DEVICE, pool.num_bytes, size, 1, 8.0),
        ("held", Tier.HOST, 0, size, 0, 7.0),
        ("loading", Tier.LOADING, 0, 0, 0, 6.0),
        ("waiting", Tier.DISK, 0, 0, 0, 6.0),
    ]
    assert [row.is_pinned for row in rows.values()] == [False, False, False, True]
    assert [(row.dtype, row.precision_loss) for row in rows.values()] == [
        ("fp32", 0.25),
        ("bf16", 0.0),
        ("", None),
        ("", None),
    ]
    assert [row.uses_per_s > 0 for row in rows.values()] == [True, False, False, False]
