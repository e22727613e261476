"""The migrations make what the models say, once, whole, and refuse what they don't know."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import text

from loraserve.db import migrate
from loraserve.db.session import Database, make_engine
from loraserve.errors import ConfigError, SchemaOutdated
from loraserve.registry.storage_totals import find_differences


async def run(url: str, *statements: str) -> None:
    engine = make_engine(url)
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))
    await engine.dispose()


async def test_models_and_migrations_agree(database_url: str) -> None:
    assert await migrate.differences(database_url) == []


async def test_an_empty_database_is_brought_to_the_head(empty_database_url: str) -> None:
    assert await migrate.current(empty_database_url) is None
    assert await migrate.upgrade_if_empty(empty_database_url) is True
    assert await migrate.current(empty_database_url) == migrate.head()
    await migrate.check(empty_database_url)


async def test_database_with_foreign_tables_is_left_unchanged(database_url: str) -> None:
    await run(database_url, "UPDATE alembic_version SET version_num = '0000'")
    assert await migrate.upgrade_if_empty(database_url) is False


async def test_check_of_an_empty_database_names_the_command(empty_database_url: str) -> None:
    with pytest.raises(SchemaOutdated, match="loraserve db upgrade"):
        await migrate.check(empty_database_url)


async def test_a_newer_database_is_neither_used_nor_changed(database_url: str) -> None:
    await run(database_url, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaOutdated, match="newer loraserve"):
        await migrate.check(database_url)
    with pytest.raises(SchemaOutdated, match="newer loraserve"):
        await migrate.upgrade(database_url)
    assert await migrate.current(database_url) == "9999"


async def test_database_of_foreign_program_is_refused(empty_database_url: str) -> None:
    await run(empty_database_url, "CREATE TABLE invoices (id INTEGER PRIMARY KEY)")
    with pytest.raises(ConfigError, match="invoices"):
        await migrate.upgrade(empty_database_url)


async def test_concurrent_migrations_are_serialized(empty_database_url: str) -> None:
    heads = await asyncio.gather(*(migrate.upgrade(empty_database_url) for _ in range(4)))
    assert heads == [migrate.head()] * 4


async def move(url: str, step: Callable[..., None], revision: str) -> None:
    engine = make_engine(url, enforce_foreign_keys=False)
    async with engine.begin() as connection:
        await connection.run_sync(lambda one: step(migrate.alembic_config(one), revision))
    await engine.dispose()


async def fetch(url: str, statement: str) -> list[tuple[Any, ...]]:
    engine = make_engine(url)
    async with engine.begin() as connection:
        found = await connection.execute(text(statement))
    await engine.dispose()
    return [tuple(row) for row in found]


async def test_usage_before_kept_answers_migrates_each_way(empty_database_url: str) -> None:
    """Older rows have none of the amounts; going back loses these two and nothing else."""

    async def rows(columns: str) -> list[tuple[Any, ...]]:
        return await fetch(empty_database_url, f"SELECT {columns} FROM usage_hours ORDER BY hour")

    insert = (
        "INSERT INTO usage_hours (tenant_id, hour, owner, adapter, version, price, num_requests, prompt_tokens, "
        "cached_tokens, completion_tokens, undelivered_tokens{more}) VALUES "
        "('default', '{hour}', '', 'sql', 1, '', 3, 30, 16, 9, 1{values})"
    )
    await move(empty_database_url, command.upgrade, "0007")
    tenant = (
        "INSERT INTO tenants (id, name, limits, created_at) VALUES ('default', 'acme', '{}', '2026-01-01 00:00:00')"
    )
    await run(empty_database_url, tenant)
    await run(empty_database_url, insert.format(more="", values="", hour="2026-01-01 00:00:00"))
    await move(empty_database_url, command.upgrade, "0008")
    more = ", num_cached_requests, cached_completion_tokens"
    await run(empty_database_url, insert.format(more=more, values=", 2, 6", hour="2026-01-01 01:00:00"))
    assert await rows("completion_tokens" + more) == [(9, 0, 0), (9, 2, 6)]
    await move(empty_database_url, command.downgrade, "0007")
    assert await rows("num_requests, completion_tokens, undelivered_tokens") == [(3, 9, 1)] * 2
    await migrate.upgrade(empty_database_url)
    assert await rows("completion_tokens" + more) == [(9, 0, 0)] * 2
    assert await migrate.differences(empty_database_url) == []


async def test_totals_are_built_from_existing_rows(empty_database_url: str) -> None:
    def insert(table: str, ident: str, at: str = "NULL", **columns: object) -> str:
        columns = {"id": ident, **columns}
        values = ", ".join(f"'{value}'" for value in columns.values())
        return f"INSERT INTO {table} ({', '.join(columns)}, deleted_at) VALUES ({values}, {at})"

    def adapter(ident: str, tenant: str, at: str = "NULL") -> str:
        times = {"created_at": "2026-01-01 00:00:00", "updated_at": "2026-01-01 00:00:00"}
        return insert("adapters", ident, at, tenant_id=tenant, name=ident, last_version=1, revision=1, **times)

    def version(adapter: str, number: int, size: int, at: str = "NULL") -> str:
        blobs = {"digest": f"{adapter}{number}", "config_blob": "c", "weights_blob": "w", "base_digest": "b"}
        words = {"target_modules": "[]", "dtype": "float32", "state": "ready", "checks": "[]", "created_by": "x"}
        numbers = {"number": number, "size_bytes": size, "rank": 1, "created_at": "2026-01-01 00:00:00"}
        return insert("adapter_versions", f"{adapter}-{number}", at, adapter_id=adapter, **blobs, **words, **numbers)

    late, early = "'2026-01-31 23:59:59.999999+00:00'", "'2026-02-01 00:00:00+00:00'"
    if empty_database_url.startswith("sqlite"):
        late, early = late.replace("+00:00", ""), early.replace("+00:00", ".000000")
    await move(empty_database_url, command.upgrade, "0011")
    tenants = [insert("tenants", ident, name=ident, limits="{}", created_at="2026-01-01 00:00:00") for ident in "tuv"]
    await run(
        empty_database_url,
        *tenants,
        adapter("a", "t"),
        version("a", 1, 5_000_000_000),
        version("a", 2, 7, late),
        version("a", 3, 11, early),
        adapter("b", "t", early),
        version("b", 1, 13, early),
        adapter("c", "u"),
    )
    query = "SELECT tenant_id, day, num_adapters, num_bytes FROM storage_totals ORDER BY 1, 2"
    expected = [
        ("t", "", 2, 5_000_000_031),
        ("t", "2026-01-31", 0, 7),
        ("t", "2026-02-01", 1, 24),
        ("u", "", 1, 0),
    ]
    await move(empty_database_url, command.upgrade, "0012")
    assert await fetch(empty_database_url, query) == expected
    database = Database(empty_database_url)
    async with database.read() as session:
        assert await find_differences(session, "") == ([], None)
    await database.dispose()
    # an older program goes on without them
    await migrate.downgrade(empty_database_url, "0011")
    await run(empty_database_url, version("c", 1, 17))
    await migrate.upgrade(empty_database_url)
    assert await fetch(empty_database_url, query) == [*expected[:3], ("u", "", 1, 17)]


KILLED_IN_MIGRATION = """
import asyncio, os, signal, sys
import alembic.op
from loraserve.db import migrate

original, left = alembic.op.create_table, int(sys.argv[2])

def create_table(*args, **kwargs):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return original(*args, **kwargs)

alembic.op.create_table = create_table
asyncio.run(migrate.upgrade(sys.argv[1]))
"""


@pytest.mark.parametrize("tables_made", [0, 3])
def test_kill_during_migration_keeps_old_revision(empty_database_url: str, tables_made: int) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_MIGRATION, empty_database_url, str(tables_made)], check=False, env=os.environ
    )
    assert killed.returncode == -signal.SIGKILL

    async def after() -> None:
        assert await migrate.current(empty_database_url) is None
        assert await migrate.upgrade(empty_database_url) == migrate.head()
        assert await migrate.differences(empty_database_url) == []

    asyncio.run(after())


async def test_created_sqlite_file_is_private(tmp_path: Path) -> None:
    await migrate.upgrade(f"sqlite:///{tmp_path}/new/registry.db")
    assert (tmp_path / "new" / "registry.db").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("url", ["", "mysql://x/y", "sqlite://", "sqlite:///:memory:", "nonsense", "postgresql"])
async def test_an_impossible_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="LORASERVE_DATABASE_URL"):
        Database(url)


async def test_a_password_is_in_no_error() -> None:
    database = Database("postgresql://me:sesame@127.0.0.1:1/x", busy_timeout_s=1)
    with pytest.raises(Exception, match="can't be reached") as caught:
        async with database.read() as session:
            await session.execute(text("SELECT 1"))
    assert "sesame" not in str(caught.value)
    await database.dispose()
