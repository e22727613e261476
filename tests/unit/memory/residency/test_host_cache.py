"""The host cache stays within its bytes, evicts the least recently used, and never what is held."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from loraserve.memory.residency.host_cache import HostCache


def test_the_least_recently_put_goes_first(make: Any) -> None:
    cache = HostCache(8 * make.rank_bytes)
    a, b, c = (make.digest(name) for name in "abc")
    for digest in (a, b, c):
        assert cache.put(digest, make.loaded(4), 0.0)
    assert a not in cache
    assert b in cache
    assert c in cache
    assert (cache.num_bytes, cache.num_evictions) == (8 * make.rank_bytes, 1)


def test_held_adapter_is_never_evicted(make: Any) -> None:
    cache = HostCache(8 * make.rank_bytes)
    a, b, c = (make.digest(name) for name in "abc")
    cache.put(a, make.loaded(4), 0.0)
    cache.hold(a)
    cache.put(b, make.loaded(4), 0.0)
    cache.put(c, make.loaded(4), 0.0)
    assert a in cache
    assert b not in cache
    cache.hold(c)
    assert not cache.put(b, make.loaded(4), 0.0)
    cache.unhold(a)
    assert cache.put(b, make.loaded(4), 0.0)
    assert a not in cache
    assert cache.check() == []


def test_adapter_larger_than_budget_is_not_cached(make: Any) -> None:
    cache = HostCache(4 * make.rank_bytes)
    cache.put(make.digest("a"), make.loaded(4), 0.0)
    assert not cache.put(make.digest("b"), make.loaded(5), 0.0)
    assert make.digest("a") in cache


def test_take_gives_the_very_object_back(make: Any) -> None:
    cache = HostCache(8 * make.rank_bytes)
    adapter = make.loaded(4)
    cache.put(make.digest("a"), adapter, 3.5)
    entry = cache.take(make.digest("a"))
    assert entry is not None
    assert entry.adapter is adapter
    assert entry.last_used_s == 3.5
    assert cache.take(make.digest("a")) is None
    assert cache.num_bytes == 0


_OPS = st.tuples(st.sampled_from(["put", "put_held", "take", "hold", "unhold"]), st.integers(0, 5), st.integers(1, 6))


@settings(max_examples=100, deadline=None)
@given(ops=st.lists(_OPS, max_size=30))
def test_invariants_hold_after_any_operations(ops: list[tuple[str, int, int]], make: Any) -> None:
    cache = HostCache(9 * make.rank_bytes)
    held: set[int] = set()
    for op, name, rank in ops:
        digest = make.digest(name)
        if op in ("put", "put_held") and digest not in cache:
            if cache.put(digest, make.loaded(rank), 0.0, hold=op == "put_held") and op == "put_held":
                held.add(name)
        elif op == "take":
            cache.take(digest)
            held.discard(name)
        elif op == "hold":
            cache.hold(digest)
            held |= {name} & {n for n in (name,) if digest in cache}
        elif op == "unhold":
            cache.unhold(digest)
            held.discard(name)
        assert cache.check() == []
        assert all(make.digest(n) in cache for n in held)
        assert cache.num_held == len(held)
