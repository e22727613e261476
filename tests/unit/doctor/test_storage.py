"""Disk, database and files: looked at, never changed."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import sqlite3
import stat
from collections import namedtuple
from pathlib import Path

import pytest

from adapters_store import LocalStore
from loraserve.db.models import Adapter, AdapterVersion, Tenant
from loraserve.db.session import Database, utc_now
from loraserve.doctor.checks import Check, run
from loraserve.doctor.storage import check_bases, check_data_dir, check_database, check_disk, check_files, check_store
from loraserve.limits import GIB, LIMITS, MIB
from loraserve.registry.storage_gc.marker import Marker

Usage = namedtuple("Usage", "total used free")


def one(checks: object) -> Check:
    (check,) = checks  # type: ignore[misc]
    assert isinstance(check, Check)
    return check


def test_data_directory_is_probed_and_left_unchanged(tmp_path: Path) -> None:
    assert one(check_data_dir(tmp_path)).status == "ok"
    assert f"(in {tmp_path})" in one(check_data_dir(tmp_path / "to" / "be")).found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("which", ["file", "folder"])
def test_disk_without_sync_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    sync = os.fsync

    def broken(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) == (which == "folder"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fd)

    monkeypatch.setattr(os, "fsync", broken)
    check = one(check_data_dir(tmp_path))
    assert (check.status, check.found) == ("fail", f"{tmp_path}: Input/output error")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("free", "status"), [(2 * GIB, "ok"), (2 * GIB - 1, "warn"), (256 * MIB, "warn"), (256 * MIB - 1, "fail")]
)
def test_a_disk_needs_room_for_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(4 * GIB, 0, free))
    assert one(check_disk(tmp_path)).status == status


def test_missing_database_is_not_created(tmp_path: Path) -> None:
    check = one(check_database(f"sqlite:///{tmp_path}/registry.db"))
    assert (check.status, "first start" in check.found) == ("ok", True)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_database_is_fine(empty_database_url: str) -> None:
    assert one(check_database(empty_database_url)).status == "ok"


def test_a_current_database_is_fine(database_url: str) -> None:
    check = one(check_database(database_url))
    assert (check.status, check.found[:11]) == ("ok", "at revision")


def test_tables_of_wrong_or_edited_schema_fail(migrated_sqlite: Path, tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    shutil.copyfile(migrated_sqlite, path)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE audit")
    lacking = one(run("database", lambda: check_database(f"sqlite:///{path}")))
    assert (lacking.status, "has no table audit" in lacking.found) == ("fail", True)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'of-the-future'")
    check = one(run("database", lambda: check_database(f"sqlite:///{path}")))
    assert (check.status, "newer loraserve" in check.next) == ("fail", True)


def test_invalid_database_fails(tmp_path: Path) -> None:
    (tmp_path / "registry.db").write_bytes(b"no database at all, but a file of some length" * 100)
    assert one(run("database", lambda: check_database(f"sqlite:///{tmp_path}/registry.db"))).status == "fail"


@pytest.mark.parametrize(
    ("hard", "status"),
    [
        (resource.RLIM_INFINITY, "ok"),
        (LIMITS.max_live_requests + 256, "ok"),
        (LIMITS.max_live_requests + 255, "warn"),
        (255, "fail"),
    ],
)
def test_each_live_request_is_an_open_file(monkeypatch: pytest.MonkeyPatch, hard: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (min(hard, 256), hard))
    assert one(check_files()).status == status


def test_store_of_different_registry_fails_without_claim(tmp_path: Path, migrated_sqlite: Path) -> None:
    shutil.copyfile(migrated_sqlite, tmp_path / "registry.db")
    urls = (f"file://{tmp_path}/blobs", f"sqlite:///{tmp_path}/registry.db")
    assert one(check_store(*urls)).status == "ok"
    assert not (tmp_path / "blobs").exists()
    store = LocalStore(tmp_path / "blobs")
    assert one(check_store(*urls)).status == "ok"
    assert store.read_marker() is None
    store.swap_marker(None, Marker("another", "stamp", "2026-01-01").encode())
    check = one(check_store(*urls))
    assert (check.status, "belongs to registry another" in check.found, "adopt-store" in check.next) == (
        "fail",
        True,
        True,
    )
    store.close()


async def _versions(url: str, digests: list[str]) -> None:
    database = Database(url)
    now = utc_now()
    async with database.write() as session:
        session.add(Tenant(id="t", name="acme", limits={}, created_at=now))
        await session.flush()
        session.add(
            Adapter(
                id="a",
                tenant_id="t",
                name="sql",
                name_key="sql",
                last_version=9,
                revision=1,
                notes="",
                created_at=now,
                updated_at=now,
            )
        )
        await session.flush()
        for number, digest in enumerate(digests, start=1):
            session.add(
                AdapterVersion(
                    id=f"v{number}",
                    adapter_id="a",
                    number=number,
                    digest=f"{number:064x}",
                    config_blob="0" * 64,
                    weights_blob="0" * 64,
                    base_digest=digest,
                    size_bytes=1,
                    rank=1,
                    target_modules=[],
                    dtype="float32",
                    state="ready",
                    checks=[],
                    created_at=now,
                    created_by="test",
                    # the last one is gone
                    deleted_at=now if number == len(digests) else None,
                )
            )
    await database.dispose()


@pytest.mark.parametrize(
    ("digests", "served", "status", "words"),
    [
        ([], None, "ok", "no versions yet"),
        (["a", "a", "b"], None, "ok", "2 of base sha256:aaaaaaaaaaaa"),
        (["a", "b", "b"], None, "warn", "1 of base sha256:aaaaaaaaaaaa, 1 of base sha256:bbbbbbbbbbbb"),
        (["a", "a", "b"], "a", "ok", "2 of base"),
        (["a", "b", "b", "a"], "a", "warn", "2 aren't served"),
        (["a", "a"], "b", "warn", "1 aren't served"),
    ],
)
def test_versions_of_different_base_are_reported(
    tmp_path: Path, migrated_sqlite: Path, digests: list[str], served: str | None, status: str, words: str
) -> None:
    path = tmp_path / "registry.db"
    assert list(check_bases(f"sqlite:///{path}", served)) == []
    shutil.copyfile(migrated_sqlite, path)
    url = f"sqlite:///{path}"
    asyncio.run(_versions(url, [digest * 64 for digest in digests]))
    check = one(check_bases(url, None if served is None else served * 64))
    assert check.status == status
    assert words in check.found
