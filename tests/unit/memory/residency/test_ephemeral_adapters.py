"""Ephemeral adapters: read from the server's memory, and freed in every tier when discarded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from adapters_store import LocalStore, MemoryBlob
from loraserve import faults
from loraserve.errors import AdapterCorrupt, AdapterUnavailable
from loraserve.memory.residency.pager import Pager
from loraserve.types import AdapterPart, AdapterRef, Residency, TenantId

MakePager = Callable[..., Pager]


@pytest.fixture
def hold(make: Any, store: LocalStore) -> Iterator[Callable[..., tuple[AdapterRef, MemoryBlob]]]:
    """A function that puts an adapter in memory, and takes it from the store."""
    held: list[MemoryBlob] = []

    def run(*, is_stored: bool = False, **how: Any) -> tuple[AdapterRef, MemoryBlob]:
        ref = make.publish(store, **how)
        blob = MemoryBlob()
        blob.write(store.read(ref.weights_blob))
        memory = blob.seal(bytes(store.read(ref.config_blob)))
        if not is_stored:
            store.delete(ref.weights_blob)
        held.append(blob)
        return msgspec.structs.replace(ref, memory=memory), blob

    yield run
    for blob in held:
        blob.close()


def is_anywhere(pager: Pager, ref: AdapterRef) -> bool:
    return any(row.digest == ref.digest for row in pager.residency())


def test_weights_in_memory_equal_weights_in_store(
    make: Any, store: LocalStore, make_pager: MakePager, hold: Any
) -> None:
    ref, blob = hold(seed=3)
    pager = make_pager()
    pager.request(ref)
    make.settle(pager)
    # what a loader read is its own
    blob.close()
    packed = pager.handle(ref.digest)
    other, stored = make_pager(), make.publish(store, seed=3)
    other.request(stored)
    make.settle(other)
    assert torch.equal(packed.data, other.handle(stored.digest).data)


def test_freed_memory_fails_load_without_corruption_report(make: Any, make_pager: MakePager, hold: Any) -> None:
    ref, blob = hold()
    blob.close()
    pager = make_pager()
    pager.request(ref)
    make.settle(pager)
    error = pager.error(ref.digest)
    assert isinstance(error, AdapterUnavailable)
    assert not isinstance(error, AdapterCorrupt)
    assert pager.take_corruptions() == []


@pytest.mark.parametrize("is_other_stored", [True, False], ids=["stored", "ephemeral"])
def test_identical_adapter_loads_after_first_copy_is_freed(
    make: Any, make_pager: MakePager, hold: Any, is_other_stored: bool
) -> None:
    pager, (first, blob) = make_pager(), hold(is_stored=True)
    other, _ = hold(is_stored=True)
    other = msgspec.structs.replace(other, tenant=TenantId("other"), memory=None if is_other_stored else other.memory)
    assert other.digest == first.digest
    gate = threading.Event()
    with faults.arm("pager.load", lambda: gate.wait(10) and None):
        pager.request(first)
        blob.close()
        pager.request(other)
        gate.set()
        make.settle(pager)
    # neither fails, nor waits for the time after a failure
    assert pager.error(other.digest) is None
    assert pager.request(other) is Residency.RESIDENT


@pytest.mark.parametrize("device_ranks", [4, 100], ids=["in host memory", "on the device"])
def test_a_discarded_adapter_leaves_every_tier(make: Any, make_pager: MakePager, hold: Any, device_ranks: int) -> None:
    pager = make_pager(device_ranks=device_ranks)
    refs = [hold(seed=seed)[0] for seed in range(2)]
    for ref in refs:
        pager.request(ref)
        make.settle(pager)
    pager.poll()
    for ref in refs:
        pager.discard(ref.digest)
    pager.poll()
    assert pager.residency() == []
    assert pager.stats()["device_adapter_bytes"] == pager.stats()["host_adapter_bytes"] == 0


def test_pinned_adapter_is_discarded_after_last_pin(make: Any, make_pager: MakePager, hold: Any) -> None:
    pager, (ref, _) = make_pager(), hold()
    pager.request(ref)
    make.settle(pager)
    pin = pager.pin(ref.digest)
    pager.discard(ref.digest)
    pager.poll()
    assert is_anywhere(pager, ref)
    pin.release()
    pager.poll()
    assert not is_anywhere(pager, ref)


def test_loading_adapter_is_discarded_once_load_ends(make: Any, make_pager: MakePager, hold: Any) -> None:
    pager, (ref, _) = make_pager(), hold()
    gate = threading.Event()
    with faults.arm("pager.load", lambda: gate.wait(10) and None):
        pager.request(ref)
        pager.discard(ref.digest)
        gate.set()
        make.settle(pager)
    pager.poll()
    assert not is_anywhere(pager, ref)


def test_a_request_takes_the_discard_back(make: Any, make_pager: MakePager, hold: Any) -> None:
    pager, (ref, _) = make_pager(), hold()
    pager.request(ref)
    make.settle(pager)
    pin = pager.pin(ref.digest)
    pager.discard(ref.digest)
    assert pager.request(ref) is Residency.RESIDENT
    pin.release()
    pager.poll()
    assert is_anywhere(pager, ref)


def test_a_stored_version_of_the_same_bytes_stays(
    make: Any, store: LocalStore, make_pager: MakePager, hold: Any
) -> None:
    pager, (ref, _) = make_pager(), hold(is_stored=True)
    stored = msgspec.structs.replace(ref, memory=None)
    for one in (stored, ref):
        pager.request(one)
        make.settle(pager)
        # the pin's request is remembered
        assert pager.request(one) is Residency.RESIDENT
    pager.discard(ref.digest)
    pager.poll()
    assert is_anywhere(pager, ref)


def test_sum_is_discarded_with_discarded_part(make: Any, make_pager: MakePager, hold: Any) -> None:
    pager, (ref, _) = make_pager(), hold()
    part = AdapterPart(adapter=ref, weight=0.5)
    total = msgspec.structs.replace(ref, digest=make.digest("sum"), memory=None, parts=(part,))
    pager.request(total)
    make.settle(pager)
    assert pager.request(total) is Residency.RESIDENT
    pager.discard(ref.digest)
    pager.poll()
    assert not is_anywhere(pager, total)
