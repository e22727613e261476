from __future__ import annotations

from loraserve.tenant_cache import TenantCache


def test_tenants_key_never_finds_other_tenants_value() -> None:
    cache: TenantCache[int] = TenantCache(100)
    cache.put("a", "key", 1, 10)
    assert cache.get("b", "key") is None
    cache.put("b", "key", 2, 10)
    assert (cache.get("a", "key"), cache.get("b", "key")) == (1, 2)
    cache.drop("b", "key")
    cache.drop("b", "key")
    assert (cache.get("a", "key"), cache.get("b", "key")) == (1, None)
    assert (len(cache), cache.num_bytes) == (1, 10)


def test_largest_tenant_evicts_oldest_value_first() -> None:
    cache: TenantCache[int] = TenantCache(100)
    cache.put("small", "one", 1, 10)
    cache.put("middle", "one", 1, 40)
    for number in range(2):
        cache.put("large", number, number, 25)
    assert cache.num_bytes == 100
    cache.put("small", "two", 2, 20)
    assert [cache.get("small", key) for key in ("one", "two")] == [1, 2]
    assert cache.get("middle", "one") == 1
    assert [cache.get("large", number) for number in range(2)] == [None, 1]
    assert cache.num_bytes == 95


def test_no_tenant_has_more_than_half_even_alone() -> None:
    cache: TenantCache[int] = TenantCache(100)
    for number in range(5):
        cache.put("a", number, number, 20)
    assert [number for number in range(5) if cache.get("a", number) is not None] == [3, 4]
    cache.put("a", "huge", 9, 51)
    assert cache.get("a", "huge") is None
    assert cache.num_bytes == 40


def test_single_tenant_may_fill_cache_with_full_share() -> None:
    cache: TenantCache[int] = TenantCache(3, share=1.0)
    for number in range(4):
        cache.put("a", number, number, 1)
    assert list(cache.items()) == [("a", 1, 1), ("a", 2, 2), ("a", 3, 3)]
    cache.put("b", 0, 9, 1)
    assert list(cache.items()) == [("a", 2, 2), ("a", 3, 3), ("b", 0, 9)]


def test_used_value_survives_eviction_and_can_be_replaced() -> None:
    cache: TenantCache[int] = TenantCache(200)
    cache.put("a", "one", 1, 40)
    cache.put("a", "two", 2, 40)
    assert cache.get("a", "one") == 1
    cache.put("a", "three", 3, 40)
    assert [cache.get("a", key) for key in ("one", "two", "three")] == [1, None, 3]
    cache.put("a", "one", 5, 10)
    assert cache.get("a", "one") == 5
    assert cache.num_bytes == 50
