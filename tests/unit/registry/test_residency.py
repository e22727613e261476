"""Pages of a tenant's versions: complete, in one order whatever goes meanwhile, and of few rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from loraserve.db.models import OperatorPin
from loraserve.db.paging import encode_cursor
from loraserve.db.session import Database, utc_now
from loraserve.errors import InvalidRequest
from loraserve.registry.registry import Registry
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.residency import OwnedVersion
from loraserve.types import TenantId

COLUMNS = {
    "config_blob": "c" * 64,
    "weights_blob": "d" * 64,
    "base_digest": "b" * 64,
    "rank": 2,
    "target_modules": ["q_proj"],
    "dtype": "float32",
    "state": "ready",
    "checks": [],
}
ACTOR = "test"


async def add(database: Database, tenant: TenantId, sizes: dict[str, int], *, age_s: float = 0.0) -> None:
    """Give each adapter so many versions more, without files."""
    now = utc_now() - timedelta(seconds=age_s)
    async with database.write() as session:
        repository = AdapterRepository(session, tenant)
        for name, count in sizes.items():
            adapter, _ = await repository.adapter_to_publish(name, now)
            for _ in range(count):
                digest = f"{adapter.last_version + 1:064x}"
                await repository.add_version(adapter, now, ACTOR, size_bytes=1, digest=digest, **COLUMNS)


async def delete(registry: Registry, tenant: TenantId, name: str, numbers: Sequence[int]) -> None:
    for number in numbers:
        await registry.delete_version(tenant, name, number, actor=ACTOR)


def named(rows: Sequence[OwnedVersion]) -> list[tuple[str, int]]:
    return [(row.name, row.version) for row in rows]


async def walk(registry: Registry, tenant: TenantId, limit: int) -> list[list[tuple[str, int]]]:
    """Every page."""
    pages: list[list[tuple[str, int]]] = []
    cursor = None
    while not pages or cursor is not None:
        page = await registry.list_owned(tenant, limit=limit, cursor=cursor, digests=None)
        assert {row.tenant for row in page.items} <= {tenant}
        pages.append(named(page.items))
        cursor = page.next_cursor
    return pages


async def test_pages_list_each_live_version_once_in_order(
    database: Database, registry: Registry, acme: TenantId, globex: TenantId, subtests: pytest.Subtests
) -> None:
    sizes = {"trainer": 150, "b.1": 2, "a": 1, "a-b": 9, "zz": 1, "a_b": 3, "m": 61, "n": 60, "none": 4, "gone": 5}
    # neither the order of their making is the list's, nor the numbers of one adapter are together
    for name in sizes:
        await add(database, acme, {name: sizes[name] // 2})
    await add(database, globex, {"trainer": 20, "b": 1, "n": 1})
    for name in reversed(sizes):
        await add(database, acme, {name: sizes[name] - sizes[name] // 2})
    lost = {"none": [1, 2, 3, 4], "trainer": [1, 2, 75, 76, 77, 78, 150], "a-b": [9], "m": [1]}
    for name, numbers in lost.items():
        await delete(registry, acme, name, numbers)
    await registry.delete(acme, "gone", actor=ACTOR)
    # names as the database orders them
    names = [one.name for one in (await registry.list(acme, limit=200)).items]
    expected = [
        (name, number) for name in names for number in range(1, sizes[name] + 1) if number not in lost.get(name, ())
    ]
    for limit in (1, 2, 7, 60, 200):
        with subtests.test(limit=limit):
            pages = await walk(registry, acme, limit)
            assert [one for page in pages for one in page] == expected
            # full ones: also past adapters of which all versions are deleted
            assert [len(page) for page in pages[:-1]] == [limit] * (len(pages) - 1)
            assert 1 <= len(pages[-1]) <= limit


async def test_pages_resume_in_order_despite_version_changes(
    database: Database, registry: Registry, acme: TenantId
) -> None:
    await add(database, acme, {"c": 30, "a": 2, "b": 3, "d": 1, "e": 2, "f": 1})
    shown: list[tuple[str, int]] = []
    cursor: str | None = None

    async def turn() -> list[tuple[str, int]]:
        nonlocal cursor
        page = await registry.list_owned(acme, limit=4, cursor=cursor, digests=None)
        cursor = page.next_cursor
        shown.extend(named(page.items))
        return named(page.items)

    assert await turn() == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    # the version that the cursor names, one before it, and one that is still to come
    await delete(registry, acme, "b", [2])
    await delete(registry, acme, "a", [1])
    await delete(registry, acme, "c", [2])
    assert await turn() == [("b", 3), ("c", 1), ("c", 3), ("c", 4)]
    # one more of an adapter that was passed isn't shown; one of this one is, at its end
    await add(database, acme, {"b": 1, "c": 1})
    await delete(registry, acme, "c", range(5, 30))
    assert await turn() == [("c", 30), ("c", 31), ("d", 1), ("e", 1)]
    # the cursor's adapter goes, and comes back with later numbers than it had
    await registry.delete(acme, "e", actor=ACTOR)
    await add(database, acme, {"e": 2})
    assert await turn() == [("e", 3), ("e", 4), ("f", 1)]
    assert cursor is None
    assert len(shown) == len(set(shown))


async def test_cursor_outlives_deleted_adapter(database: Database, registry: Registry, acme: TenantId) -> None:
    await add(database, acme, {"a": 9, "b": 1})
    page = await registry.list_owned(acme, limit=3, cursor=None, digests=None)
    await registry.delete(acme, "a", actor=ACTOR)
    left = await registry.list_owned(acme, limit=3, cursor=page.next_cursor, digests=None)
    assert (named(left.items), left.next_cursor) == ([("b", 1)], None)


async def test_page_is_full_despite_adapters_without_versions(
    database: Database, registry: Registry, acme: TenantId
) -> None:
    empty = [f"m{number:02d}" for number in range(12)]
    await add(database, acme, {"a": 1, **dict.fromkeys(empty, 1), "z": 2})
    for name in empty:
        await delete(registry, acme, name, [1])
    assert await walk(registry, acme, 2) == [[("a", 1), ("z", 1)], [("z", 2)]]


async def test_operator_pin_shows_on_pinned_version(database: Database, registry: Registry, acme: TenantId) -> None:
    await add(database, acme, {"a": 1, "b": 9})
    async with database.write() as session:
        adapter = await AdapterRepository(session, acme).adapter("b")
        session.add(OperatorPin(adapter_id=adapter.id, version=3, created_at=utc_now(), created_by=ACTOR))
    page = await registry.list_owned(acme, limit=10, cursor=None, digests=None)
    assert [(row.name, row.version) for row in page.items if row.is_pinned] == [("b", 3)]
    everyones = await registry.list_owned(None, limit=10, cursor=None, digests=None)
    assert [(row.name, row.version) for row in everyones.items if row.is_pinned] == [("b", 3)]


@pytest.mark.parametrize(
    "position", ["a", "a ", "a x", "A 1", "a 1 2", "a -1", "a 9999999999", "01J0000000000000000000000"]
)
async def test_cursor_of_other_list_is_refused(registry: Registry, acme: TenantId, position: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await registry.list_owned(acme, limit=10, cursor=encode_cursor(position), digests=None)
    assert caught.value.param == "cursor"


@contextmanager
def recorded() -> Iterator[list[tuple[str, Any]]]:
    """Statements that are sent within the block, with their parameters."""
    found: list[tuple[str, Any]] = []

    def note(_c: Any, _k: Any, statement: str, parameters: Any, _x: Any, _m: bool) -> None:
        found.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def num_steps(path: str, statements: Sequence[tuple[str, Any]]) -> int:
    """Return the instructions that SQLite executes for the statements."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1

    connection = sqlite3.connect(path)
    connection.set_progress_handler(step, 1)
    for statement, parameters in statements:
        connection.execute(statement, parameters).fetchall()
    connection.close()
    return count


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_page_reads_only_listed_versions_of_tenant(
    database: Database, database_url: str, registry: Registry, acme: TenantId, globex: TenantId
) -> None:
    """On PostgreSQL, `tests/benchmarks/test_million.py` counts the rows."""
    limit = 10
    # theirs are before by id
    await add(database, globex, {"theirs": 1000}, age_s=3600.0)
    await add(database, acme, {"a": 2, "trainer": 1000, **{f"x{number}": 2 for number in range(50)}})
    for position in (None, "a 1", "trainer 500", "trainer 1000", "x25 1"):
        cursor = None if position is None else encode_cursor(position)
        with recorded() as statements:
            page = await registry.list_owned(acme, limit=limit, cursor=cursor, digests=None)
        assert len(page.items) == limit
        assert num_steps(database_url.removeprefix("sqlite:///"), statements) < 200 * limit, position
        assert len(statements) <= 7
