"""Stored responses on SQLite and PostgreSQL: whose they are, how many, for how long, and chains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from ulid import ULID

from loraserve.conversations.stored_responses import ResponseRecord, StoredResponses
from loraserve.db.models import StoredResponseRow
from loraserve.db.session import Database, utc_now
from loraserve.errors import DatabaseUnavailable, InvalidRequest, ResponseNotFound
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.tenants import Tenants
from loraserve.types import TenantId

SMALL = replace(
    LIMITS,
    max_stored_response_bytes=1000,
    max_stored_responses_per_tenant=5,
    max_stored_bytes_per_tenant=3000,
    max_conversation_responses=4,
    max_conversation_bytes=2000,
)


class Clock:
    def __init__(self) -> None:
        self.now = utc_now()

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    yield database
    await database.dispose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(database: Database, clock: Clock) -> AsyncIterator[StoredResponses]:
    store = StoredResponses(database, clock=clock, limits=SMALL)
    yield store
    await store.close()


@pytest.fixture
async def acme(database: Database) -> TenantId:
    return (await Tenants(database, lambda _: None).create("acme", actor="test")).id


@pytest.fixture
async def globex(database: Database) -> TenantId:
    return (await Tenants(database, lambda _: None).create("globex", actor="test")).id


_made = iter(range(10**6))


def make(previous: ResponseRecord | None = None, *, num_bytes: int = 20) -> ResponseRecord:
    """A response of so many bytes, each later than the one before."""
    ident = ULID.from_timestamp(1.7e9 + next(_made))
    answer = b"{}" + b" " * (num_bytes - 4)
    return ResponseRecord(f"resp_{ident}", None if previous is None else previous.id, b"[]", answer)


async def save_chain(store: StoredResponses, tenant: TenantId, length: int, **how: Any) -> list[ResponseRecord]:
    chain: list[ResponseRecord] = []
    for _ in range(length):
        chain.append(make(chain[-1] if chain else None, **how))
        assert await store.save(tenant, chain[-1])
    return chain


async def test_conversation_is_read_from_first_response(store: StoredResponses, acme: TenantId) -> None:
    chain = await save_chain(store, acme, 3)
    assert await store.conversation(acme, chain[2].id) == chain
    assert await store.conversation(acme, chain[0].id) == chain[:1]
    assert await store.get(acme, chain[1].id) == chain[1]
    assert store.num_stored == 3


async def test_foreign_response_reads_like_absent_response(
    store: StoredResponses, acme: TenantId, globex: TenantId
) -> None:
    (theirs,) = await save_chain(store, acme, 1)
    errors = set()
    for ident in (theirs.id, make().id, "resp_x", "", theirs.id.lower(), theirs.id + "\0"):
        for ask in (store.get, store.delete):
            with pytest.raises(ResponseNotFound) as caught:
                await ask(globex, ident)
            errors.add(str(caught.value))
        with pytest.raises(ResponseNotFound) as caught:
            await store.conversation(globex, ident)
        assert caught.value.param == "previous_response_id"
    assert len(errors) == 1
    assert await store.get(acme, theirs.id) == theirs


async def test_previous_response_of_foreign_tenant_is_not_found(
    store: StoredResponses, acme: TenantId, globex: TenantId
) -> None:
    (theirs,) = await save_chain(store, acme, 1)
    mine = make(theirs)
    await store.save(globex, mine)
    with pytest.raises(ResponseNotFound, match="deleted, or its time is over"):
        await store.conversation(globex, mine.id)


async def test_conversation_with_deleted_middle_ends(store: StoredResponses, acme: TenantId) -> None:
    chain = await save_chain(store, acme, 3)
    await store.delete(acme, chain[1].id)
    with pytest.raises(ResponseNotFound) as caught:
        await store.conversation(acme, chain[2].id)
    assert caught.value.param == "previous_response_id"
    with pytest.raises(ResponseNotFound):
        await store.delete(acme, chain[1].id)


@pytest.mark.parametrize("how", [{"length": 5}, {"length": 4, "num_bytes": 600}])
async def test_too_long_a_conversation_is_refused_by_name(
    store: StoredResponses, acme: TenantId, how: dict[str, int]
) -> None:
    chain = await save_chain(store, acme, **how)
    with pytest.raises(InvalidRequest) as caught:
        await store.conversation(acme, chain[-1].id)
    assert caught.value.param == "previous_response_id"
    assert len(await store.conversation(acme, chain[1].id)) == 2


@pytest.mark.parametrize("length", [1, 2, 3])
async def test_a_cycle_in_the_rows_ends(
    database: Database, store: StoredResponses, acme: TenantId, length: int
) -> None:
    chain = await save_chain(store, acme, length)
    row = StoredResponseRow
    async with database.write() as session:
        ends = {"previous_id": chain[-1].id.removeprefix("resp_")}
        await session.execute(update(row).where(row.id == chain[0].id.removeprefix("resp_")).values(**ends))
    with pytest.raises(InvalidRequest, match="more than 4 responses"):
        await asyncio.wait_for(store.conversation(acme, chain[-1].id), 60)


async def test_the_oldest_make_room(store: StoredResponses, acme: TenantId, globex: TenantId) -> None:
    (theirs,) = await save_chain(store, globex, 1)
    many = [make() for _ in range(7)]
    for response in many:
        await store.save(acme, response)
    assert [await is_there(store, acme, response) for response in many] == [False] * 2 + [True] * 5
    large = [make(num_bytes=900) for _ in range(3)]
    for response in large:
        await store.save(acme, response)
    # 3 x 900 bytes of 3000, and the small ones that fit beside them
    assert [await is_there(store, acme, response) for response in (*many, *large)] == [False] * 5 + [True] * 5
    await store.save(acme, make(num_bytes=900))
    assert [await is_there(store, acme, response) for response in (*many, *large)] == [False] * 8 + [True] * 2
    assert await is_there(store, globex, theirs)


async def is_there(store: StoredResponses, tenant: TenantId, response: ResponseRecord) -> bool:
    try:
        return await store.get(tenant, response.id) == response
    except ResponseNotFound:
        return False


async def test_expired_response_is_gone_and_then_swept(
    database: Database, store: StoredResponses, acme: TenantId, clock: Clock
) -> None:
    old, new = make(), make()
    await store.save(acme, old)
    clock.now += timedelta(seconds=LIMITS.response_ttl_s - 1)
    await store.save(acme, new)
    clock.now += timedelta(seconds=1)
    assert not await is_there(store, acme, old)
    with pytest.raises(ResponseNotFound):
        await store.conversation(acme, old.id)
    assert await num_rows(database) == 2
    await store.sweep()
    assert (await num_rows(database), store.num_expired) == (1, 1)
    assert await is_there(store, acme, new)


async def test_stored_responses_are_deleted_with_tenant(
    database: Database, store: StoredResponses, acme: TenantId, globex: TenantId
) -> None:
    await save_chain(store, acme, 2)
    (others,) = await save_chain(store, globex, 1)
    await Tenants(database, lambda _: None).delete("acme", actor="test")
    assert await num_rows(database) == 1
    # an answer that was on its way
    await store.save(acme, make())
    await store.sweep()
    assert await num_rows(database) == 1
    assert await is_there(store, globex, others)


async def num_rows(database: Database) -> int:
    async with database.read() as session:
        return len((await session.scalars(select(StoredResponseRow.id))).all())


async def test_too_long_a_response_is_not_stored(store: StoredResponses, acme: TenantId) -> None:
    large = make(num_bytes=1001)
    assert not await store.save(acme, large)
    assert not await is_there(store, acme, large)
    assert (store.num_stored, store.num_lost) == (0, 1)


async def test_answer_does_not_wait_long_for_slow_database(
    database: Database, acme: TenantId, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = StoredResponses(database, limits=replace(SMALL, store_response_s=0.05))

    @asynccontextmanager
    async def stuck() -> AsyncIterator[None]:
        await asyncio.sleep(60)
        yield

    monkeypatch.setattr(database, "write", stuck)
    assert not await asyncio.wait_for(store.save(acme, make()), 60)
    await store.close()
    assert "takes too long" in caplog.text


async def test_answer_queries_no_unavailable_database(
    database: Database, store: StoredResponses, acme: TenantId, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries = 0

    @asynccontextmanager
    async def away() -> AsyncIterator[None]:
        nonlocal num_tries
        num_tries += 1
        database._has_failed = True
        raise DatabaseUnavailable("The registry's database can't be reached now.")
        yield

    monkeypatch.setattr(database, "write", away)
    assert [await store.save(acme, make()) for _ in range(3)] == [False] * 3
    assert (num_tries, store.num_lost) == (1, 3)


async def test_server_may_store_no_responses(database: Database, store: StoredResponses, acme: TenantId) -> None:
    (before,) = await save_chain(store, acme, 1)
    off = StoredResponses(database, is_storing=False)
    later = make(before)
    assert not await off.save(acme, later)
    assert not await is_there(off, acme, later)
    assert await is_there(off, acme, before)
    assert off.num_lost == 0
