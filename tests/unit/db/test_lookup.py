"""The cache before the database."""

from __future__ import annotations

import asyncio
import gc
import logging
import time

import pytest
from core_clock import scheduled_s
from sqlalchemy import text

from loraserve.api.logs import is_news
from loraserve.db.lookup import LookupCache
from loraserve.db.session import Database
from loraserve.errors import DatabaseUnavailable, ModelNotFound, Overloaded


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


async def test_waiters_for_same_key_share_look_up() -> None:
    cache, source = LookupCache[str, str](ttl_s=5), Source()
    source.gate.clear()
    waiters = [asyncio.create_task(cache.get("k", source.fetch)) for _ in range(5)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    source.gate.set()
    assert await asyncio.gather(*waiters[1:]) == ["a"] * 4
    assert source.num_asked == 1


async def test_answer_read_before_change_is_not_kept() -> None:
    cache, source = LookupCache[str, str](ttl_s=5), Source()
    source.gate.clear()
    early = asyncio.create_task(cache.get("k", source.fetch))
    while not source.num_asked:
        await asyncio.sleep(0)
    source.value = "b"
    cache.forget(lambda key: key == "k")
    source.gate.set()
    assert await cache.get("k", source.fetch) == "b"
    assert await early == "a"
    assert await cache.get("k", source.fetch) == "b"


async def test_database_is_queried_once_a_second_during_outage() -> None:
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


async def test_known_values_need_no_wait_during_outage() -> None:
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


async def test_outage_without_recent_query_may_be_over() -> None:
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


async def test_deleted_row_is_not_answered_from_cache() -> None:
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


async def test_a_busy_event_loop_is_no_silent_database() -> None:
    cache = LookupCache[str, str](ttl_s=2, timeout_s=0.2)
    is_over = False

    async def hog() -> None:
        while not is_over:
            time.sleep(0.1)  # noqa: ASYNC251
            await asyncio.sleep(0)

    async def answered_at_once() -> str:
        for _ in range(6):
            await asyncio.to_thread(str)
        return "a"

    busy = asyncio.create_task(hog())
    try:
        assert await cache.get("k", answered_at_once) == "a"
    finally:
        is_over = True
        await busy


async def test_database_answering_elsewhere_is_waited_for() -> None:
    cache = LookupCache[str, str](ttl_s=2, timeout_s=0.1, silence_s=lambda: 0.0)

    async def queued(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "a"

    assert await cache.get("k", lambda: queued(0.2)) == "a"
    began = scheduled_s()
    with pytest.raises(Overloaded) as refused:
        await cache.get("l", lambda: queued(30))
    assert not isinstance(refused.value, DatabaseUnavailable)
    assert scheduled_s() - began < 5


async def test_connection_timeout_of_busy_database_is_no_outage(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(database_url, busy_timeout_s=0.5)
    num_connections = 8 if database_url.startswith("sqlite") else 10
    num_held, ended = 0, asyncio.Event()

    async def hold() -> None:
        nonlocal num_held
        async with database.read() as session:
            await session.execute(text("SELECT 1"))
            num_held += 1
            await ended.wait()

    # one by one: making a connection has the same half second
    holders = []
    for number in range(num_connections):
        holders.append(asyncio.create_task(hold()))
        while num_held == number:
            await asyncio.sleep(0.001)
    with pytest.raises(Overloaded) as refused:
        async with database.read() as session:
            await session.execute(text("SELECT 1"))
    assert refused.value.code == "overloaded"
    monkeypatch.setattr(database, "silence_s", lambda: 60.0)
    with pytest.raises(DatabaseUnavailable):
        async with database.read() as session:
            await session.execute(text("SELECT 1"))
    ended.set()
    await asyncio.gather(*holders)
    await database.dispose()


async def test_abandoned_look_up_leaves_no_traceback(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    database = Database(database_url)
    slow = {
        "sqlite": (
            "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 200000) SELECT count(*) FROM c"
        ),
        "postgresql": "SELECT pg_sleep(0.3)",
    }
    statement = text(slow[database_url.partition(":")[0]])

    async def fetch() -> str:
        async with database.read() as session:
            return str(await session.scalar(statement))

    cache = LookupCache[int, str](ttl_s=2, timeout_s=0.02, is_cancellable=database.is_cancellable)
    with caplog.at_level(logging.INFO):
        answers = await asyncio.gather(*(cache.get(key, fetch) for key in range(8)), return_exceptions=True)
        waiters = [asyncio.create_task(cache.get(key, fetch)) for key in range(8, 12)]
        await asyncio.sleep(0.005)
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)
        while cache._flights or cache._given_up:
            await asyncio.sleep(0.01)
        await database.dispose()
        gc.collect()
    assert all(isinstance(answer, DatabaseUnavailable) for answer in answers)
    assert [record.getMessage() for record in caplog.records if is_news(record) and record.exc_info] == []


async def test_flood_of_unknown_keys_delays_no_known_key() -> None:
    now = 0.0
    cache = LookupCache[str, str](ttl_s=2, clock=lambda: now)
    gate = asyncio.Event()
    num_asking, most = 0, 0

    async def slow() -> str:
        nonlocal num_asking, most
        num_asking += 1
        most = max(most, num_asking)
        await gate.wait()
        num_asking -= 1
        return "slow"

    async def quick() -> str:
        return "quick"

    assert await cache.get("known", quick, holder="globex") == "quick"
    flood = [asyncio.create_task(cache.get(f"guess {number}", slow, holder="acme")) for number in range(200)]
    await asyncio.sleep(0.02)
    # what is known is asked about anew, and another's new key is found
    now = 10.0
    async with asyncio.timeout(1):
        assert await cache.get("known", quick, holder="globex") == "quick"
        assert await cache.get("new", quick, holder="globex") == "quick"
    gate.set()
    assert set(await asyncio.gather(*flood)) == {"slow"}
    assert most == 2
    assert not cache._unknown_keys._holders, "nothing is kept of who asks no more"


async def test_queued_waiter_is_notified_of_outage() -> None:
    cache, source = LookupCache[str, str](ttl_s=2, timeout_s=0.1), Source()
    source.gate.clear()
    began = scheduled_s()
    async with asyncio.timeout(3):
        answers = await asyncio.gather(
            *(cache.get(f"{number}", source.fetch, holder="acme") for number in range(100)), return_exceptions=True
        )
    assert all(isinstance(answer, DatabaseUnavailable) for answer in answers)
    assert scheduled_s() - began < 1.5
    assert source.num_asked < 10
