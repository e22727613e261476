"""Adapters that will be asked for are read ahead, and nobody who asks in earnest pays for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from adapters_store import LocalStore
from loraserve import faults
from loraserve.memory.residency.pager import Pager
from loraserve.types import Residency, Tier

MakePager = Callable[..., Pager]


def tiers(pager: Pager) -> dict[str, Tier]:
    return {row.digest: row.tier for row in pager.residency()}


def settle(make: Any, pager: Pager, refs: list[Any]) -> None:
    """Look ahead until nothing more comes of it."""
    for _ in range(20):
        pager.prefetch(refs)
        make.settle(pager)


def test_prefetched_adapters_wait_in_host_for_instant_use(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager()
    refs = [make.publish(store, seed=seed) for seed in range(3)]
    settle(make, pager, refs)
    assert tiers(pager) == {ref.digest: Tier.HOST for ref in refs}
    assert [pager.request(ref) for ref in refs] == [Residency.RESIDENT] * 3
    assert pager.stats()["adapter_loads"] == 3


def test_prefetch_leaves_single_loader_free_for_requests(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager(num_threads=2)
    ahead, asked = [make.publish(store, seed=seed) for seed in range(4)], make.publish(store, seed=9)
    gate = threading.Event()
    with faults.arm("pager.load", lambda: gate.wait(10) and None):
        pager.prefetch(ahead)
        assert pager.num_loading == 1
        pager.request(asked)
        assert asked.digest in pager._loaders
        pager.prefetch(ahead)
        assert pager.num_loading == 2
        gate.set()
        make.settle(pager)
    assert pager.request(asked) is Residency.RESIDENT


def test_prefetch_load_in_flight_is_reused_by_request(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager, ref = make_pager(), make.publish(store)
    gate = threading.Event()
    with faults.arm("pager.load", lambda: gate.wait(10) and None):
        pager.prefetch([ref])
        assert pager.request(ref) is Residency.LOADING
        gate.set()
        assert make.settle(pager) == [ref.digest]
    assert pager.stats()["adapter_loads"] == 1


def test_prefetch_evicts_neither_held_nor_prefetched_adapters(
    make: Any, store: LocalStore, make_pager: MakePager
) -> None:
    pager = make_pager(device_ranks=4, host_ranks=12)
    running, held = make.publish(store, seed=0), make.publish(store, seed=1)
    pager.request(running)
    make.settle(pager)
    pin = pager.pin(running.digest)
    pager.request(held)
    make.settle(pager)
    ahead = [make.publish(store, seed=seed) for seed in range(2, 7)]
    settle(make, pager, ahead)
    num_loads = pager.stats()["adapter_loads"]
    in_host = {digest for digest, tier in tiers(pager).items() if tier is Tier.HOST}
    assert held.digest in in_host
    assert {ref.digest for ref in ahead[:2]} == in_host - {held.digest}
    settle(make, pager, ahead)
    assert pager.stats()["adapter_loads"] == num_loads, "what has no room is not read again and again"
    pin.release()


@pytest.mark.parametrize("host_ranks", [0, 100])
def test_unloadable_prefetch_is_not_retried_each_step(
    make: Any, store: LocalStore, make_pager: MakePager, host_ranks: int
) -> None:
    pager, ref = make_pager(host_ranks=host_ranks), make.publish(store)
    if host_ranks:
        make.damage(store, ref.weights_blob)
    settle(make, pager, [ref])
    stats = pager.stats()
    assert stats["adapter_loads"] + stats["adapter_load_failures"] == 1


def test_prefetched_adapters_are_evicted_last(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager(host_ranks=8)
    first, other, second = (make.publish(store, seed=seed) for seed in range(3))
    for refs in ([first], [other], [first, second]):
        settle(make, pager, refs)
    assert set(tiers(pager)) == {first.digest, second.digest}
    assert pager.stats()["adapter_loads"] == 3
