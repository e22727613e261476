"""Sessions: durable settings, one writer at a time, and outages that say so."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, ProgrammingError, StatementError

from loraserve.db import migrate
from loraserve.db.models import Adapter, ServerSecret, Tenant
from loraserve.db.session import Database
from loraserve.errors import ConfigError, DatabaseUnavailable, StorageFull

NOW = datetime(2026, 11, 21, 12, 30, 1, 123456, tzinfo=UTC)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    yield database
    await database.dispose()


def make_tenant(name: str, ident: str = "01J0000000000000000000000A") -> Tenant:
    return Tenant(id=ident, name=name, limits={}, created_at=NOW)


async def test_sqlite_connections_are_durable_and_check_foreign_keys(migrated_sqlite: Path) -> None:
    database = Database(f"sqlite:///{migrated_sqlite}")
    async with database.read() as session:
        found = [
            (await session.execute(text(f"PRAGMA {name}"))).scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        ]
    assert found == ["wal", 2, 1, 5000]
    await database.dispose()


async def test_a_row_without_its_parent_is_refused(database: Database) -> None:
    with pytest.raises(IntegrityError):
        async with database.write() as session:
            session.add(
                Adapter(
                    id="x" * 26,
                    tenant_id="y" * 26,
                    name="a",
                    last_version=0,
                    revision=0,
                    created_at=NOW,
                    updated_at=NOW,
                )
            )


async def test_an_exception_leaves_nothing_behind(database: Database) -> None:
    async def fail() -> None:
        async with database.write() as session:
            session.add(make_tenant("acme"))
            await session.flush()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    async with database.read() as session:
        assert (await session.scalars(select(Tenant))).all() == []


async def test_a_connection_for_columns_sees_one_state_and_leaves_nothing_behind(database: Database) -> None:
    async with database.read_columns() as connection:
        assert (await connection.execute(select(Tenant.name))).all() == []
        async with database.write() as session:
            session.add(make_tenant("acme"))
        assert (await connection.execute(select(Tenant.name))).all() == []
    async with database.read_columns() as connection:
        # SQLite takes it for now, PostgreSQL refuses
        with contextlib.suppress(DBAPIError):
            await connection.execute(insert(ServerSecret).values(name="other", value=b"x", created_at=NOW))
    async with database.read_columns() as connection:
        assert (await connection.execute(select(Tenant.name))).scalars().all() == ["acme"]
        assert (await connection.execute(select(ServerSecret.name))).all() == []


async def test_a_deleted_tenants_name_is_free_and_a_live_ones_is_not(database: Database) -> None:
    async with database.write() as session:
        session.add(make_tenant("acme"))
    with pytest.raises(IntegrityError):
        async with database.write() as session:
            session.add(make_tenant("acme", "01J0000000000000000000000B"))
    async with database.write() as session:
        await session.execute(update(Tenant).values(deleted_at=NOW))
        session.add(make_tenant("acme", "01J0000000000000000000000B"))


async def test_instants_come_back_in_utc(database: Database) -> None:
    elsewhere = NOW.astimezone(timezone(timedelta(hours=9)))
    async with database.write() as session:
        session.add(ServerSecret(name="a", value=b"\x00\xff", created_at=elsewhere))
    async with database.read() as session:
        found = (await session.scalars(select(ServerSecret))).one()
    assert found.created_at == NOW
    assert found.created_at.tzinfo is UTC


async def test_a_naive_instant_is_refused(database: Database) -> None:
    with pytest.raises(StatementError, match="naive"):
        async with database.write() as session:
            session.add(ServerSecret(name="a", value=b"", created_at=datetime(2026, 1, 1)))


async def test_concurrent_writers_lose_no_update(database: Database) -> None:
    async with database.write() as session:
        session.add(make_tenant("acme"))

    async def add_one() -> None:
        async with database.write() as session:
            tenant = (await session.scalars(select(Tenant).with_for_update())).one()
            tenant.limits = {"n": tenant.limits.get("n", 0) + 1}

    await asyncio.gather(*(add_one() for _ in range(20)))
    async with database.read() as session:
        assert (await session.scalars(select(Tenant))).one().limits == {"n": 20}


async def test_a_locked_database_refuses_writes_and_still_reads(tmp_path: Path, migrated_sqlite: Path) -> None:
    path = tmp_path / "registry.db"
    shutil.copyfile(migrated_sqlite, path)
    database = Database(f"sqlite:///{path}", busy_timeout_s=0.05)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseUnavailable):
        async with database.write() as session:
            session.add(make_tenant("acme"))
    async with database.read() as session:
        assert (await session.scalars(select(Tenant))).all() == []
    other.execute("ROLLBACK")
    other.close()
    async with database.write() as session:
        session.add(make_tenant("acme"))
    await database.dispose()


async def test_a_full_disk_says_so_and_writes_nothing(migrated_sqlite: Path, tmp_path: Path) -> None:
    shutil.copyfile(migrated_sqlite, tmp_path / "registry.db")
    database = Database(f"sqlite:///{tmp_path / 'registry.db'}")

    async def fill() -> None:
        async with database.write() as session:
            await session.execute(text("PRAGMA max_page_count = 1"))
            session.add(ServerSecret(name="big", value=b"x" * 1_000_000, created_at=NOW))

    with pytest.raises(StorageFull):
        await fill()
    async with database.read() as session:
        assert (await session.scalars(select(ServerSecret))).all() == []
    await database.dispose()


async def test_an_error_of_ours_passes_as_it_is(database: Database) -> None:
    with pytest.raises((ProgrammingError, OperationalError), match="no_such_table"):
        async with database.read() as session:
            await session.execute(text("SELECT * FROM no_such_table"))


async def test_a_file_that_is_no_database_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "registry.db").write_bytes(b"not a database at all" * 1000)
    with pytest.raises(ConfigError, match="isn't a SQLite database"):
        await migrate.check(f"sqlite:///{tmp_path / 'registry.db'}")


@pytest.mark.postgres
async def test_a_database_that_does_not_exist_is_a_config_error(migrated_postgres: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        await migrate.check(migrated_postgres + "_nope")
