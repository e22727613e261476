from __future__ import annotations

from loraserve.api.version_chat.formats import TenantCache


def test_the_largest_tenant_gives_way_its_oldest_first() -> None:
    cache = TenantCache(100)
    cache.put("small", "a", 1, 10)
    for number in range(5):
        cache.put(number, "b", number, 30)
    assert cache.get("small") == 1
    assert [number for number in range(5) if cache.get(number) is not None] == [2, 3, 4]
    assert cache.num_bytes == 100


def test_a_use_keeps_a_value_and_one_that_is_too_large_is_not_kept() -> None:
    cache = TenantCache(100)
    cache.put("one", "a", 1, 40)
    cache.put("two", "a", 2, 40)
    assert cache.get("one") == 1
    cache.put("three", "a", 3, 40)
    assert (cache.get("one"), cache.get("two"), cache.get("three")) == (1, None, 3)
    cache.put("huge", "b", 4, 101)
    assert cache.get("huge") is None
    assert cache.num_bytes <= 100
    cache.put("one", "a", 5, 10)
    assert cache.get("one") == 5
