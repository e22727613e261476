"""Tenants have turns at the loaders and at places:
a flood of one's adapters holds up nobody else's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapters_store import LocalStore
from loraserve import faults
from loraserve.memory.loading.adapter_metadata import LoadedAdapter
from loraserve.memory.loading.load import load_adapter
from loraserve.memory.residency.load_queue import HEAD_OF_LINE_GRACE_S
from loraserve.memory.residency.pager import Pager
from loraserve.memory.residency.tenant_round_robin import TenantRoundRobin
from loraserve.types import AdapterRef, Residency, TenantId

MakePager = Callable[..., Pager]
TENANTS = tuple(TenantId(name) for name in "abcd")


def publish(make: Any, store: LocalStore, tenant: str, seed: int, rank: int = 1) -> AdapterRef:
    ref: AdapterRef = msgspec.structs.replace(make.publish(store, seed=seed, rank=rank), tenant=TenantId(tenant))
    return ref


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.sets(st.sampled_from(TENANTS), min_size=1, max_size=2), st.none()), min_size=1, max_size=60)
)
@example([{TENANTS[0]}, {TENANTS[0]}, None, *([{TENANTS[1]}, None] * 3)])
def test_no_tenant_gets_third_round_while_tenant_waits(steps: list[set[TenantId] | None]) -> None:
    """Each step somebody joins with a thing of theirs, or the first in line has its turn."""
    turns = TenantRoundRobin()
    line: list[tuple[int, frozenset[TenantId]]] = []
    since_turn: dict[TenantId, Counter[TenantId]] = {}

    def serve() -> None:
        entry = turns.order([((number, tenants), tenants) for number, tenants in line])[0]
        line.remove(entry)
        number, tenants = entry
        turns.take(tenants)
        turns.leave(tenants)
        for tenant in tenants:
            since_turn.pop(tenant, None)
            if any(tenant in others for _, others in line):
                since_turn[tenant] = Counter()
            if len(tenants) == 1:
                shared = [n for n, others in line if tenant in others and len(others) == 1]
                assert all(n > number for n in shared), "a tenant's own come in the order of their arrivals"
        for counts in since_turn.values():
            # what others want too may be had in their turns
            counts.update(tenants if len(tenants) == 1 else ())
            assert max(counts.values(), default=0) <= 2

    for number, tenants in enumerate(steps):
        if tenants is None:
            if line:
                serve()
            continue
        waiting = {tenant for _, others in line for tenant in others}
        line.append((number, frozenset(tenants)))
        for tenant in tenants:
            turns.join(tenant)
            if tenant not in waiting:
                since_turn[tenant] = Counter()
    while line:
        serve()
    assert len(turns) == 0


def test_tenant_waits_two_loads_behind_cold_flood(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager(num_threads=1, device_ranks=100)
    flood = [publish(make, store, "a", seed) for seed in range(12)]
    one = publish(make, store, "b", 99)
    gate = threading.Semaphore(0)
    loaded = 0
    with faults.arm("pager.load", lambda: gate.acquire(timeout=10) and None):
        for ref in flood:
            pager.request(ref)
        pager.request(one)
        while pager.request(one) is not Residency.RESIDENT:
            gate.release()
            while pager._loaders._results.empty():
                pass
            pager.poll()
            loaded += 1
            assert loaded <= 3
        for _ in flood:
            gate.release()
        make.settle(pager)
    assert [pager.request(ref) for ref in flood] == [Residency.RESIDENT] * len(flood)


def test_tenant_uses_two_loaders_only_without_waiting_tenants(
    make: Any, store: LocalStore, make_pager: MakePager
) -> None:
    pager = make_pager(num_threads=2)
    flood = [publish(make, store, "a", seed) for seed in range(6)]
    ones = [publish(make, store, "b", 50), publish(make, store, "b", 51)]
    gate = threading.Semaphore(0)
    with faults.arm("pager.load", lambda: gate.acquire(timeout=10) and None):
        for ref in [*flood, *ones]:
            pager.request(ref)
        assert [ref for ref in [*flood, *ones] if ref.digest in pager._loaders] == flood[:2]
        for _ in range(2):
            gate.release()
            while pager._loaders._results.empty():
                pass
            pager.poll()
            assert pager._loaders.num_by_tenant() == {"a": 1, "b": 1}
        for _ in range(8):
            gate.release()
        make.settle(pager)


def test_places_go_to_tenants_in_turn(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager(device_ranks=4, host_ranks=100)
    running = publish(make, store, "z", 0, rank=4)
    pager.request(running)
    make.settle(pager)
    pin = pager.pin(running.digest)
    flood = [publish(make, store, "a", seed, rank=4) for seed in range(1, 5)]
    one = publish(make, store, "b", 9, rank=4)
    for ref in [*flood, one]:
        pager.request(ref)
    make.settle(pager)
    got = []
    while len(got) < 5:
        pin.release()
        (digest,) = pager.poll()
        got.append(digest)
        pin = pager.pin(digest)
    pin.release()
    assert got == [flood[0].digest, one.digest, *(ref.digest for ref in flood[1:])]


def test_reserved_adapter_stays_first_after_other_tenants_round(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pager = make_pager(device_ranks=8, num_threads=3)
    running = publish(make, store, "z", 0, rank=4)
    pager.request(running)
    make.settle(pager)
    pin = pager.pin(running.digest)
    small, large = publish(make, store, "a", 2, rank=2), publish(make, store, "a", 1, rank=8)
    slow = publish(make, store, "b", 3, rank=1)
    gate = threading.Event()

    def load(store: LocalStore, ref: AdapterRef, *rest: Any) -> LoadedAdapter:
        assert ref != slow or gate.wait(10)
        return load_adapter(store, ref, *rest)

    monkeypatch.setattr("loraserve.memory.residency.pager.load_adapter", load)
    for ref in (small, slow, large):
        pager.request(ref)
    while small.digest not in pager._pool or large.digest not in pager._host:
        pager.poll()
    clock.advance(HEAD_OF_LINE_GRACE_S + 0.1)
    pager.poll()
    assert pager._queue.reserved_for == large.digest
    gate.set()
    make.settle(pager)
    pager.request(slow)
    assert slow.digest not in pager._pool
    pin.release()
    assert pager.poll() == [large.digest]


def test_shared_adapter_takes_better_position_of_two_tenants() -> None:
    turns = TenantRoundRobin()
    entries = [("a1", "a"), ("a2", "a"), ("both", "ab")]
    for _, tenants in entries:
        for tenant in tenants:
            turns.join(TenantId(tenant))
    named = [(name, [TenantId(tenant) for tenant in tenants]) for name, tenants in entries]
    assert turns.order(named) == ["a1", "both", "a2"]
