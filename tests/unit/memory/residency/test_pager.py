"""Adapters come to the device without holding anybody up, wait for space in order,
and fail with their reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_clock import scheduled_s

from adapters_store import LocalStore
from loraserve import faults
from loraserve.errors import AdapterCorrupt, AdapterTooLarge, AdapterUnavailable, AdapterUnservable, InvariantViolation
from loraserve.memory.loading.precision import Precision
from loraserve.memory.residency.load_queue import HEAD_OF_LINE_GRACE_S, STALE_AFTER_S
from loraserve.memory.residency.loader import MAX_RETRY_S, RETRY_S
from loraserve.memory.residency.pager import Pager
from loraserve.types import Residency, Tier

MakePager = Callable[..., Pager]


def test_an_adapter_is_loaded_once_and_becomes_resident(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager, ref = make_pager(), make.publish(store)
    assert pager.request(ref) is Residency.LOADING
    assert pager.request(ref) is Residency.LOADING
    assert pager.num_loading == 1
    assert make.settle(pager) == [ref.digest]
    assert pager.request(ref) is Residency.RESIDENT
    stats = pager.stats()
    assert stats["adapter_loads"] == 1
    assert stats["device_adapter_bytes"] == 4 * make.rank_bytes
    assert stats["adapter_load_s"] > 0


def test_packed_weights_equal_file_weights(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager, ref = make_pager(), make.publish(store, rank=3, seed=7)
    pager.request(ref)
    make.settle(pager)
    packed = pager.handle(ref.digest)
    generator = torch.Generator().manual_seed(7)
    for layer in range(2):
        assert torch.equal(packed.lora_a(layer, "q_proj"), torch.randn(3, 32, generator=generator))
        assert torch.equal(packed.lora_b(layer, "q_proj"), torch.randn(32, 3, generator=generator).T)
    assert packed.scaling(0, "q_proj").tolist() == [2.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_weights_keep_stored_dtype(make: Any, store: LocalStore, make_pager: MakePager, dtype: torch.dtype) -> None:
    pager, ref = make_pager(), make.publish(store, dtype=dtype)
    pager.request(ref)
    make.settle(pager)
    assert pager.handle(ref.digest).data.dtype == dtype


def test_a_dtype_can_be_asked_for(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager, ref = make_pager(dtype=torch.float32), make.publish(store, dtype=torch.bfloat16)
    pager.request(ref)
    make.settle(pager)
    assert pager.handle(ref.digest).data.dtype == torch.float32


def test_neither_request_nor_poll_waits_for_a_load(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager, ref = make_pager(), make.publish(store)
    gate = threading.Event()
    with faults.arm("pager.load", lambda: gate.wait(10) and None):
        started = scheduled_s()
        assert pager.request(ref) is Residency.LOADING
        assert pager.poll() == []
        assert scheduled_s() - started < 0.2
        assert pager.num_loading == 1
        gate.set()
        assert make.settle(pager) == [ref.digest]


def test_loads_in_flight_are_bounded_and_ordered(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager(num_threads=2)
    refs = [make.publish(store, seed=seed) for seed in range(5)]
    gate = threading.Event()
    with faults.arm("pager.load", lambda: gate.wait(10) and None):
        for ref in refs:
            assert pager.request(ref) is Residency.LOADING
        assert pager.num_loading == 2
        gate.set()
        make.settle(pager)
    assert all(pager.request(ref) is Residency.RESIDENT for ref in refs)


def test_evicted_adapter_returns_from_host_without_copy(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager(device_ranks=4)
    a, b = (make.publish(store, seed=seed) for seed in range(2))
    pager.request(a)
    make.settle(pager)
    packed = pager.handle(a.digest)
    pager.request(b)
    make.settle(pager)
    assert {row.digest: row.tier for row in pager.residency()} == {b.digest: Tier.DEVICE, a.digest: Tier.HOST}
    pager.poll()
    assert pager.request(a) is Residency.RESIDENT
    assert pager.handle(a.digest) is packed
    assert pager.stats()["adapter_loads"] == 2
    assert pager.stats()["device_evictions"] == 2


def test_adapter_metadata_follows_adapter_through_tiers(
    make: Any, store: LocalStore, make_pager: MakePager, monkeypatch: pytest.MonkeyPatch
) -> None:
    pager = make_pager(device_ranks=4)
    a, b = (make.publish(store, seed=seed) for seed in range(2))
    monkeypatch.setattr(
        "loraserve.memory.residency.pager.load_adapter",
        lambda store, ref, *_: make.loaded(4, invocation_token_ids=(7, 8) if ref == a else ()),
    )
    with pytest.raises(InvariantViolation, match="isn't resident"):
        pager.metadata(a.digest)
    for ref in (a, b, a):
        pager.request(ref)
        make.settle(pager)
        pager.request(ref)
    assert pager.stats()["adapter_loads"] == 2
    assert pager.metadata(a.digest).invocation_token_ids == (7, 8)


def test_memory_share_is_footprint_of_loaded_adapter(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager(device_ranks=16)
    small, large = make.publish(store), make.publish(store, rank=8, seed=1)
    assert pager.memory_share(small.digest) == 0.0
    for ref in (small, large):
        pager.request(ref)
        make.settle(pager)
    stats = pager.stats()
    shares = [pager.memory_share(ref.digest) for ref in (small, large)]
    assert 0 < shares[0] < shares[1]
    assert sum(shares) == pytest.approx(stats["device_adapter_bytes"] / stats["device_bytes"])


def test_adapter_evicted_from_all_tiers_is_read_again(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager(device_ranks=4, host_ranks=0)
    a, b = (make.publish(store, seed=seed) for seed in range(2))
    for ref in (a, b, a):
        pager.request(ref)
        make.settle(pager)
        assert pager.request(ref) is Residency.RESIDENT
    assert pager.stats()["adapter_loads"] == 3


def test_next_adapter_waits_until_pinned_adapter_is_released(
    make: Any, store: LocalStore, make_pager: MakePager
) -> None:
    pager = make_pager(device_ranks=4)
    a, b = (make.publish(store, seed=seed) for seed in range(2))
    pager.request(a)
    make.settle(pager)
    pin = pager.pin(a.digest)
    pager.request(b)
    assert make.settle(pager) == []
    assert pager.request(b) is Residency.WAITING_FOR_SPACE
    assert pager.stats()["num_pins"] == 1
    pin.release()
    assert pager.poll() == [b.digest]
    assert pager.request(b) is Residency.RESIDENT
    assert pager.stats()["adapter_loads"] == 2


def test_adapter_without_host_memory_rereads_once_space_frees(
    make: Any, store: LocalStore, make_pager: MakePager
) -> None:
    pager = make_pager(device_ranks=4, host_ranks=0)
    a, b = (make.publish(store, seed=seed) for seed in range(2))
    pager.request(a)
    make.settle(pager)
    pin = pager.pin(a.digest)
    pager.request(b)
    for _ in range(5):
        make.settle(pager)
        assert pager.request(b) is Residency.WAITING_FOR_SPACE
    assert pager.stats()["adapter_loads"] == 2
    pin.release()
    pager.poll()
    assert make.settle(pager) == [b.digest]


def test_admitted_adapter_is_kept_until_pinnable(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager = make_pager(device_ranks=4)
    a, b = (make.publish(store, seed=seed) for seed in range(2))
    pager.request(a)
    pager.request(b)
    while pager.stats()["adapter_loads"] < 2:
        time.sleep(0.001)
        changed = pager.poll()
        if changed:
            assert len(changed) == 1
            pager.pin(changed[0])
    assert pager.stats()["device_adapters"] == 1


def test_small_adapter_passes_large_adapter_only_briefly(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    pager = make_pager(device_ranks=8)
    running, large, small, late = (make.publish(store, rank=rank, seed=rank) for rank in (4, 8, 2, 1))
    pager.request(running)
    make.settle(pager)
    pin = pager.pin(running.digest)
    pager.request(large)
    make.settle(pager)
    pager.request(small)
    assert make.settle(pager) == [small.digest]
    clock.advance(HEAD_OF_LINE_GRACE_S + 0.1)
    assert pager.request(large) is Residency.WAITING_FOR_SPACE
    pager.request(late)
    assert make.settle(pager) == []
    # there is room for it, and somebody is before it
    assert pager.request(late) is not Residency.RESIDENT
    pin.release()
    assert pager.poll() == [large.digest]


def test_constantly_used_adapter_yields_to_waiting_adapter(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    pager = make_pager(device_ranks=4)
    busy, cold = (make.publish(store, seed=seed) for seed in range(2))
    pager.request(busy)
    make.settle(pager)
    pins = [pager.pin(busy.digest)]
    pager.request(cold)
    make.settle(pager)
    # requests for the busy one overlap without end
    num_steps = 0
    while pager.request(cold) is not Residency.RESIDENT:
        num_steps += 1
        assert num_steps < 20
        clock.advance(0.2)
        pager.poll()
        if pager.request(busy) is Residency.RESIDENT:
            pins.append(pager.pin(busy.digest))
        if pins:
            pins.pop(0).release()
        assert pager.check() == []
    assert num_steps * 0.2 > HEAD_OF_LINE_GRACE_S
    assert pins == []
    # and the busy one is next in line
    pager.request(busy)
    assert pager.poll() == [busy.digest]


def test_drain_ends_when_no_request_waits(make: Any, store: LocalStore, make_pager: MakePager, clock: Any) -> None:
    pager = make_pager(device_ranks=4)
    busy, cold = (make.publish(store, seed=seed) for seed in range(2))
    pager.request(busy)
    make.settle(pager)
    pin = pager.pin(busy.digest)
    pager.request(cold)
    make.settle(pager)
    clock.advance(HEAD_OF_LINE_GRACE_S + 0.1)
    pager.poll()
    assert pager.request(busy) is Residency.WAITING_FOR_SPACE
    clock.advance(STALE_AFTER_S)
    assert pager.request(busy) is Residency.WAITING_FOR_SPACE
    clock.advance(0.1)
    assert set(pager.poll()) == {cold.digest, busy.digest}
    assert pager.request(busy) is Residency.RESIDENT
    pin.release()


def test_adapter_without_requests_leaves_queue(make: Any, store: LocalStore, make_pager: MakePager, clock: Any) -> None:
    pager = make_pager(device_ranks=4)
    a, b = (make.publish(store, seed=seed) for seed in range(2))
    pager.request(a)
    make.settle(pager)
    pin = pager.pin(a.digest)
    pager.request(b)
    make.settle(pager)
    clock.advance(STALE_AFTER_S + 0.1)
    assert pager.poll() == [b.digest]
    pin.release()
    assert pager.poll() == []
    assert {row.digest: row.tier for row in pager.residency()} == {a.digest: Tier.DEVICE, b.digest: Tier.HOST}


@pytest.mark.parametrize("blob", ["config_blob", "weights_blob"])
@pytest.mark.parametrize("fault", ["damaged", "deleted"])
def test_damaged_or_deleted_bytes_fail_only_affected_adapter(
    make: Any, store: LocalStore, make_pager: MakePager, blob: str, fault: str
) -> None:
    pager = make_pager()
    bad, good = make.publish(store, seed=1, rank=3), make.publish(store, seed=2, rank=4)
    digest = getattr(bad, blob)
    if fault == "damaged":
        make.damage(store, digest)
    else:
        store.delete(digest)
    pager.request(bad)
    pager.request(good)
    make.settle(pager)
    assert pager.request(bad) is Residency.FAILED
    error = pager.error(bad.digest)
    assert isinstance(error, AdapterCorrupt)
    assert bad.name not in str(error)
    assert pager.request(good) is Residency.RESIDENT
    assert pager.error(good.digest) is None
    assert pager.stats()["adapter_load_failures"] == 1


def test_failed_load_is_retried_after_holdoff(make: Any, store: LocalStore, make_pager: MakePager, clock: Any) -> None:
    pager, ref = make_pager(), make.publish(store)
    right = make.damage(store, ref.weights_blob)
    wait_s = RETRY_S
    for num_failures in range(1, 10):
        pager.request(ref)
        make.settle(pager)
        assert pager.request(ref) is Residency.FAILED
        assert pager.stats()["adapter_load_failures"] == num_failures
        clock.advance(wait_s - 0.01)
        assert pager.request(ref) is Residency.FAILED
        clock.advance(0.02)
        wait_s = min(2 * wait_s, MAX_RETRY_S)
    make.restore(store, right)
    assert pager.request(ref) is Residency.LOADING
    make.settle(pager)
    assert pager.request(ref) is Residency.RESIDENT
    assert pager.error(ref.digest) is None


def test_adapter_larger_than_device_is_refused(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager, ref = make_pager(device_ranks=3.9), make.publish(store)
    pager.request(ref)
    make.settle(pager)
    assert pager.request(ref) is Residency.FAILED
    error = pager.error(ref.digest)
    assert isinstance(error, AdapterTooLarge)
    assert "2,176 bytes; the memory for adapters has 2,121" in str(error)


def test_adapter_unsuited_to_base_is_unservable(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager, ref = make_pager(), make.publish(store, use_dora=True)
    pager.request(ref)
    make.settle(pager)
    error = pager.error(ref.digest)
    assert type(error) is AdapterUnservable
    assert "use_dora" in str(error)


def test_adapter_over_operator_loss_limit_is_refused(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    ref = make.publish(store)
    pager = make_pager(dtype=torch.bfloat16, precision=Precision(max_loss=1e-4))
    pager.request(ref)
    make.settle(pager)
    error = pager.error(ref.digest)
    assert type(error) is AdapterUnservable
    assert "q_proj has a precision loss of" in str(error)
    pager = make_pager(dtype=torch.bfloat16, precision=Precision(max_loss=0.01))
    pager.request(ref)
    make.settle(pager)
    assert 1e-4 < pager.metadata(ref.digest).precision_loss < 0.01


@pytest.mark.parametrize("fault", ["EIO", "unexpected"])
def test_any_other_failure_is_unavailable_too(make: Any, store: LocalStore, make_pager: MakePager, fault: str) -> None:
    pager, ref = make_pager(), make.publish(store)

    def fail() -> None:
        raise ZeroDivisionError

    with faults.arm("pager.load", fail if fault == "unexpected" else fault):
        pager.request(ref)
        make.settle(pager)
    assert pager.request(ref) is Residency.FAILED
    assert type(pager.error(ref.digest)) is AdapterUnavailable


def test_operator_pin_loads_and_keeps_adapter(make: Any, store: LocalStore, make_pager: MakePager, clock: Any) -> None:
    pager = make_pager(device_ranks=4)
    kept, other = (make.publish(store, seed=seed) for seed in range(2))
    pager.set_operator_pin(kept, True)
    make.settle(pager)
    assert [(row.tier, row.is_pinned) for row in pager.residency()] == [(Tier.DEVICE, True)]
    for _ in range(4):
        pager.request(other)
        make.settle(pager)
        clock.advance(HEAD_OF_LINE_GRACE_S)
    assert pager.request(other) is Residency.WAITING_FOR_SPACE
    # what waits for an operator closes the line to nobody
    assert pager.request(kept) is Residency.RESIDENT
    pager.set_operator_pin(kept, False)
    assert pager.poll() == [other.digest]


def test_operator_pin_waits_for_space_without_renewal(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    pager = make_pager(device_ranks=4)
    a, b = (make.publish(store, seed=seed) for seed in range(2))
    pager.request(a)
    make.settle(pager)
    pin = pager.pin(a.digest)
    pager.set_operator_pin(b, True)
    make.settle(pager)
    clock.advance(10 * STALE_AFTER_S)
    assert pager.poll() == []
    pin.release()
    assert pager.poll() == [b.digest]


@pytest.mark.parametrize("has_failed_before", [False, True])
def test_operator_pin_with_failed_load_is_forgotten(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any, has_failed_before: bool
) -> None:
    pager, ref = make_pager(), make.publish(store)
    right = make.damage(store, ref.weights_blob)
    if has_failed_before:
        pager.request(ref)
        make.settle(pager)
    pager.set_operator_pin(ref, True)
    make.settle(pager)
    assert isinstance(pager.error(ref.digest), AdapterCorrupt)
    make.restore(store, right)
    clock.advance(MAX_RETRY_S)
    pager.request(ref)
    make.settle(pager)
    assert [(row.tier, row.is_pinned) for row in pager.residency()] == [(Tier.DEVICE, False)]


def test_only_a_resident_adapter_can_be_pinned(make: Any, store: LocalStore, make_pager: MakePager) -> None:
    pager, ref = make_pager(), make.publish(store)
    with pytest.raises(InvariantViolation, match="isn't resident"):
        pager.pin(ref.digest)


def test_residency_shows_every_tier(make: Any, store: LocalStore, make_pager: MakePager, clock: Any) -> None:
    pager = make_pager(device_ranks=4, host_ranks=4)
    a, b, c = (make.publish(store, seed=seed) for seed in range(3))
    for ref in (a, b):
        pager.request(ref)
        make.settle(pager)
    pin = pager.pin(b.digest)
    clock.advance(2.0)
    gate = threading.Event()
    with faults.arm("pager.load", lambda: gate.wait(10) and None):
        pager.request(c)
        rows = {row.digest: row for row in pager.residency()}
        gate.set()
        make.settle(pager)
    size = 4 * make.rank_bytes
    assert [(rows[r.digest].tier, rows[r.digest].device_bytes, rows[r.digest].host_bytes) for r in (a, b, c)] == [
        (Tier.HOST, 0, size),
        (Tier.DEVICE, size, 0),
        (Tier.LOADING, 0, 0),
    ]
    assert rows[b.digest].num_pins == 1
    assert rows[b.digest].last_used_s == 2.0
    pin.release()


def test_stats_have_the_engines_names(make_pager: MakePager) -> None:
    from loraserve.types import EngineStats

    assert set(make_pager().stats()) <= set(EngineStats.__struct_fields__)


def test_host_hit_never_passes_patient_waiter(make: Any, store: LocalStore, make_pager: MakePager, clock: Any) -> None:
    pager = make_pager(device_ranks=8)
    small, filler, running, large = (
        make.publish(store, rank=rank, seed=seed) for seed, rank in enumerate((2, 8, 4, 8))
    )
    for ref in (small, filler, running):
        pager.request(ref)
        make.settle(pager)
    pin = pager.pin(running.digest)
    pager.request(large)
    make.settle(pager)
    clock.advance(HEAD_OF_LINE_GRACE_S + 0.1)
    pager.poll()
    assert pager.request(small) is not Residency.RESIDENT
    pin.release()
    assert pager.poll() == [large.digest]


def test_blocked_adapter_is_not_reread_without_host_memory(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    pager = make_pager(device_ranks=8, host_ranks=0)
    small, running, large = (make.publish(store, rank=rank, seed=seed) for seed, rank in enumerate((1, 6, 3)))
    pager.request(running)
    make.settle(pager)
    pin = pager.pin(running.digest)
    pager.request(large)
    make.settle(pager)
    clock.advance(HEAD_OF_LINE_GRACE_S + 0.1)
    pager.poll()
    pager.request(small)
    make.settle(pager)
    assert pager.stats()["adapter_loads"] == 3
    pin.release()
    assert set(make.settle(pager)) == {large.digest, small.digest}


def test_adapter_waiting_for_unpin_blocks_no_other_adapter(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    pager = make_pager(device_ranks=8)
    kept, large, small = (make.publish(store, rank=rank) for rank in (4, 8, 2))
    pager.set_operator_pin(kept, True)
    make.settle(pager)
    pager.request(large)
    make.settle(pager)
    clock.advance(HEAD_OF_LINE_GRACE_S + 0.1)
    pager.poll()
    pager.request(small)
    assert make.settle(pager) == [small.digest]
