"""Disk, database and files: looked at, never changed."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import stat
from collections import namedtuple
from pathlib import Path

import pytest

from loraserve.doctor.checks import Check, run
from loraserve.doctor.storage import check_data_dir, check_database, check_disk, check_files
from loraserve.limits import GIB, LIMITS, MIB

Usage = namedtuple("Usage", "total used free")


def one(checks: object) -> Check:
    (check,) = checks  # type: ignore[misc]
    assert isinstance(check, Check)
    return check


def test_a_data_directory_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    assert one(check_data_dir(tmp_path)).status == "ok"
    assert f"(in {tmp_path})" in one(check_data_dir(tmp_path / "to" / "be")).found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("which", ["file", "folder"])
def test_a_disk_that_does_not_sync_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
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


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    check = one(check_database(f"sqlite:///{tmp_path}/registry.db"))
    assert (check.status, "first start" in check.found) == ("ok", True)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_database_is_fine(empty_database_url: str) -> None:
    assert one(check_database(empty_database_url)).status == "ok"


def test_a_current_database_is_fine(database_url: str) -> None:
    check = one(check_database(database_url))
    assert (check.status, check.found[:11]) == ("ok", "at revision")


def test_tables_of_another_revision_or_changed_by_hand_fail(migrated_sqlite: Path, tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    shutil.copyfile(migrated_sqlite, path)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE audit")
    assert "audit" in one(check_database(f"sqlite:///{path}")).found
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'of-the-future'")
    check = one(run("database", lambda: check_database(f"sqlite:///{path}")))
    assert (check.status, "newer loraserve" in check.next) == ("fail", True)


def test_a_database_that_is_none_fails(tmp_path: Path) -> None:
    (tmp_path / "registry.db").write_bytes(b"no database at all, but a file of some length" * 100)
    assert one(run("database", lambda: check_database(f"sqlite:///{tmp_path}/registry.db"))).status == "fail"


@pytest.mark.parametrize(
    ("soft", "status"),
    [
        (resource.RLIM_INFINITY, "ok"),
        (LIMITS.max_live_requests + 256, "ok"),
        (LIMITS.max_live_requests + 255, "warn"),
        (255, "fail"),
    ],
)
def test_each_live_request_is_an_open_file(monkeypatch: pytest.MonkeyPatch, soft: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, 1 << 20))
    assert one(check_files()).status == status
