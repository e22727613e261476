"""What nobody waits for is read with loaders that nobody needs, into room that nobody holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from loraserve.errors import AdapterUnavailable
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.loading.adapter_metadata import LoadedAdapter
from loraserve.memory.residency.device_cache import DeviceCache
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.load_queue import LoadQueue
from loraserve.memory.residency.loader import LoaderPool, LoadHistory, LoadResult
from loraserve.memory.residency.prefetcher import LOOK_EVERY_S, Prefetcher
from loraserve.types import AdapterRef, Digest, TenantId

A, B, C = Digest("a"), Digest("b"), Digest("c")
NOW_S = 10.0


class Parts:
    """Read-ahead and what it works on: loads don't end,
    and the host has room for two adapters of rank 4.
    """

    def __init__(self, make: Any, num_threads: int = 3) -> None:
        self.make = make
        self.gate = threading.Event()
        self.pool = DeviceCache(CpuDevice(make.base, 100 * make.rank_bytes))
        self.host = HostCache(8 * make.rank_bytes)
        self.line = LoadQueue()
        self.loaders = LoaderPool(num_threads, self.load)
        self.history = LoadHistory(self.pool.device)
        self.ahead = Prefetcher(self.pool, self.host, self.line, self.loaders, self.history)

    def load(self, _: AdapterRef) -> LoadedAdapter:
        assert self.gate.wait(10)
        loaded: LoadedAdapter = self.make.loaded()
        return loaded

    def loaded_before(self, *names: Digest) -> None:
        for name in names:
            self.history.note(LoadResult(self.make.ref(name), self.make.loaded(), 1.0), 0.0)

    def used(self, name: Digest, times: int) -> None:
        self.ahead.note_request(self.make.ref(name))
        for _ in range(times):
            self.pool.popularity.use(name, NOW_S)

    def close(self) -> None:
        self.gate.set()
        self.loaders.close()


@pytest.fixture
def parts(make: Any) -> Iterator[Parts]:
    made = Parts(make)
    yield made
    made.close()


def test_prefetch_spares_last_of_several_loaders(make: Any, parts: Parts) -> None:
    refs = [make.ref(name) for name in (A, B, C)]
    parts.ahead.prefetch(refs, NOW_S)
    assert [ref.digest in parts.loaders for ref in refs] == [True, True, False]
    alone = Parts(make, num_threads=1)
    alone.ahead.prefetch(refs, NOW_S)
    assert len(alone.loaders) == 1
    alone.close()


def test_waiting_resident_or_failed_adapter_is_not_prefetched(make: Any, parts: Parts) -> None:
    parts.line.join(make.ref(A), NOW_S)
    parts.pool.admit(B, make.loaded(), NOW_S)
    parts.history.note(LoadResult(make.ref(C), AdapterUnavailable("gone"), 1.0), NOW_S)
    parts.ahead.prefetch([make.ref(name) for name in (A, B, C)], NOW_S)
    assert len(parts.loaders) == 0


def test_prefetch_uses_only_memory_left_by_held_adapters(make: Any, parts: Parts) -> None:
    parts.loaded_before(A, B)
    parts.host.put(C, make.loaded(), NOW_S, hold=True)
    parts.ahead.prefetch([make.ref(A), make.ref(B)], NOW_S)
    assert [name in parts.loaders for name in (A, B)] == [True, False]


def test_popular_adapter_returns_once_loaders_are_idle(make: Any, parts: Parts) -> None:
    parts.loaded_before(A)
    parts.used(A, 5)
    parts.line.join(make.ref(B), NOW_S)
    parts.ahead.rewarm(NOW_S)
    assert len(parts.loaders) == 0
    parts.line.leave(B)
    parts.loaders.start(make.ref(C), (TenantId("t"),))
    parts.ahead.rewarm(NOW_S)
    assert A not in parts.loaders
    parts.gate.set()
    while not parts.loaders.take():
        pass
    parts.ahead.rewarm(NOW_S)
    assert A in parts.loaders
    assert parts.ahead.num_rewarmed == 1


def test_popular_adapter_evicts_only_far_less_valuable_adapters(make: Any, parts: Parts) -> None:
    parts.loaded_before(A, B, C)
    for name, times in ((A, 10), (B, 6), (C, 6)):
        parts.used(name, times)
    for name in (B, C):
        parts.host.put(name, make.loaded(), NOW_S)
    parts.ahead.rewarm(NOW_S)
    assert len(parts.loaders) == 0
    parts.used(A, 5)
    parts.ahead.rewarm(NOW_S + LOOK_EVERY_S)
    assert A in parts.loaders


def test_forgotten_or_never_loaded_adapter_is_not_rewarmed(parts: Parts) -> None:
    parts.loaded_before(A)
    parts.used(A, 5)
    parts.used(B, 5)
    parts.ahead.forget(A)
    parts.ahead.rewarm(NOW_S)
    assert len(parts.loaders) == 0
