"""Popular adapters that lost their place come back while loaders have nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from adapters_store import LocalStore
from loraserve.memory.eviction import USE_DECAY_S, Popularity
from loraserve.memory.residency.device_cache import Pin
from loraserve.memory.residency.host_cache import HostCache
from loraserve.memory.residency.pager import Pager
from loraserve.memory.residency.prefetcher import LOOK_EVERY_S, MAX_REFS, HotSet
from loraserve.types import AdapterRef, Digest, Residency, Tier

MakePager = Callable[..., Pager]


def hot_set(make: Any, uses: dict[str, int], tenants: dict[str, str] | None = None) -> HotSet:
    popularity = Popularity()
    made = HotSet(popularity)
    for name, count in uses.items():
        made.note_request(make.ref(name, (tenants or {}).get(name, "t")))
        for _ in range(count):
            popularity.use(Digest(name), 0.0)
    return made


def use(pager: Pager, make: Any, wanted: AdapterRef, times: int = 1) -> None:
    for _ in range(times):
        hold(pager, make, wanted).release()


def hold(pager: Pager, make: Any, wanted: AdapterRef) -> Pin:
    while pager.request(wanted) is not Residency.RESIDENT:
        make.settle(pager)
    return pager.pin(wanted.digest)


def test_most_used_wanted_adapter_comes_first(make: Any) -> None:
    made = hot_set(make, {"a": 1, "b": 3, "c": 2})
    found = made.next(0.0, lambda digest: digest != "b")
    assert found is not None
    assert found.digest == "c"


def test_tenants_have_turns(make: Any) -> None:
    made = hot_set(make, {"a": 9, "b": 8, "c": 7, "d": 1}, {"d": "quiet"})
    gone: set[str] = set()
    for i in range(4):
        found = made.next(i * LOOK_EVERY_S, lambda digest: digest not in gone)
        assert found is not None
        gone.add(found.digest)
        if i == 1:
            assert gone == {"a", "d"}
    assert made.next(9 * LOOK_EVERY_S, lambda digest: digest not in gone) is None


def test_hot_set_looks_only_at_intervals(make: Any) -> None:
    made = hot_set(make, {"a": 1})
    asked: list[str] = []
    for now_s in (0.0, LOOK_EVERY_S / 2, LOOK_EVERY_S):
        made.next(now_s, lambda digest: bool(asked.append(digest)))
    assert asked == ["a", "a"]


def test_of_many_the_longest_unasked_are_forgotten(make: Any) -> None:
    made = hot_set(make, {str(i): 1 for i in range(MAX_REFS + 1)})
    asked: set[str] = set()
    made.next(0.0, lambda digest: bool(asked.add(digest)))
    assert "0" not in asked
    assert len(made._refs) == MAX_REFS


def test_popular_evicted_adapter_is_brought_back(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    pager = make_pager(device_ranks=8, host_ranks=8)
    popular = make.publish(store, seed=1)
    use(pager, make, popular, times=10)
    # a crowd that runs at once leaves it no place on the device, and those after it none in the
    # host's memory
    pins = [hold(pager, make, make.publish(store, seed=seed)) for seed in (2, 3)]
    assert pager.tier(popular.digest) is Tier.HOST
    for seed in range(4, 9):
        pins.pop(0).release()
        pins.append(hold(pager, make, make.publish(store, seed=seed)))
    assert pager.tier(popular.digest) is Tier.DISK
    clock.advance(LOOK_EVERY_S)
    pager.poll()
    assert pager.num_loading == 1
    make.settle(pager)
    assert pager.tier(popular.digest) is Tier.HOST
    assert pager.stats()["adapters_brought_back"] == 1
    assert pager.check() == []


def test_equally_popular_adapter_evicts_no_adapter(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    pager = make_pager(device_ranks=4, host_ranks=4)
    for seed in range(1, 7):
        use(pager, make, make.publish(store, seed=seed))
    for _ in range(10):
        clock.advance(LOOK_EVERY_S)
        assert pager.poll() == []
        assert pager.num_loading == 0


def test_no_adapter_is_brought_back_while_request_waits(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    pager = make_pager(device_ranks=4, host_ranks=8)
    popular = make.publish(store, seed=1)
    use(pager, make, popular, times=10)
    for seed in range(2, 5):
        use(pager, make, make.publish(store, seed=seed))
    pin = hold(pager, make, make.publish(store, seed=9))
    waiting = make.publish(store, seed=10)
    pager.request(waiting)
    make.settle(pager)
    clock.advance(LOOK_EVERY_S)
    assert pager.request(waiting) is Residency.WAITING_FOR_SPACE
    pager.poll()
    assert pager.num_loading == 0
    pin.release()


@pytest.mark.parametrize("look", [lambda cache: list(cache.items()), lambda cache: cache.check()])
def test_looking_at_host_cache_keeps_eviction_order(make: Any, look: Callable[[Any], Any]) -> None:
    one = make.loaded()
    cache = HostCache(2 * one.num_bytes)
    cache.put(Digest("a"), one, 1.0)
    cache.put(Digest("b"), make.loaded(), 2.0)
    cache.touch(Digest("a"), 3.0)
    look(cache)
    cache.put(Digest("c"), make.loaded(), 4.0)
    assert {digest for digest, _ in cache.items()} == {"a", "c"}


def test_forgotten_or_rarely_used_adapter_is_not_chosen(make: Any) -> None:
    made = hot_set(make, {"a": 1, "b": 9})
    made.forget(Digest("b"))
    found = made.next(0.0, lambda _: True)
    assert found is not None
    assert found.digest == "a"
    assert made.next(3 * USE_DECAY_S, lambda _: True) is None


def test_adapter_with_deleted_bytes_is_not_reread_automatically(
    make: Any, store: LocalStore, make_pager: MakePager, clock: Any
) -> None:
    pager = make_pager(device_ranks=4, host_ranks=4)
    gone = make.publish(store, seed=1)
    use(pager, make, gone, times=20)
    pins = [hold(pager, make, make.publish(store, seed=2))]
    pins.pop().release()
    hold(pager, make, make.publish(store, seed=3)).release()
    store.delete(gone.weights_blob)
    for _ in range(200):
        clock.advance(LOOK_EVERY_S)
        pager.poll()
        make.settle(pager)
    assert pager.stats()["adapter_load_failures"] <= 1
