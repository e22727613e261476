"""Claim of a registry on its store: it works on its own alone, finds out when its database went
back, and takes no other registry's blobs for its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from bucket import BucketService, bucket_service
from sqlalchemy import delete, select

from adapters_store import BlobStore, open_store
from adapters_store.base import MARKER
from loraserve.db.models import AuditRow, GcCandidate, RegistryIdentity, StoreStamp
from loraserve.db.session import Database, utc_now
from loraserve.errors import ConfigError, StorageError, StoreMismatch
from loraserve.registry.blob_references import add_gc_candidates
from loraserve.registry.registry import Registry
from loraserve.registry.storage_gc.collector import Collector
from loraserve.registry.storage_gc.marker import Marker
from loraserve.registry.storage_gc.store_claim import StoreClaim
from loraserve.types import BaseSpec, Digest, TenantId


@pytest.fixture(scope="module")
def service() -> Iterator[BucketService]:
    pytest.importorskip("obstore", reason="needs obstore")
    with bucket_service() as running:
        yield running


@pytest.fixture(params=["directory", "bucket"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "directory":
        return f"file://{tmp_path / 'blobs'}"
    service: BucketService = request.getfixturevalue("service")
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    return service.make("c" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]) + "/prefix"


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[BlobStore]:
    opened = open_store(url, spool=tmp_path / "spool")
    yield opened
    opened.close()


@pytest.fixture
async def other(migrated_sqlite: Path, tmp_path: Path) -> AsyncIterator[Database]:
    """Another, empty, registry."""
    shutil.copyfile(migrated_sqlite, tmp_path / "other.db")
    database = Database(f"sqlite:///{tmp_path / 'other.db'}")
    yield database
    await database.dispose()


@pytest.fixture
def registry(database: Database, store: BlobStore, small_base: BaseSpec) -> Registry:
    return Registry(database, store, lambda: small_base)


Publish = Callable[..., object]


def put(store: BlobStore, data: bytes = b"another's") -> Digest:
    with store.stage() as staged:
        staged.write(data)
        return staged.commit()


def marker_of(store: BlobStore) -> Marker:
    marker = Marker.parse(store.read_marker() or b"")
    assert marker is not None
    return marker


async def identity_of(database: Database) -> str:
    async with database.read() as session:
        return (await session.scalars(select(RegistryIdentity.id))).one()


async def forget_claims(database: Database, store: BlobStore, url: str) -> None:
    """Leave the database and the store as a version left them that knew no markers."""
    async with database.write() as session:
        await session.execute(delete(StoreStamp))
        await session.execute(delete(RegistryIdentity))
    if url.startswith("file:"):
        (Path(url.removeprefix("file://")) / MARKER).unlink()
    else:
        import obstore

        obstore.delete(store._bucket, MARKER)  # type: ignore[attr-defined]


def collector_of(database: Database, store: BlobStore, passed: list[float]) -> Collector:
    claim = StoreClaim(database, store)
    return Collector(database, store, claim, retention_s=0, grace_s=0, monotonic=lambda: passed[-1])


async def test_each_start_renews_stamp_of_claimed_store(database: Database, store: BlobStore) -> None:
    await StoreClaim(database, store).open()
    first = marker_of(store)
    assert first.registry == await identity_of(database)
    await StoreClaim(database, store).open()
    second = marker_of(store)
    assert (second.registry, second.stamp != first.stamp) == (first.registry, True)


async def test_concurrent_servers_of_single_registry_all_claim_store(database: Database, store: BlobStore) -> None:
    claims = [StoreClaim(database, store) for _ in range(8)]
    await asyncio.gather(*(claim.open() for claim in claims))
    assert [claim.problem for claim in claims] == [None] * 8
    assert marker_of(store).registry == await identity_of(database)
    await asyncio.gather(*(claim.renew() for claim in claims), *(claim.look() for claim in claims))


async def test_concurrent_claim_by_two_registries_refuses_loser(
    database: Database, other: Database, store: BlobStore
) -> None:
    results = await asyncio.gather(
        StoreClaim(database, store).open(), StoreClaim(other, store).open(), return_exceptions=True
    )
    assert [type(result) for result in results].count(StoreMismatch) == 1
    winner = (database, other)[[result is None for result in results].index(True)]
    assert marker_of(store).registry == await identity_of(winner)


async def test_unmarked_store_with_blobs_refuses_empty_registry(other: Database, store: BlobStore) -> None:
    blobs = {put(store, b"%d" % number) for number in range(3)}
    with pytest.raises(StoreMismatch, match="has 3 blobs and no marker") as refused:
        await StoreClaim(other, store).open()
    assert isinstance(refused.value, ConfigError)
    assert "loraserve db adopt-store" in str(refused.value)
    passed = [0.0]
    collector = collector_of(other, store, passed)
    for _ in range(3):
        passed.append(passed[-1] + 10_000)
        with pytest.raises(StoreMismatch):
            await collector.collect()
    assert set(store.iter_digests()) == blobs
    assert store.read_marker() is None
    async with other.read() as session:
        assert (await session.scalars(select(GcCandidate))).all() == []


async def test_foreign_registry_is_refused_with_two_identities(
    database: Database, other: Database, store: BlobStore
) -> None:
    await StoreClaim(database, store).open()
    with pytest.raises(StoreMismatch) as refused:
        await StoreClaim(other, store).open()
    for identity in (await identity_of(database), await identity_of(other)):
        assert identity in refused.value.message


@pytest.mark.parametrize("marker", [b"", b"nonsense", b"[]", b"{}", b'{"format": "loraserve-store-2"}', b"x" * 10_000])
async def test_unreadable_marker_is_refused_and_kept(database: Database, store: BlobStore, marker: bytes) -> None:
    assert store.swap_marker(None, marker)
    with pytest.raises(StoreMismatch, match="can't be parsed"):
        await StoreClaim(database, store).open()
    assert (store.read_marker() or b"")[:100] == marker[:100]


@pytest.mark.parametrize("moment", ["before a start", "before a pass"])
async def test_restored_older_database_is_refused_by_store(
    migrated_sqlite: Path, tmp_path: Path, store: BlobStore, moment: str
) -> None:
    """A backup is restored over a store that has blobs which were published since."""
    path, backup = tmp_path / "mine.db", tmp_path / "backup.db"
    shutil.copyfile(migrated_sqlite, path)
    database = Database(f"sqlite:///{path}")
    await StoreClaim(database, store).open()
    await database.dispose()
    shutil.copyfile(path, backup)
    database = Database(f"sqlite:///{path}")
    if moment == "before a start":
        await StoreClaim(database, store).open()
    else:
        assert await collector_of(database, store, [0.0]).collect()
    newer = put(store)
    await database.dispose()
    shutil.copyfile(backup, path)
    database = Database(f"sqlite:///{path}")
    with pytest.raises(StoreMismatch, match="later state of this registry") as refused:
        await StoreClaim(database, store).open()
    assert await identity_of(database) in refused.value.message
    with pytest.raises(StoreMismatch):
        await collector_of(database, store, [1e6]).collect()
    assert list(store.iter_digests()) == [newer]
    await StoreClaim(database, store).adopt(actor="operator")
    await StoreClaim(database, store).open()
    await database.dispose()


async def test_working_database_copy_stops_original(migrated_sqlite: Path, tmp_path: Path, store: BlobStore) -> None:
    shutil.copyfile(migrated_sqlite, tmp_path / "mine.db")
    original = Database(f"sqlite:///{tmp_path / 'mine.db'}")
    claim = StoreClaim(original, store)
    await claim.open()
    await original.dispose()
    shutil.copyfile(tmp_path / "mine.db", tmp_path / "copy.db")
    copy = Database(f"sqlite:///{tmp_path / 'copy.db'}")
    await StoreClaim(copy, store).open()
    with pytest.raises(StoreMismatch):
        await claim.look()
    assert claim.problem is not None
    await original.dispose()
    await copy.dispose()


async def test_missing_marker_of_claimed_store_is_refused(database: Database, store: BlobStore, tmp_path: Path) -> None:
    """An empty folder where the volume isn't mounted is no new store."""
    await StoreClaim(database, store).open()
    empty = open_store(f"file://{tmp_path / 'unmounted'}")
    with pytest.raises(StoreMismatch, match="has no marker, though"):
        await StoreClaim(database, empty).open()
    assert empty.read_marker() is None
    empty.close()


async def test_server_killed_before_first_marker_can_start_again(database: Database, store: BlobStore) -> None:
    async with database.write() as session:
        session.add(StoreStamp(id="0" * 26, made_at=utc_now()))
    await StoreClaim(database, store).open()
    assert marker_of(store).registry == await identity_of(database)


async def test_older_registry_adopts_provably_owned_store(
    database: Database, store: BlobStore, url: str, publish: Publish, registry: Registry
) -> None:
    await registry.claim.open()
    await publish("sql", 0)  # type: ignore[misc]
    await publish("french", 1)  # type: ignore[misc]
    leftover = put(store, b"a piece of an upload that is complete")
    async with database.write() as session:
        await add_gc_candidates(session, [leftover], utc_now())
    await forget_claims(database, store, url)
    await StoreClaim(database, store).open()
    assert marker_of(store).registry == await identity_of(database)
    async with database.read() as session:
        rows = (await session.scalars(select(AuditRow).where(AuditRow.action == "store.adopt"))).all()
    assert [(row.actor, row.detail["num_unknown"]) for row in rows] == [("server", 0)]


async def test_older_registry_does_not_adopt_unknown_blobs(
    database: Database, store: BlobStore, url: str, publish: Publish, registry: Registry
) -> None:
    await registry.claim.open()
    await publish("sql", 0)  # type: ignore[misc]
    await forget_claims(database, store, url)
    foreign = {put(store, b"%d" % number) for number in range(4)}
    with pytest.raises(StoreMismatch, match=r"this registry published 2,.* and doesn't know 4"):
        await StoreClaim(database, store).open()
    # what another collector of an older version has listed proves nothing
    async with database.write() as session:
        await add_gc_candidates(session, foreign, utc_now())
    with pytest.raises(StoreMismatch, match="this registry published 2, has 4 as"):
        await StoreClaim(database, store).open()
    assert store.read_marker() is None


async def test_registry_with_versions_refuses_empty_unmarked_store(
    database: Database, store: BlobStore, url: str, publish: Publish, registry: Registry
) -> None:
    await registry.claim.open()
    await publish("sql", 0)  # type: ignore[misc]
    await forget_claims(database, store, url)
    for digest in list(store.iter_digests()):
        store.delete(digest)
    with pytest.raises(StoreMismatch, match="has no blobs and no marker"):
        await StoreClaim(database, store).open()


async def test_adoption_reports_changes_and_is_recorded(
    database: Database, other: Database, store: BlobStore, publish: Publish, registry: Registry
) -> None:
    await registry.claim.open()
    await publish("sql", 0)  # type: ignore[misc]
    claim = StoreClaim(other, store)
    look = await claim.adopt(actor="operator", is_dry_run=True)
    assert look.marker is not None
    assert look.marker.registry == await identity_of(database) == marker_of(store).registry
    assert (look.is_needed, look.contents.num_blobs, look.contents.num_unknown) == (True, 2, 2)
    await claim.adopt(actor="operator")
    assert marker_of(store).registry == await identity_of(other)
    await claim.open()
    assert not (await claim.adopt(actor="operator")).is_needed
    async with other.read() as session:
        rows = (await session.scalars(select(AuditRow).where(AuditRow.action == "store.adopt"))).all()
    assert [(row.actor, row.detail["marker_of"]) for row in rows] == [("operator", await identity_of(database))]


async def test_lost_store_accepts_no_uploads_and_keeps_blobs(
    database: Database,
    other: Database,
    store: BlobStore,
    registry: Registry,
    publish: Publish,
    acme: TenantId,
) -> None:
    await registry.claim.open()
    await publish("sql", 0)  # type: ignore[misc]
    await StoreClaim(other, store).adopt(actor="operator")
    blobs = set(store.iter_digests())
    with pytest.raises(StoreMismatch):
        await registry.claim.look()
    with pytest.raises(StorageError, match="no longer belongs to this registry"):
        await publish("french", 1)  # type: ignore[misc]
    with pytest.raises(StoreMismatch):
        await collector_of(database, store, [1e6]).collect()
    assert set(store.iter_digests()) == blobs
    await registry.claim.adopt(actor="operator")
    await registry.claim.look()
    await publish("french", 1)  # type: ignore[misc]


async def test_running_server_detects_lost_and_regained_store(
    database: Database, other: Database, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.registry.storage_gc.store_claim._LOOK_S", 0.01)

    async def until(is_refused: bool) -> None:
        async with asyncio.timeout(30):
            while (claim.problem is not None) is not is_refused:
                await asyncio.sleep(0.01)

    claim = StoreClaim(database, store)
    await claim.open()
    claim.start()
    try:
        await StoreClaim(other, store).adopt(actor="operator")
        await until(True)
        await StoreClaim(database, store).adopt(actor="operator")
        await until(False)
    finally:
        await claim.close()


async def test_unreachable_store_accepts_no_upload_until_verified(
    database: Database, store: BlobStore, registry: Registry, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_away() -> bytes:
        raise StorageError("The object store can't be reached.")

    with monkeypatch.context() as away:
        away.setattr(store, "read_marker", is_away)
        await registry.claim.open()
        with pytest.raises(StorageError, match="owner isn't verified yet"):
            await publish("sql", 0)  # type: ignore[misc]
    await registry.claim.look()
    await publish("sql", 0)  # type: ignore[misc]


async def test_store_check_writes_no_marker(database: Database, other: Database, store: BlobStore) -> None:
    assert await StoreClaim(database, store).why_not() is None
    assert store.read_marker() is None
    put(store)
    assert "has 1 blobs and no marker" in str(await StoreClaim(other, store).why_not())
    await StoreClaim(database, store).adopt(actor="operator")
    before = store.read_marker()
    assert await StoreClaim(database, store).why_not() is None
    assert "belongs to registry" in str(await StoreClaim(other, store).why_not())
    assert store.read_marker() == before
    async with other.read() as session:
        assert (await session.scalars(select(RegistryIdentity))).all() == []


async def test_stamps_are_bounded_and_the_markers_is_kept(
    database: Database, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.registry.storage_gc.store_claim._KEPT_STAMPS", 3)
    claim = StoreClaim(database, store)
    for _ in range(6):
        await claim.renew()
    async with database.read() as session:
        stamps = (await session.scalars(select(StoreStamp.id))).all()
    assert len(stamps) <= 4
    assert marker_of(store).stamp in stamps


def test_marker_survives_encoding_round_trip() -> None:
    marker = Marker("01A", "01B", "2026-01-02T03:04:05+00:00")
    assert Marker.parse(marker.encode()) == marker
    assert json.loads(marker.encode())["registry"] == "01A"
