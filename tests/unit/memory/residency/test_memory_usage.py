"""What operators are told of memory: where requests find adapters, how long loads took,
who has how much, who gave way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adapters_store import LocalStore
from loraserve.memory.arena import Arena, Owner
from loraserve.memory.loading.precision import Precision
from loraserve.memory.residency.load_queue import HEAD_OF_LINE_GRACE_S
from loraserve.memory.residency.pager import Pager
from loraserve.memory.residency.snapshot import memory_usage
from loraserve.types import Residency, Tier

MakePager = Callable[..., Pager]


class Idle:
    """A renter that gives up so many pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_idle_pages = num_pages

    def victim_value(self) -> float:
        return 0.0

    def evict_victim(self, cause: Owner, num_pages: int) -> None:
        raise AssertionError("nobody takes what it offers")


def test_request_finds_adapter_in_current_tier(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager(device_ranks=4)
    a, b = (make.publish(store, seed=seed) for seed in range(2))
    assert pager.tier(a.digest) is Tier.DISK
    pager.request(a)
    # on its way from disk, for somebody else
    assert pager.tier(a.digest) is Tier.DISK
    make.settle(pager)
    assert pager.tier(a.digest) is Tier.DEVICE
    pager.request(b)
    make.settle(pager)
    pager.poll()
    assert (pager.tier(a.digest), pager.tier(b.digest)) == (Tier.HOST, Tier.DEVICE)


def test_displaced_adapter_is_found_in_host_memory(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    pager = make_pager(device_ranks=4)
    a, b = (make.publish(store, seed=seed) for seed in range(2))
    pager.request(a)
    make.settle(pager)
    assert pager.request(a) is Residency.RESIDENT
    pin = pager.pin(a.digest)
    pager.request(b)
    make.settle(pager)
    clock.advance(HEAD_OF_LINE_GRACE_S + 1)
    pager.request(b)
    pager.poll()
    assert pager.tier(a.digest) is Tier.HOST
    pin.release()


def test_loads_are_timed_by_destination_tier(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager(device_ranks=4)
    a, b = (make.publish(store, seed=seed) for seed in range(2))
    for ref in (a, b):
        pager.request(ref)
        make.settle(pager)
        pager.poll()
    # back from the host's memory: no load from disk
    assert pager.request(a) is Residency.RESIDENT
    stats = pager.stats()
    assert (stats["host_load_s"].num, stats["device_load_s"].num) == (2, 3)
    assert stats["host_load_s"].sum_s > 0


def test_failed_load_adds_no_load_time(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager, ref = make_pager(), make.publish(store)
    make.damage(store, ref.weights_blob)
    pager.request(ref)
    make.settle(pager)
    stats = pager.stats()
    assert (stats["adapter_load_failures"], stats["host_load_s"].num, stats["device_load_s"].num) == (1, 0, 0)


def test_residency_reports_held_dtype_and_precision_loss(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager(device_ranks=4, dtype=torch.float32, precision=Precision(rank_error=0.5))
    a, b = (make.publish(store, seed=seed, dtype=torch.bfloat16) for seed in range(2))
    for ref in (a, b):
        pager.request(ref)
        make.settle(pager)
        pager.poll()
    rows = {row.digest: row for row in pager.residency()}
    assert {row.dtype for row in rows.values()} == {"fp32"}
    assert all(0.0 < (row.precision_loss or 0.0) <= 0.5 for row in rows.values())


def test_residency_tells_how_often_an_adapter_is_used(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    pager, ref = make_pager(), make.publish(store)
    pager.request(ref)
    make.settle(pager)
    seldom = pager.residency()[0].uses_per_s
    for _ in range(5):
        pager.pin(ref.digest).release()
    often = pager.residency()[0].uses_per_s
    assert seldom is not None
    assert often is not None
    assert often > seldom
    clock.advance(3600)
    assert (pager.residency()[0].uses_per_s or 0.0) < often / 1000


def test_loading_adapter_reports_no_dtype_or_loss(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager, ref = make_pager(), make.publish(store)
    pager.request(ref)
    (row,) = pager.residency()
    assert (row.tier, row.dtype, row.precision_loss) == (Tier.LOADING, "", None)
    make.settle(pager)


def test_used_idle_and_free_are_all_there_is() -> None:
    arena = Arena(100, 4096)
    kv, adapters = arena.client(Owner.KV), arena.client(Owner.ADAPTERS)
    kv.register(Idle(5))
    adapters.register(Idle(7))
    kv.allocate(30)
    adapters.allocate(20)
    assert memory_usage(arena) == {
        "device_bytes": 100 * 4096,
        "free_bytes": 50 * 4096,
        "kv_bytes_used": 25 * 4096,
        "kv_bytes_idle": 5 * 4096,
        "adapter_bytes_used": 13 * 4096,
        "adapter_bytes_idle": 7 * 4096,
    }


def test_used_adapter_bytes_are_separate_from_idle(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager, ref = make_pager(), make.publish(store)
    pager.request(ref)
    make.settle(pager)
    pager.poll()
    assert pager.request(ref) is Residency.RESIDENT
    idle = pager.stats()
    pin = pager.pin(ref.digest)
    used = pager.stats()
    pin.release()
    assert idle["adapter_bytes_used"] == used["adapter_bytes_idle"] == 0
    assert idle["adapter_bytes_idle"] == used["adapter_bytes_used"] == used["device_adapter_bytes"]


def test_eviction_for_kv_is_counted_separately(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager(device_ranks=4)
    a, b = (make.publish(store, seed=seed) for seed in range(2))
    for ref in (a, b):
        pager.request(ref)
        make.settle(pager)
        pager.poll()
    stats = pager.stats()
    assert (stats["device_evictions"], stats["device_evictions_for_kv"]) == (1, 0)
    arena = pager._pool.device.arena_client.arena
    assert arena.client(Owner.KV).make_room(arena.num_pages)
    stats = pager.stats()
    assert (stats["device_evictions"], stats["device_evictions_for_kv"]) == (2, 1)
