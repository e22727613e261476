"""Sessions: durable settings, one writer at a time, and outages that say so."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import insert, make_url, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, ProgrammingError, StatementError
from sqlalchemy.ext.asyncio import create_async_engine

from loraserve.db import migrate
from loraserve.db.database_file import DatabaseFile
from loraserve.db.models import Adapter, ServerSecret, Tenant
from loraserve.db.session import Database, make_engine
from loraserve.errors import ConfigError, DatabaseDamaged, DatabaseUnavailable, SchemaOutdated, StorageFull

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


SLOW = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 1000000) SELECT x FROM c ORDER BY -x"


async def test_write_cancelled_within_statement_keeps_no_lock(database: Database) -> None:
    async def write(name: str, ident: str, query: str) -> None:
        async with database.write() as session:
            session.add(make_tenant(name, ident))
            await session.flush()
            await session.execute(text(query))

    # the abandoned cursor is in a circle with its error: it is collected at any time, or late
    gc.disable()
    try:
        for number in range(3):
            writing = asyncio.create_task(write("lost", "A" * 26, SLOW))
            await asyncio.sleep(0.05)
            assert not writing.done()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            assert writing.cancelled()
            # a writer that finds the lock taken waits for five seconds, and fails
            await write(f"kept-{number}", str(number) * 26, "SELECT 1")
    finally:
        gc.enable()
    async with database.read() as session:
        assert list(await session.scalars(select(Tenant.name).order_by(Tenant.name))) == ["kept-0", "kept-1", "kept-2"]


async def test_row_without_parent_is_refused(database: Database) -> None:
    with pytest.raises(IntegrityError):
        async with database.write() as session:
            session.add(
                Adapter(
                    id="x" * 26,
                    tenant_id="y" * 26,
                    name="a",
                    name_key="a",
                    last_version=0,
                    revision=0,
                    created_at=NOW,
                    updated_at=NOW,
                )
            )


async def test_exception_rolls_back_every_change(database: Database) -> None:
    async def fail() -> None:
        async with database.write() as session:
            session.add(make_tenant("acme"))
            await session.flush()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    async with database.read() as session:
        assert (await session.scalars(select(Tenant))).all() == []


async def test_column_connection_sees_single_state(database: Database) -> None:
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


async def test_only_deleted_tenant_frees_name(database: Database) -> None:
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


async def test_full_disk_is_reported_and_writes_no_row(migrated_sqlite: Path, tmp_path: Path) -> None:
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


async def test_own_errors_pass_unchanged(database: Database) -> None:
    with pytest.raises((ProgrammingError, OperationalError), match="no_such_table"):
        async with database.read() as session:
            await session.execute(text("SELECT * FROM no_such_table"))


def damage(path: Path, how: str) -> None:
    """Make the database's file what a broken disk, a failed copy or a careless hand leaves."""
    data = path.read_bytes()
    match how:
        case "foreign":
            path.write_bytes(b"not a database at all" * 1000)
        case "header":
            path.write_bytes(b"\x07" * 100 + data[100:])
        case "cut off":
            path.write_bytes(data[: len(data) // 2])
        case "cut to a page":
            path.write_bytes(data[:4096])
        case "cut within a page":
            # the last page may be an empty index's, whose end has nothing to lose
            with contextlib.closing(sqlite3.connect(path)) as connection, connection:
                connection.execute("CREATE TABLE last (x)")
                connection.executemany("INSERT INTO last VALUES (?)", [(x,) for x in range(5000)])
            path.write_bytes(path.read_bytes()[:-1000])
        case "page":
            path.write_bytes(data[: 3 * 4096] + b"\x55" * 4096 + data[4 * 4096 :])


DAMAGES = ["foreign", "header", "cut off", "cut to a page", "cut within a page", "page"]


@pytest.mark.parametrize("how", DAMAGES)
async def test_damaged_file_is_named_in_single_sentence(tmp_path: Path, migrated_sqlite: Path, how: str) -> None:
    path = tmp_path / "registry.db"
    shutil.copyfile(migrated_sqlite, path)
    damage(path, how)

    async def start() -> None:
        await migrate.upgrade_if_empty(f"sqlite:///{path}")
        await migrate.check(f"sqlite:///{path}")

    with pytest.raises(DatabaseDamaged, match="is damaged, truncated, or no database at all") as found:
        await start()
    assert str(path) in found.value.message
    assert "\n" not in found.value.message


@pytest.mark.parametrize("is_writing", [False, True])
async def test_damage_is_detailed_only_for_operator(
    tmp_path: Path, migrated_sqlite: Path, caplog: pytest.LogCaptureFixture, is_writing: bool
) -> None:
    path = tmp_path / "registry.db"
    shutil.copyfile(migrated_sqlite, path)
    damage(path, "foreign")
    database = Database(f"sqlite:///{path}")
    with pytest.raises(DatabaseDamaged) as found:
        async with database.write() if is_writing else database.read() as session:
            await session.execute(select(Tenant.name))
    await database.dispose()
    assert str(found.value) == "The registry's database is damaged. The server's operator must restore a backup."
    assert "file is not a database" in caplog.text


@pytest.mark.postgres
async def test_a_refused_connection_names_no_user_to_tenants(
    migrated_postgres: str, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(migrated_postgres + "_nope")
    with pytest.raises(DatabaseUnavailable) as found:
        async with database.read() as session:
            await session.execute(select(Tenant.name))
    await database.dispose()
    assert "_nope" not in str(found.value)
    assert "does not exist" in caplog.text


async def test_database_without_table_is_refused(database_url: str) -> None:
    engine = make_engine(database_url)
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE leases RENAME TO kept"))
    with pytest.raises(SchemaOutdated, match="has no table leases"):
        await migrate.check(database_url)
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE kept RENAME TO leases"))
    await migrate.check(database_url)
    await engine.dispose()


async def test_a_database_at_several_revisions_is_refused(database_url: str) -> None:
    engine = make_engine(database_url)
    async with engine.begin() as connection:
        await connection.execute(text("INSERT INTO alembic_version VALUES ('0001')"))
    with pytest.raises(SchemaOutdated, match="several revisions"):
        await migrate.check(database_url)
    async with engine.begin() as connection:
        await connection.execute(text("DELETE FROM alembic_version WHERE version_num = '0001'"))
    await engine.dispose()


async def test_the_log_of_a_linked_file_is_watched(tmp_path: Path, migrated_sqlite: Path) -> None:
    (tmp_path / "disk").mkdir()
    shutil.copyfile(migrated_sqlite, tmp_path / "disk" / "kept.db")
    (tmp_path / "registry.db").symlink_to(tmp_path / "disk" / "kept.db")
    database = Database(f"sqlite:///{tmp_path / 'registry.db'}")
    async with database.write() as session:
        session.add(make_tenant("acme"))
    (tmp_path / "disk" / "kept.db-wal").unlink()
    with pytest.raises(DatabaseUnavailable, match="moved, replaced or deleted"):
        async with database.write() as session:
            session.add(make_tenant("lost", "01J0000000000000000000000B"))
    await database.dispose()


@pytest.mark.parametrize("how", ["renamed", "deleted", "replaced", "folder", "log"])
async def test_removed_database_file_stays_readable_and_refuses_writes(
    tmp_path: Path, migrated_sqlite: Path, how: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path, log, kept = folder / "registry.db", folder / "registry.db-wal", tmp_path / "kept"
    shutil.copyfile(migrated_sqlite, path)
    database = Database(f"sqlite:///{path}")
    async with database.write() as session:
        session.add(make_tenant("acme"))
    assert database.is_available
    moved = {"folder": folder, "log": log}.get(how, path)
    if how == "deleted":
        os.link(path, kept)
        path.unlink()
    else:
        moved.rename(kept)
    if how == "replaced":
        shutil.copyfile(migrated_sqlite, path)
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable, match="moved, replaced or deleted"):
            async with database.write() as session:
                session.add(make_tenant("lost", "01J0000000000000000000000B"))
        assert not database.is_available

    async def names() -> list[str]:
        async with database.read() as session:
            return list((await session.scalars(select(Tenant.name))).all())

    assert await names() == ["acme"]
    async with database.read() as session:
        await session.execute(select(1))
        # a connection that is made meanwhile makes no file, and doesn't look into another's
        with pytest.raises(DatabaseUnavailable):
            await names()
    assert path.exists() is (how in ("replaced", "log"))
    kept.rename(moved)
    async with database.write() as session:
        session.add(make_tenant("globex", "01J0000000000000000000000C"))
    assert database.is_available
    await database.dispose()
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT name FROM tenants ORDER BY name").fetchall()
    connection.close()
    assert [name for (name,) in rows] == ["acme", "globex"]


async def test_write_is_unacknowledged_after_file_removal(tmp_path: Path, migrated_sqlite: Path) -> None:
    path = tmp_path / "registry.db"
    shutil.copyfile(migrated_sqlite, path)
    database = Database(f"sqlite:///{path}")

    async def write() -> None:
        async with database.write() as session:
            session.add(make_tenant("acme"))
            path.rename(tmp_path / "moved.db")

    with pytest.raises(DatabaseUnavailable, match="was moved"):
        await write()
    await database.dispose()


async def test_a_path_with_any_letters_is_opened(tmp_path: Path, migrated_sqlite: Path) -> None:
    path = tmp_path / "a b#c%20d&e=é.db"
    shutil.copyfile(migrated_sqlite, path)
    file = DatabaseFile(path)
    engine = create_async_engine(file.url(make_url("sqlite+aiosqlite:///x")))
    async with engine.connect() as connection:
        assert (await connection.execute(select(Tenant.name))).all() == []
    await engine.dispose()


@pytest.mark.postgres
async def test_missing_database_is_config_error(migrated_postgres: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        await migrate.check(migrated_postgres + "_nope")
