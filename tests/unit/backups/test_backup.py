"""A backup holds one state of the rows and every blob that they refer to, verified at a restore."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bucket import bucket_service
from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError

from adapters_store import LocalStore, open_store
from loraserve import faults
from loraserve.backups.folder import BackupFolder
from loraserve.backups.manifest import Manifest
from loraserve.backups.restore import Restore, check_empty_database
from loraserve.backups.table_rows import LEFT_OUT, insert_tables
from loraserve.db import migrate
from loraserve.db.models import Base, Lease
from loraserve.db.session import Database, utc_now
from loraserve.errors import (
    AdapterOfAnotherBase,
    BackupDamaged,
    ConfigError,
    Conflict,
    SchemaOutdated,
    StorageFull,
)
from loraserve.limits import LIMITS
from loraserve.registry.blob_references import all_referenced
from loraserve.registry.catalog.evaluations import MeasuredEvaluation
from loraserve.registry.model_name import Term, parse_model
from loraserve.registry.records import AliasTarget
from loraserve.registry.storage_gc.collector import LEASE, Collector
from loraserve.types import BaseSpec, Digest

from .conftest import Site


@pytest.fixture
def target(tmp_path: Path) -> str:
    """The URL of another, empty database."""
    return f"sqlite:///{tmp_path / 'restored' / 'registry.db'}"


async def rows_of(database: Database) -> dict[str, list[Any]]:
    tables = [table for table in Base.metadata.sorted_tables if table.name not in LEFT_OUT]
    async with database.read_columns() as connection:
        return {
            table.name: [
                tuple(row)
                for row in (await connection.execute(select(*table.columns).order_by(*table.primary_key.columns))).all()
                if not (table.name == "audit" and row.action in ("backup.restore", "store.adopt"))
            ]
            for table in tables
        }


async def fill(site: Site, publish: Any) -> tuple[Any, Any]:
    """Two tenants with versions, a deleted one, aliases and a key; returns the tenants."""
    acme, globex = await site.tenant("acme"), await site.tenant("globex")
    for seed in range(3):
        await publish(site, acme, "sql", seed)
    await publish(site, globex, "french", 7)
    await site.registry.delete_version(acme, "sql", 1, actor="test")
    await site.authenticator.keys.create(acme, name="ci", actor="test")
    measured = MeasuredEvaluation("a" * 64, "data.jsonl", 2, {"exact_match": 0.5}, {}, {"max_tokens": "8"})
    await site.registry.evaluations.put(acme, "sql", 3, measured, actor="test")
    return acme, globex


async def test_restored_registry_equals_backup(
    site: Site, folder: BackupFolder, publish: Any, make_site: Any, target: str, tmp_path: Path
) -> None:
    acme, _ = await fill(site, publish)
    key = await site.authenticator.keys.create(acme, name="a", actor="test")
    made = await site.back_up(folder)
    before = await rows_of(site.database)
    # later changes aren't in it
    await publish(site, acme, "late", 9)
    store = LocalStore(tmp_path / "restored" / "blobs")
    restored = await Restore(folder, folder.manifest(made.manifest.id)).run(target, store, actor="test")
    assert restored.num_damaged == 0
    other = await make_site(target, store)
    assert await rows_of(other.database) == before
    assert (made.manifest.num_blobs, len(set(store.iter_digests()))) == (made.manifest.num_blobs,) * 2
    binding = await other.registry.bind(acme, [Term(parse_model("sql", "base"))], sticky=None)
    assert binding.adapter.version == 3
    store.read(binding.adapter.weights_blob)
    evaluation = (await other.registry.get_version(acme, "sql", 3)).evaluation
    assert evaluation is not None
    assert (evaluation.metrics, evaluation.settings) == ({"exact_match": 0.5}, {"max_tokens": "8"})
    assert (await other.authenticator.authenticate(key.secret)).tenant == acme
    # its numbers go on, its deleted version can be restored, and it says where it came from
    assert (await publish(other, acme, "sql", 20)).version.version == 4
    audit = [(entry.action, entry.target) for entry in (await other.registry.list_audit(None, limit=100)).items]
    assert ("backup.restore", made.manifest.id) in audit
    assert ("backup.create", made.manifest.id) in audit


@pytest.mark.parametrize("name", ["Qwen/My-LoRA", "x:v2"])
async def test_restored_name_is_found_in_any_case(
    site: Site, folder: BackupFolder, publish: Any, make_site: Any, target: str, tmp_path: Path, name: str
) -> None:
    acme = await site.tenant("acme")
    for seed in (1, 2):
        await publish(site, acme, name, seed)
    await site.registry.aliases.set(acme, name, "canary", AliasTarget(1), actor="test")
    made = await site.back_up(folder)
    store = LocalStore(tmp_path / "restored" / "blobs")
    await Restore(folder, folder.manifest(made.manifest.id)).run(target, store, actor="test")
    other = await make_site(target, store)
    for model, version in ((name, 2), (name.upper(), 2), (f"{name.lower()}@canary", 1), (f"{name}@1", 1)):
        binding = await other.registry.bind(acme, [Term(parse_model(model, "base"))], sticky=None)
        assert (binding.adapter.name, binding.adapter.version) == (name, version)
        store.read(binding.adapter.weights_blob)
    # the name isn't free in another case
    with pytest.raises(Conflict, match=re.escape(name)):
        await publish(other, acme, name.upper(), 3)


async def test_backup_contains_no_key_secrets(site: Site, folder: BackupFolder, publish: Any) -> None:
    acme, _ = await fill(site, publish)
    key = await site.authenticator.keys.create(acme, name="a", actor="test")
    await site.back_up(folder)
    for path in folder.path.rglob("*"):
        if path.is_file():
            assert key.secret.encode() not in path.read_bytes()
            assert path.stat().st_mode & 0o077 == 0
    assert folder.path.stat().st_mode & 0o077 == 0


async def test_later_backup_copies_new_blobs_and_repairs_rotten(site: Site, folder: BackupFolder, publish: Any) -> None:
    acme, _ = await fill(site, publish)
    first = await site.back_up(folder)
    assert first.num_copied == first.manifest.num_blobs
    await publish(site, acme, "more", 30)
    version = (await publish(site, acme, "sql", 2)).version
    rotten = folder.store.root / version.weights_blob[:2] / version.weights_blob[2:4] / version.weights_blob
    rotten.chmod(0o600)
    rotten.write_bytes(b"rotten")
    second = await site.back_up(folder)
    # the new weights (its config is another's), and the rotten ones
    assert second.num_copied == 2
    folder.store.read(version.weights_blob)
    assert folder.ids() == [first.manifest.id, second.manifest.id]


async def test_older_backups_are_removed_with_exclusive_blobs(site: Site, folder: BackupFolder, publish: Any) -> None:
    acme, _ = await fill(site, publish)
    first = await site.back_up(folder)
    await site.registry.delete(acme, "sql", actor="test")
    last = await site.back_up(folder, retention=timedelta(0), keep=1)
    assert last.num_removed == 1
    assert folder.ids() == [last.manifest.id]
    assert last.manifest.num_blobs < first.manifest.num_blobs
    assert len(set(folder.store.iter_digests())) == last.manifest.num_blobs + len(last.manifest.blobs_of_rows())
    await Restore(folder, folder.manifest()).verify()


async def test_concurrent_changes_remove_no_blob_from_backup(
    site: Site, folder: BackupFolder, publish: Any, target: str, tmp_path: Path
) -> None:
    acme, _ = await fill(site, publish)
    stop = asyncio.Event()
    collector = Collector(site.database, site.store, site.registry.claim, retention_s=0, grace_s=LIMITS.gc_grace_s)

    async def disturb() -> None:
        seed = 100
        while not stop.is_set():
            seed += 1
            await publish(site, acme, f"d{seed}", seed)
            await site.registry.delete(acme, f"d{seed}", actor="test")
            await collector.collect()
            await asyncio.sleep(0)

    disturbing = asyncio.create_task(disturb())
    try:
        for number in range(4):
            made = await site.back_up(folder, retention=timedelta(0))
            assert made.manifest.num_damaged == 0
            await Restore(folder, folder.manifest(made.manifest.id)).verify()
            url = f"{target}{number}"
            store = LocalStore(tmp_path / f"restored{number}")
            await Restore(folder, folder.manifest(made.manifest.id)).run(url, store, actor="test")
            database = Database(url)
            async with database.read() as session:
                needed = await all_referenced(session, utc_now(), timedelta(0))
            await database.dispose()
            assert needed <= set(store.iter_digests())
    finally:
        stop.set()
        await disturbing


async def test_no_collector_runs_while_blobs_are_copied(site: Site, folder: BackupFolder, publish: Any) -> None:
    await fill(site, publish)
    collector = Collector(site.database, site.store, site.registry.claim, retention_s=0, grace_s=0)
    collected: list[bool] = []
    loop = asyncio.get_running_loop()

    def slow() -> None:
        # the lease is taken beside the first copies
        for _ in range(100):
            if asyncio.run_coroutine_threadsafe(is_held(), loop).result(5):
                break
        collected.append(asyncio.run_coroutine_threadsafe(collector.collect(), loop).result(10))

    async def is_held() -> bool:
        async with site.database.read() as session:
            return await session.scalar(select(Lease.name).where(Lease.name == LEASE)) is not None

    with faults.arm("blob.read", slow):
        await site.back_up(folder)
    assert collected
    assert not any(collected)
    # given back at the end
    assert await collector.collect()


async def test_lost_blob_is_named_without_ending_backup(
    site: Site, folder: BackupFolder, publish: Any, target: str, tmp_path: Path
) -> None:
    acme, _ = await fill(site, publish)
    version = await site.registry.get_version(acme, "sql", 2)
    site.store.delete(version.weights_blob)
    made = await site.back_up(folder)
    assert (made.manifest.num_damaged, made.damaged) == (1, ["acme/sql@2"])
    with pytest.raises(BackupDamaged, match="1 blobs of the backup"):
        await Restore(folder, folder.manifest()).verify()
    store = LocalStore(tmp_path / "restored" / "blobs")
    with pytest.raises(BackupDamaged):
        await Restore(folder, folder.manifest()).run(target, store, actor="x")
    restored = await Restore(folder, folder.manifest(), is_damage_accepted=True).run(target, store, actor="x")
    assert restored.num_damaged == 1
    assert await migrate.current(target) == migrate.head()


async def test_damaged_backup_is_refused_without_changing_database(
    site: Site, folder: BackupFolder, publish: Any, target: str, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    acme, _ = await fill(site, publish)
    made = await site.back_up(folder)
    digests = {
        "weights": (await site.registry.get_version(acme, "sql", 3)).weights_blob,
        "rows": next(table.blob for table in made.manifest.tables if table.name == "adapter_versions"),
        "index": made.manifest.index,
    }
    paths = {which: folder.store.root / digest[:2] / digest[2:4] / digest for which, digest in digests.items()}
    paths["manifest"] = folder.path / f"{made.manifest.id}.json"

    async def attempt(*, is_run: bool, store: LocalStore) -> None:
        restore = Restore(folder, folder.manifest())
        await (restore.run(target, store, actor="x") if is_run else restore.verify())

    for which, what in itertools.product(paths, ("flipped", "cut", "gone")):
        path = paths[which]
        good = path.read_bytes()
        path.chmod(0o600)
        data = bytearray(good)
        data[len(data) // 2] ^= 1
        if what == "gone":
            path.unlink()
        else:
            path.write_bytes(bytes(data) if what == "flipped" else bytes(data[:-3]))
        for is_run in (False, True):
            with subtests.test(which=which, what=what, is_run=is_run):
                with pytest.raises((BackupDamaged, ConfigError)):
                    await attempt(is_run=is_run, store=LocalStore(tmp_path / "stores" / which / what))
                assert not (tmp_path / "restored" / "registry.db").exists()
        path.write_bytes(good)
    # each was whole again
    await attempt(is_run=True, store=LocalStore(tmp_path / "stores" / "whole"))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"format":"x"}', b"\xff" * 10, b"[" * 100_000, b'{"format":"loraserve-backup-1"}' * 2]
)
def test_invalid_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(BackupDamaged):
        Manifest.parse(data, "x.json")


def test_a_newer_format_says_so() -> None:
    with pytest.raises(BackupDamaged, match="loraserve-backup-9"):
        Manifest.parse(b'{"format":"loraserve-backup-9","sha256":"","manifest":{}}', "x.json")


async def test_only_an_empty_target_is_taken(
    site: Site, folder: BackupFolder, publish: Any, target: str, tmp_path: Path, database_url: str, make_site: Any
) -> None:
    await fill(site, publish)
    await site.back_up(folder)
    manifest = folder.manifest()
    store = LocalStore(tmp_path / "restored" / "blobs")
    with pytest.raises(ConfigError, match="database isn't empty"):
        await Restore(folder, manifest).run(database_url, store, actor="x")
    with pytest.raises(ConfigError, match="belongs to a registry"):
        await Restore(folder, manifest).run(target, site.store, actor="x")
    with store.stage() as staged:
        staged.write(b"another's")
        other = staged.commit()
    with pytest.raises(ConfigError, match=other):
        await Restore(folder, manifest).run(target, store, actor="x")
    assert not (tmp_path / "restored" / "registry.db").exists()


async def test_a_newer_backup_is_refused(site: Site, folder: BackupFolder, tmp_path: Path, target: str) -> None:
    await site.back_up(folder)
    newer = msgspec.structs.replace(folder.manifest(), revision="9999")
    with pytest.raises(SchemaOutdated, match="newer loraserve"):
        await Restore(folder, newer).run(target, LocalStore(tmp_path / "restored"), actor="x")


async def test_versions_of_different_base_are_refused_until_verified(
    site: Site,
    folder: BackupFolder,
    publish: Any,
    target: str,
    tmp_path: Path,
    make_site: Any,
    small_base: BaseSpec,
) -> None:
    acme, _ = await fill(site, publish)
    made = await site.back_up(folder)
    assert [(base.digest, base.num_versions) for base in made.manifest.bases] == [(small_base.digest, 3)]
    store = LocalStore(tmp_path / "restored" / "blobs")
    await Restore(folder, made.manifest).run(target, store, actor="test")
    elsewhere = msgspec.structs.replace(small_base, id="org/other", digest=Digest("c" * 64))
    there = await make_site(target, store, elsewhere)
    terms = [Term(parse_model("sql", "base"))]
    with pytest.raises(AdapterOfAnotherBase, match="--rebase"):
        await there.registry.bind(acme, terms, sticky=None)
    await there.registry.certificates.verify(acme, "sql", 3, actor="test", is_rebasing=True)
    assert (await there.registry.bind(acme, terms, sticky=None)).adapter.version == 3


async def test_folder_takes_single_backup_at_once(site: Site, folder: BackupFolder) -> None:
    with folder.locked(), pytest.raises(ConfigError, match="Another backup"):
        await site.back_up(folder)


async def test_full_disk_ends_without_backup(site: Site, folder: BackupFolder, publish: Any) -> None:
    await fill(site, publish)
    with faults.arm("blob.write", "ENOSPC@6"), pytest.raises(StorageFull):
        await site.back_up(folder)
    assert folder.ids() == []
    assert (await site.back_up(folder)).manifest.num_damaged == 0


KILLED = """
import asyncio, json, os, sys
from datetime import timedelta
from pathlib import Path
from adapters_store import LocalStore
from loraserve import faults
from loraserve.backups.backup import Backup
from loraserve.backups.folder import BackupFolder
from loraserve.backups.restore import Restore, check_empty_database
from loraserve.db.session import Database

async def main(what, url, store, folder):
    folder, store = BackupFolder(Path(folder)), LocalStore(Path(store))
    if what == "backup":
        await Backup(Database(url), store, folder, retention=timedelta(days=1)).make(actor="x")
    else:
        await Restore(folder, folder.manifest()).run(url, store, actor="x")

for line in sys.stdin:
    point, action, *words = json.loads(line)
    pid = os.fork()
    if pid == 0:
        with faults.arm(point, action):
            asyncio.run(main(*words))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture
def killed_at() -> Iterator[Callable[..., None]]:
    """A function that runs it and sees it killed; at the fsync of the third blob.

    Each run is a fork of a process that has imported.
    """
    command = [sys.executable, "-P", "-c", KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        given, told = process.stdin, process.stdout

        def run(point: str, *words: object) -> None:
            action = "kill@3" if point == "blob.after_fsync" else "kill"
            given.write(json.dumps([point, action, *map(str, words)]) + "\n")
            given.flush()
            assert int(told.readline()) == -signal.SIGKILL

        yield run


async def test_a_killed_backup_or_restore_is_repeated(
    site: Site,
    folder: BackupFolder,
    publish: Any,
    target: str,
    tmp_path: Path,
    subtests: Any,
    make_site: Any,
    killed_at: Callable[..., None],
) -> None:
    acme, _ = await fill(site, publish)
    for point in ("backup.after_rows", "blob.after_fsync", "backup.before_manifest"):
        with subtests.test(point):
            await asyncio.to_thread(killed_at, point, "backup", site.url, tmp_path / "blobs", folder.path)
            assert folder.ids() == []
    made = await site.back_up(folder)
    assert sorted(path.name for path in folder.path.iterdir()) == [f"{made.manifest.id}.json", "blobs", "lock"]
    for number, point in enumerate(("blob.after_fsync", "restore.before_rows")):
        with subtests.test(point):
            store, to = tmp_path / f"restored{number}", f"{target}{number}"
            await asyncio.to_thread(killed_at, point, "restore", to, store, folder.path)
            await check_empty_database(to)
            await Restore(folder, folder.manifest()).run(to, LocalStore(store), actor="x")
            assert await migrate.current(to) == migrate.head()
    with subtests.test("restore.after_rows"):
        store, to = tmp_path / "restored9", f"{target}9"
        await asyncio.to_thread(killed_at, "restore.after_rows", "restore", to, store, folder.path)
        # all is there but the store's marker, which a server's start then writes
        other = await make_site(to, LocalStore(store))
        assert (await other.registry.get_version(acme, "sql", 3)).version == 3
        assert LocalStore(store).read_marker() is not None


@pytest.mark.postgres
async def test_postgresql_is_restored_to_sqlite_and_back(
    make_site: Any, folder: BackupFolder, publish: Any, make_postgres_url: Any, target: str, tmp_path: Path
) -> None:
    url = await asyncio.to_thread(make_postgres_url)
    await migrate.upgrade(url)
    site = await make_site(url, LocalStore(tmp_path / "blobs"))
    acme, _ = await fill(site, publish)
    first = await site.back_up(folder)
    before = await rows_of(site.database)
    await Restore(folder, first.manifest).run(target, LocalStore(tmp_path / "two"), actor="x")
    lite = await make_site(target, LocalStore(tmp_path / "two"))
    assert await rows_of(lite.database) == before
    second = await lite.back_up(folder)
    back = await asyncio.to_thread(make_postgres_url)
    await Restore(folder, second.manifest).run(back, LocalStore(tmp_path / "three"), actor="x")
    again = await make_site(back, LocalStore(tmp_path / "three"))
    found = await rows_of(again.database)
    del found["audit"], before["audit"]
    assert found == before
    # PostgreSQL's own numbers go on
    assert (await publish(again, acme, "sql", 50)).version.version == 4


async def test_a_bucket_is_backed_up_and_restored(
    make_site: Any,
    folder: BackupFolder,
    publish: Any,
    migrated_sqlite: Path,
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("obstore", reason="needs obstore")
    shutil.copyfile(migrated_sqlite, tmp_path / "registry.db")
    with bucket_service() as service:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        bucket = service.make(f"b{uuid.uuid4().hex[:16]}")
        store = open_store(f"{bucket}/live", spool=tmp_path / "spool")
        site = await make_site(f"sqlite:///{tmp_path / 'registry.db'}", store)
        acme, _ = await fill(site, publish)
        made = await site.back_up(folder)
        assert (made.manifest.num_damaged, (await site.back_up(folder)).num_copied) == (0, 0)
        other = open_store(f"{bucket}/restored", spool=tmp_path / "spool")
        await Restore(folder, made.manifest).run(target, other, actor="x")
        assert set(other.iter_digests()) == set(store.iter_digests())
        there = await make_site(target, other)
        assert (await there.registry.get_version(acme, "sql", 3)).version == 3
        for one in (store, other):
            one.close()


async def test_failed_restore_changes_no_rows(site: Site, folder: BackupFolder, publish: Any, tmp_path: Path) -> None:
    await fill(site, publish)
    made = await site.back_up(folder)
    url = f"sqlite:///{tmp_path / 'half.db'}"
    short = [msgspec.structs.replace(table, num_rows=table.num_rows + 1) for table in made.manifest.tables]

    def insert(connection: Connection) -> None:
        insert_tables(connection, folder.store, short)

    with pytest.raises(BackupDamaged, match="were written"):
        await migrate.fill(url, made.manifest.revision, insert)
    assert await migrate.current(url) is None
    without = [table for table in made.manifest.tables if table.name != "tenants"]
    with pytest.raises((ConfigError, IntegrityError)):
        await migrate.fill(url, made.manifest.revision, lambda one: insert_tables(one, folder.store, without))
    assert await migrate.current(url) is None


async def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holiday\.jpg"):
        BackupFolder(tmp_path, is_made=True)
    with pytest.raises(ConfigError, match="can't be opened"):
        BackupFolder(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no backup"):
        BackupFolder(tmp_path / "new", is_made=True).manifest()
    with pytest.raises(ConfigError, match="no backup"):
        BackupFolder(tmp_path / "new").manifest("../../etc/passwd")
