"""An older program gets its tables back, with all rows that they have a place for."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from loraserve.db import migrate
from loraserve.db.session import Database, make_engine
from loraserve.errors import Conflict, SchemaOutdated
from loraserve.tenancy.identity.auth import Authenticator

VERSION = """INSERT INTO adapter_versions (id, adapter_id, number, digest, config_blob, weights_blob, base_digest,
 size_bytes, rank, target_modules, dtype, state, checks, created_at, created_by)
 VALUES ('v1', 'a1', 1, 'd', 'c', 'w', 'b', 1, 2, '[]', 'float32', 'ready', '[]', '2026-01-01 00:00:00', 'x')"""
FILE = """INSERT INTO files (id, tenant_id, purpose, filename, size, blob, created_at, created_by)
 VALUES ('f1', 't1', 'batch', 'f', 1, 'b', '2026-01-01 00:00:00', 'x')"""
TENANT = "INSERT INTO tenants (id, name, limits, created_at) VALUES ('t1', 'acme', '{}', '2026-01-01 00:00:00')"
ADAPTER = """INSERT INTO adapters (id, tenant_id, name, name_key, last_version, revision, created_at, updated_at)
 VALUES ('a1', 't1', 'sql', 'sql', 1, 1, '2026-01-01 00:00:00', '2026-01-01 00:00:00')"""


async def run(url: str, *statements: str) -> Any:
    engine = make_engine(url)
    try:
        async with engine.begin() as connection:
            for statement in statements:
                found = await connection.execute(text(statement))
            return found.all() if found.returns_rows else None
    finally:
        await engine.dispose()


async def test_every_downgrade_and_upgrade_keeps_rows(database_url: str, subtests: Any) -> None:
    await run(database_url, TENANT, ADAPTER, VERSION)
    for revision in ("0017", "0015", "0014", "0011", "0010", "0009", "0008", "0007", "0006", "0005", "0004"):
        with subtests.test(revision):
            assert await migrate.downgrade(database_url, revision) == revision
            assert await migrate.current(database_url) == revision
            found = await run(database_url, "SELECT id, number, digest, state FROM adapter_versions")
            assert [tuple(row) for row in found] == [("v1", 1, "d", "ready")]
            assert await run(database_url, "SELECT id, name FROM adapters") == [("a1", "sql")]
            await migrate.upgrade(database_url)
            await migrate.check(database_url)
            assert await migrate.differences(database_url) == []


async def test_older_program_treats_no_operator_key_as_admin(database_url: str) -> None:
    database = Database(database_url)
    authenticator = Authenticator(database, admin_key="a" * 32)
    await authenticator.open()
    keys = [
        await authenticator.admin_keys.create(name=role, role=role, actor="x")
        for role in ("admin", "operator:read", "metrics:read")
    ]
    await database.dispose()
    await migrate.downgrade(database_url, "0007")
    found = await run(database_url, "SELECT name FROM api_keys WHERE tenant_id IS NULL AND revoked_at IS NULL")
    assert [row.name for row in found] == ["admin"]
    await migrate.upgrade(database_url)
    database = Database(database_url)
    authenticator = Authenticator(database, admin_key="a" * 32)
    await authenticator.open()
    assert (await authenticator.authenticate(keys[0].secret)).is_admin
    records = (await authenticator.admin_keys.list()).items
    # revoked meanwhile, and with the only role that the older tables know
    assert [(record.role, record.revoked_at is None) for record in records] == [
        ("admin", True),
        ("admin", False),
        ("admin", False),
    ]
    await database.dispose()


async def test_rows_are_lost_only_with_operator_consent(database_url: str) -> None:
    await run(database_url, TENANT, FILE)
    with pytest.raises(Conflict, match="lose 1 rows: files") as caught:
        await migrate.downgrade(database_url, "0005")
    assert "--discard" in str(caught.value.hint)
    # nothing of it was done
    assert await migrate.current(database_url) == migrate.head()
    await migrate.check(database_url)
    await migrate.downgrade(database_url, "0005", is_loss_accepted=True)
    await migrate.upgrade(database_url)
    assert await run(database_url, "SELECT id FROM files") == []


async def test_template_variables_are_lost_only_with_discard(database_url: str) -> None:
    await run(database_url, TENANT, ADAPTER, VERSION, "UPDATE adapter_versions SET chat_template_kwargs = '{}'")
    with pytest.raises(Conflict, match="lose 1 rows: adapter_versions with variables for chat templates"):
        await migrate.downgrade(database_url, "0014")
    await migrate.downgrade(database_url, "0014", is_loss_accepted=True)
    await migrate.upgrade(database_url)
    (row,) = await run(database_url, "SELECT chat_template_kwargs FROM adapter_versions")
    assert row.chat_template_kwargs is None


async def test_tokenizers_are_lost_only_with_discard(database_url: str) -> None:
    own = "UPDATE adapter_versions SET tokenizer_blob = 'd', tokenizer_bytes = 1"
    await run(database_url, TENANT, ADAPTER, VERSION, own)
    with pytest.raises(Conflict, match="lose 1 rows: adapter_versions with tokenizers of their own"):
        await migrate.downgrade(database_url, "0015")
    await migrate.downgrade(database_url, "0015", is_loss_accepted=True)
    await migrate.upgrade(database_url)
    (row,) = await run(database_url, "SELECT tokenizer_blob FROM adapter_versions")
    assert row.tokenizer_blob is None


async def test_evaluations_are_lost_only_with_discard(database_url: str) -> None:
    evaluation = """INSERT INTO evaluations (adapter_id, version, data_sha256, data_name, num_lines, metrics,
 base_metrics, settings, base_digest, arithmetic, created_at, created_by)
 VALUES ('a1', 1, 'd', 'x', 1, '{}', '{}', '{}', 'b', '', '2026-01-01 00:00:00', 'x')"""
    await run(database_url, TENANT, ADAPTER, VERSION, evaluation)
    with pytest.raises(Conflict, match="lose 1 rows: evaluations of versions"):
        await migrate.downgrade(database_url, "0017")
    await migrate.downgrade(database_url, "0017", is_loss_accepted=True)
    await migrate.upgrade(database_url)
    assert await run(database_url, "SELECT version FROM evaluations") == []


async def test_earlier_names_become_own_keys(database_url: str) -> None:
    await run(database_url, TENANT, ADAPTER, VERSION)
    await migrate.downgrade(database_url, "0015")
    await migrate.upgrade(database_url)
    assert await run(database_url, "SELECT name, name_key FROM adapters") == [("sql", "sql")]


@pytest.mark.parametrize("name", ["Policy", "qwen/my-lora", "x:v2", "x" * 64])
async def test_new_names_are_replaced_only_with_discard(database_url: str, name: str) -> None:
    renamed = f"UPDATE adapters SET name = '{name}', name_key = '{name.lower()}'"
    await run(database_url, TENANT, ADAPTER, VERSION, renamed)
    with pytest.raises(Conflict, match="lose 1 rows: adapters whose names have capitals"):
        await migrate.downgrade(database_url, "0015")
    assert await run(database_url, "SELECT name FROM adapters") == [(name,)]
    await migrate.downgrade(database_url, "0015", is_loss_accepted=True)
    assert await run(database_url, "SELECT name FROM adapters") == [("adapter-a1",)]
    assert await run(database_url, "SELECT adapter_id FROM adapter_versions") == [("a1",)]
    await migrate.upgrade(database_url)


async def test_database_refuses_same_name_in_different_case(database_url: str) -> None:
    again = ADAPTER.replace("'a1'", "'a2'").replace("'sql', 'sql'", "'SQL', 'sql'")
    with pytest.raises(IntegrityError):
        await run(database_url, TENANT, ADAPTER, again)


@pytest.mark.parametrize("revision", ["", "0000", "9999", "head", "-1", "base", "0003", "0001", "0018", "x'; --"])
async def test_impossible_downgrade_changes_no_tables(database_url: str, revision: str) -> None:
    if revision == migrate.head():
        assert await migrate.downgrade(database_url, revision) == revision
        return
    with pytest.raises(SchemaOutdated):
        await migrate.downgrade(database_url, revision)
    assert await migrate.current(database_url) == migrate.head()
    await migrate.check(database_url)


async def test_an_empty_database_has_no_way_back(empty_database_url: str) -> None:
    with pytest.raises(SchemaOutdated, match="at revision none"):
        await migrate.downgrade(empty_database_url, "0004")
