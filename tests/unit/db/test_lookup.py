"""The cache before the database."""

from __future__ import annotations

import asyncio

import pytest

from loraserve.db.lookup import LookupCache
from loraserve.errors import DatabaseUnavailable, ModelNotFound


class Source:
    """A database of one value, which can be slow or away."""

    def __init__(self) -> None:
        self.value = "a"
        self.num_asked = 0
        self.is_away = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def fetch(self) -> str:
        self.num_asked += 1
        value = self.value
        await self.gate.wait()
        if self.is_away:
            raise DatabaseUnavailable("away")
        return value


async def test_waiters_for_one_key_share_one_look_up() -> None:
    cache, source = LookupCache[str, str](ttl_s=5), Source()
    source.gate.clear()
    waiters = [asyncio.create_task(cache.get("k", source.fetch)) for _ in range(5)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    source.gate.set()
    assert await asyncio.gather(*waiters[1:]) == ["a"] * 4
    assert source.num_asked == 1


async def test_an_answer_from_before_a_change_is_not_kept() -> None:
    cache, source = LookupCache[str, str](ttl_s=5), Source()
    source.gate.clear()
    early = asyncio.create_task(cache.get("k", source.fetch))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    source.value = "b"
    cache.forget(lambda key: key == "k")
    source.gate.set()
    assert await cache.get("k", source.fetch) == "b"
    assert await early == "a"
    assert await cache.get("k", source.fetch) == "b"


async def test_while_away_the_database_is_asked_once_a_second() -> None:
    now = 0.0
    cache, source = LookupCache[str, str](ttl_s=2, clock=lambda: now), Source()
    await cache.get("k", source.fetch)
    source.is_away = True
    now = 10.0
    for _ in range(5):
        assert await cache.get("k", source.fetch) == "a"
    assert source.num_asked == 2
    now = 11.5
    for _ in range(5):
        await cache.get("k", source.fetch)
        await asyncio.sleep(0)
    assert source.num_asked == 3


async def test_while_away_nobody_waits_for_what_is_known() -> None:
    now = 0.0
    cache, source = LookupCache[str, str](ttl_s=2, clock=lambda: now), Source()
    await cache.get("k", source.fetch)
    source.is_away = True
    now = 10.0
    await cache.get("k", source.fetch)
    source.gate.clear()
    now = 11.5
    # nobody opens the gate: an answer comes at once or never
    async with asyncio.timeout(1):
        for _ in range(5):
            assert await cache.get("k", source.fetch) == "a"
            await asyncio.sleep(0)
    source.value, source.is_away = "b", False
    source.gate.set()
    await asyncio.sleep(0.01)
    now = 14.0
    assert await cache.get("k", source.fetch) == "b"


async def test_an_outage_that_nobody_asked_about_of_late_may_be_over() -> None:
    now = 0.0
    cache, source = LookupCache[str, str](ttl_s=2, clock=lambda: now), Source()
    await cache.get("k", source.fetch)
    source.is_away = True
    now = 3.0
    await cache.get("k", source.fetch)
    source.value, source.is_away = "b", False
    now = 30.0
    assert await cache.get("k", source.fetch) == "b"


async def test_a_silent_database_counts_as_away() -> None:
    cache, source = LookupCache[str, str](ttl_s=2, timeout_s=0.01), Source()
    source.gate.clear()
    with pytest.raises(DatabaseUnavailable, match=r"0\.01 s"):
        await cache.get("k", source.fetch)


async def test_what_is_gone_is_not_answered_from_before() -> None:
    now = 0.0
    cache, source = LookupCache[str, str](ttl_s=2, clock=lambda: now), Source()
    await cache.get("k", source.fetch)
    now = 3.0

    async def gone() -> str:
        raise ModelNotFound("gone")

    with pytest.raises(ModelNotFound):
        await cache.get("k", gone)
    source.is_away = True
    with pytest.raises(DatabaseUnavailable):
        await cache.get("k", source.fetch)


async def test_the_least_recently_used_answer_goes_first() -> None:
    cache, source = LookupCache[str, str](ttl_s=5, max_entries=2), Source()
    for key in ("a", "b", "a", "c"):
        await cache.get(key, source.fetch)
    source.num_asked = 0
    await cache.get("a", source.fetch)
    assert source.num_asked == 0
    await cache.get("b", source.fetch)
    assert source.num_asked == 1
