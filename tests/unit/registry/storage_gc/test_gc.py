"""What nothing refers to goes, and nothing else; whatever is published meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from sqlalchemy import delete, select

from adapters_store import LocalStore
from loraserve import faults
from loraserve.adapters.extra_files import ExtraFiles
from loraserve.db.leases import LeaseHolder
from loraserve.db.models import AdapterVersion, GcCandidate
from loraserve.db.session import Database, utc_now
from loraserve.errors import Overloaded, StorageError
from loraserve.limits import LIMITS, Limits
from loraserve.registry import blob_references as references
from loraserve.registry.blob_references import add_gc_candidates, referenced, retain
from loraserve.registry.registry import Registry
from loraserve.registry.storage_gc import collector as gc
from loraserve.registry.storage_gc import deletion_locks
from loraserve.registry.storage_gc.collector import Collector
from loraserve.registry.storage_gc.store_claim import StoreClaim
from loraserve.tenancy.identity.auth import Authenticator
from loraserve.text.template_worker import TemplateAnswer
from loraserve.types import BaseSpec, Digest, TenantId

GRACE_S, RETENTION_S = 100.0, 1000.0


@dataclass
class Time:
    """Both clocks, moved by hand."""

    passed_s: float = 0.0
    jumped_s: float = 0.0
    start: Any = field(default_factory=utc_now)

    def now(self) -> Any:
        return self.start + timedelta(seconds=self.passed_s + self.jumped_s)

    def monotonic(self) -> float:
        return self.passed_s


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def registry(database: Database, store: LocalStore, small_base: BaseSpec, time: Time) -> Registry:
    """It goes by the collector's clocks: what it lists is as old as the test says,
    however long the machine took.
    """
    return Registry(database, store, lambda: small_base, clock=time.now, monotonic=time.monotonic)


@pytest.fixture
def collector(database: Database, store: LocalStore, claim: StoreClaim, time: Time) -> Collector:
    return make_collector(database, store, time)


def make_collector(database: Database, store: LocalStore, time: Time) -> Collector:
    return Collector(
        database,
        store,
        StoreClaim(database, store),
        retention_s=RETENTION_S,
        grace_s=GRACE_S,
        clock=time.now,
        monotonic=time.monotonic,
    )


def put(store: LocalStore, data: bytes = b"needless") -> Digest:
    with store.stage() as staged:
        staged.write(data)
        return staged.commit()


async def passes(collector: Collector, time: Time, *after_s: float) -> None:
    for seconds in after_s:
        time.passed_s += seconds
        assert await collector.collect()


async def test_unreferenced_blob_is_deleted_after_grace_period(
    collector: Collector, store: LocalStore, time: Time
) -> None:
    blob = put(store)
    await passes(collector, time, 0, GRACE_S - 1)
    assert store.exists(blob)
    await passes(collector, time, 2)
    assert not store.exists(blob)
    assert (collector.num_blobs, collector.num_bytes) == (1, 8)
    await passes(collector, time, 1)
    assert collector.num_gc_candidates == 0


async def test_pass_renews_lease_and_stops_once_lost(
    collector: Collector, database: Database, store: LocalStore, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "_LISTED_AT_ONCE", 1)
    for number in range(6):
        put(store, b"%d" % number)
    other = LeaseHolder(database, timedelta(hours=1), clock=time.now)
    acquire, num_listed, renewed_after, is_cut_off = collector._lease.acquire, 0, [], False

    async def count(name: str) -> bool:
        renewed_after.append(num_listed)
        if is_cut_off and num_listed:
            # for longer than its lease lasts
            time.passed_s += 200
            assert await other.acquire(name)
        return await acquire(name)

    def list_slowly(_: LocalStore) -> Iterator[Digest]:
        nonlocal num_listed
        for digest in sorted(LocalStore.iter_digests(store)):
            num_listed += 1
            time.passed_s += 11
            yield digest

    monkeypatch.setattr(collector._lease, "acquire", count)
    monkeypatch.setattr(store, "iter_digests", list_slowly.__get__(store))
    assert await collector.collect()
    assert renewed_after == [0, 3, 6]
    # 0: at the start of the next pass
    num_listed, is_cut_off = 0, True
    assert not await collector.collect()
    assert num_listed == 3


async def test_published_blobs_are_kept(
    collector: Collector, store: LocalStore, time: Time, publish: Any, registry: Registry, acme: TenantId
) -> None:
    version = (await publish()).version
    await passes(collector, time, 0, 2 * GRACE_S, 2 * RETENTION_S)
    assert store.exists(version.config_blob)
    assert store.exists(version.weights_blob)


async def test_deleted_versions_bytes_expire_but_row_stays(
    collector: Collector,
    database: Database,
    store: LocalStore,
    time: Time,
    publish: Any,
    registry: Registry,
    acme: TenantId,
) -> None:
    version = (await publish()).version
    other = (await publish(name="other", seed=1)).version
    await registry.delete(acme, "sql", actor="test")
    await passes(collector, time, 0, RETENTION_S - 10)
    assert store.exists(version.weights_blob)
    await passes(collector, time, 20, GRACE_S + 1)
    assert not store.exists(version.weights_blob)
    # both have the same config
    assert store.exists(other.config_blob)
    async with database.read() as session:
        digests = (await session.scalars(select(AdapterVersion.digest))).all()
    assert version.digest in digests


async def test_extra_files_live_as_long_as_version(
    collector: Collector, store: LocalStore, time: Time, publish: Any, registry: Registry, acme: TenantId
) -> None:
    async def inspect(tenant: TenantId, source: str) -> TemplateAnswer:
        return TemplateAnswer()

    registry.inspector.inspect_template = inspect
    extras = ExtraFiles(chat_template=b"x", generation_config=b"{}")
    version = (await publish(extras=extras)).version
    blobs = [file.blob for file in version.extras.files]
    assert len(blobs) == 2
    await passes(collector, time, 0, 2 * GRACE_S, 2 * RETENTION_S)
    assert all(map(store.exists, blobs))
    await registry.delete(acme, "sql", actor="test")
    await passes(collector, time, 1, RETENTION_S - 10)
    await registry.restorer.restore(acme, "sql", actor="test")
    await passes(collector, time, 20, 2 * GRACE_S)
    assert all(map(store.exists, blobs))
    assert (await registry.get_version(acme, "sql", 1)).extras == version.extras
    await registry.delete(acme, "sql", actor="test")
    await passes(collector, time, 1, RETENTION_S + 1, GRACE_S + 1)
    assert not any(map(store.exists, blobs))


async def test_deleted_tenants_bytes_expire_after_retention(
    collector: Collector, database: Database, store: LocalStore, time: Time, publish: Any, globex: TenantId
) -> None:
    version = (await publish(tenant=globex)).version
    authenticator = Authenticator(database, admin_key="a" * 32, clock=time.now)
    await authenticator.open()
    await authenticator.tenants.delete("globex", actor="test")
    await passes(collector, time, 0, RETENTION_S - 10, 1)
    assert store.exists(version.weights_blob)
    await passes(collector, time, 20, GRACE_S + 1)
    assert list(store.iter_digests()) == []


async def test_bytes_referenced_by_other_tenant_are_kept(
    collector: Collector,
    store: LocalStore,
    time: Time,
    publish: Any,
    registry: Registry,
    acme: TenantId,
    globex: TenantId,
) -> None:
    version = (await publish()).version
    await publish(tenant=globex)
    await registry.delete(acme, "sql", actor="test")
    await passes(collector, time, RETENTION_S + 1, GRACE_S + 1)
    assert store.exists(version.weights_blob)


async def test_publishing_takes_a_blob_off_the_list(
    collector: Collector, database: Database, store: LocalStore, time: Time, publish: Any, make_upload: Any
) -> None:
    blob = put(store, make_upload()[1])
    await passes(collector, time, 0)
    await publish()
    async with database.read() as session:
        assert (await session.scalars(select(GcCandidate.digest))).all() == []
    await passes(collector, time, GRACE_S + 1)
    assert store.exists(blob)


async def test_unexpected_reference_is_found_before_deletion(
    collector: Collector, database: Database, store: LocalStore, time: Time, publish: Any
) -> None:
    version = (await publish()).version
    async with database.write() as session:
        await add_gc_candidates(session, [version.weights_blob], time.now())
    await passes(collector, time, 0, GRACE_S + 1)
    assert store.exists(version.weights_blob)
    await passes(collector, time, 1)
    assert collector.num_gc_candidates == 0


async def test_retain_waits_for_deletion_and_finds_blob_gone(
    collector: Collector, database: Database, store: LocalStore, time: Time
) -> None:
    blob = put(store)
    await passes(collector, time, 0)
    time.passed_s += GRACE_S + 1
    began, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        may_end.wait(10)

    with faults.arm("blob.delete", wait):
        collecting = asyncio.create_task(collector.collect())
        await asyncio.to_thread(began.wait, 10)
        keeping = asyncio.create_task(retain(database, [blob]))
        await asyncio.sleep(0.1)
        assert not keeping.done()
        may_end.set()
        await keeping
    assert not store.exists(blob)
    await collecting


async def sever(url: str) -> None:
    """Every connection to the database breaks, where it is one that can."""
    if url.startswith("postgres"):
        connection = await asyncpg.connect(url)
        others = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await connection.execute(others)
        await connection.close()


async def test_deletion_is_awaited_after_collector_connection_breaks(
    collector: Collector, database: Database, database_url: str, store: LocalStore, time: Time
) -> None:
    blobs = [put(store, bytes([number])) for number in range(3)]
    await passes(collector, time, 0)
    time.passed_s += GRACE_S + 1
    began, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        may_end.wait(10)

    with faults.arm("blob.delete", wait):
        collecting = asyncio.create_task(collector.collect())
        await asyncio.to_thread(began.wait, 10)
        await sever(database_url)
        keeping = asyncio.create_task(retain(database, blobs))
        await asyncio.sleep(0.3)
        # else its bytes would be written, or found to be there, and deleted afterwards
        assert not keeping.done()
        may_end.set()
        await keeping
    assert list(store.iter_digests()) == []
    await collecting


async def test_no_transaction_is_open_while_blobs_are_deleted(
    collector: Collector, database: Database, store: LocalStore, time: Time
) -> None:
    put(store)
    await passes(collector, time, 0)
    loop = asyncio.get_running_loop()

    async def write() -> None:
        async with asyncio.timeout(2), database.write() as session:
            await add_gc_candidates(session, [Digest("0" * 64)], time.now())

    with faults.arm("blob.delete", lambda: asyncio.run_coroutine_threadsafe(write(), loop).result(5)):
        await passes(collector, time, GRACE_S + 1)
    assert collector.num_blobs == 1


async def test_dead_collectors_blobs_are_refused_until_mark_expires(
    collector: Collector, database: Database, store: LocalStore, time: Time, impatient: None
) -> None:
    blob, others = put(store), make_collector(database, store, time).locks
    await passes(collector, time, 0)
    with faults.arm("blob.delete", die), pytest.raises(RuntimeError):
        await passes(collector, time, GRACE_S + 1)
    time.jumped_s += 86_400
    for after_s in (0, LIMITS.gc_mark_s - 1):
        time.passed_s += after_s
        assert await others.release() == 0
        with pytest.raises(Overloaded, match="garbage is being collected"):
            await retain(database, [blob])
    time.passed_s += 1
    assert await others.release() == 1
    await retain(database, [blob])
    assert await listed(database) == {}
    assert store.exists(blob)


async def test_dead_collectors_blobs_are_deleted_by_other_collector(
    collector: Collector, database: Database, store: LocalStore, time: Time
) -> None:
    blob, other = put(store), make_collector(database, store, time)
    await passes(collector, time, 0)
    with faults.arm("blob.delete", die), pytest.raises(RuntimeError):
        await passes(collector, time, GRACE_S + 1)
    # before its mark is over nobody touches it
    await passes(other, time, 121, GRACE_S + 1)
    assert store.exists(blob)
    await other.locks.release()
    await passes(other, time, LIMITS.gc_mark_s)
    assert await other.locks.release() == 1
    await passes(other, time, 1)
    assert not store.exists(blob)
    assert await listed(database) == {}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long."""
    monkeypatch.setattr(references, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(references, "_LOOK_S", 0.01)


async def listed(database: Database) -> dict[str, bool]:
    """Blobs on the list, and whether they are marked."""
    async with database.read() as session:
        rows = (await session.execute(select(GcCandidate.digest, GcCandidate.deleting_at))).all()
    return {digest: deleting_at is not None for digest, deleting_at in rows}


def die() -> None:
    raise RuntimeError("killed")


async def test_living_collector_clears_leftover_mark_immediately(
    collector: Collector, database: Database, store: LocalStore, time: Time
) -> None:
    blob = put(store)
    await passes(collector, time, 0)
    with faults.arm("gc.after_delete", die), pytest.raises(RuntimeError):
        await passes(collector, time, GRACE_S + 1)
    assert await listed(database) == {blob: True}
    assert await collector.locks.release() == 1
    assert await listed(database) == {blob: False}
    assert await collector.locks.release() == 0
    # nothing is remembered of it
    assert not collector.locks._unreleased
    await passes(collector, time, 1)
    assert await listed(database) == {}


async def test_server_keeps_mark_during_deletion(collector: Collector, store: LocalStore, time: Time) -> None:
    put(store)
    await passes(collector, time, 0)
    loop, released = asyncio.get_running_loop(), []

    def look() -> None:
        for after_s in (0, LIMITS.gc_mark_s + 1):
            time.passed_s += after_s
            released.append(asyncio.run_coroutine_threadsafe(collector.locks.release(), loop).result(5))

    with faults.arm("blob.delete", look):
        await passes(collector, time, GRACE_S + 1)
    assert released == [0, 0]


@pytest.mark.parametrize(
    ("passed_s", "jumped_s"),
    [(deletion_locks.DELETING_S, 0.0), (0.0, deletion_locks.DELETING_S), (0.0, -1.0)],
    ids=["a slow process", "a machine that was paused", "a clock that was set back"],
)
async def test_long_stopped_collector_deletes_no_blob(
    collector: Collector,
    database: Database,
    store: LocalStore,
    time: Time,
    monkeypatch: pytest.MonkeyPatch,
    passed_s: float,
    jumped_s: float,
) -> None:
    blob = put(store)
    await passes(collector, time, 0)
    num_bytes = store.num_bytes

    def stop(digest: str) -> int:
        time.passed_s += passed_s
        time.jumped_s += jumped_s
        return num_bytes(digest)

    with monkeypatch.context() as stopped:
        stopped.setattr(store, "num_bytes", stop)
        await passes(collector, time, GRACE_S + 1)
    assert store.exists(blob)
    assert await listed(database) == {blob: False}


async def test_servers_clear_leftover_marks(
    collector: Collector, database: Database, store: LocalStore, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(Limits(), gc_interval_s=0.001, gc_mark_s=0.0)
    monkeypatch.setattr(deletion_locks, "LIMITS", limits)
    monkeypatch.setattr(gc, "LIMITS", replace(limits, gc_interval_s=3600.0))
    blob = put(store)
    async with database.write() as session:
        session.add(GcCandidate(digest=blob, listed_at=time.now(), deleting_at=time.now()))
    collector.start()
    async with asyncio.timeout(5):
        while (await listed(database))[blob]:
            await asyncio.sleep(0.001)
        await collector.close()


async def test_waiting_for_mark_does_not_block_writers(
    database: Database, store: LocalStore, time: Time, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob, num_writes = put(store), 0
    async with database.write() as session:
        session.add(GcCandidate(digest=blob, listed_at=time.now(), deleting_at=time.now()))
    write = database.write

    @asynccontextmanager
    async def count() -> AsyncIterator[Any]:
        nonlocal num_writes
        num_writes += 1
        async with write() as session:
            yield session

    monkeypatch.setattr(database, "write", count)
    with pytest.raises(Overloaded):
        await retain(database, [blob])
    assert num_writes == 0


async def test_mark_set_after_check_is_respected(
    database: Database, store: LocalStore, time: Time, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = sorted((put(store, b"a"), put(store, b"b")))
    async with database.write() as session:
        session.add(GcCandidate(digest=blobs[0], listed_at=time.now(), deleting_at=None))
        session.add(GcCandidate(digest=blobs[1], listed_at=time.now(), deleting_at=time.now()))

    async def look(*_: Any) -> bool:
        return False

    monkeypatch.setattr(references, "_is_any_locked", look)
    with pytest.raises(Overloaded):
        await retain(database, blobs)
    assert await listed(database) == {blobs[0]: False, blobs[1]: True}


async def test_clearing_mark_and_retaining_blobs_do_not_deadlock(
    database: Database, time: Time, database_url: str
) -> None:
    if not database_url.startswith("postgres"):
        pytest.skip("SQLite has one writer")
    first, second = sorted(Digest(f"{number:064x}") for number in range(2))
    # the other way round, where rows are found as they lie
    for digest in (second, first):
        async with database.write() as session:
            await add_gc_candidates(session, [digest], time.now())
    locks = deletion_locks.DeletionLocks(database, monotonic=time.monotonic)

    async def delete() -> None:
        async with locks.hold([first, second], time.now(), grace=timedelta(), retention=timedelta()):
            marked.set()
            await may_end.wait()

    marked, may_end = asyncio.Event(), asyncio.Event()
    deleting = asyncio.create_task(delete())
    await marked.wait()
    async with asyncio.timeout(10):
        async with database.write() as session:
            for digest in (first, second):
                await session.execute(select(GcCandidate).where(GcCandidate.digest == digest).with_for_update())
                may_end.set()
                await asyncio.sleep(0.3)
        await deleting
    assert await listed(database) == {first: False, second: False}


async def test_blobs_being_deleted_cannot_be_published_or_restored(
    database: Database, store: LocalStore, time: Time, registry: Registry, acme: TenantId, publish: Any, impatient: None
) -> None:
    version = (await publish(is_promoting=False)).version
    await registry.delete_version(acme, "sql", 1, actor="test")
    uploads, data = registry.uploads.resumable, bytes(range(20))
    upload, _ = await uploads.create(acme, hashlib.sha256(data).hexdigest(), 20, actor="test")
    await uploads.receive(acme, upload.id, 0, 10, 20, pieces(data[:10]))
    last = Digest(hashlib.sha256(data[10:]).hexdigest())

    async def mark(*digests: Digest) -> None:
        async with database.write() as session:
            await session.execute(delete(GcCandidate))
            session.add_all(GcCandidate(digest=each, listed_at=time.now(), deleting_at=time.now()) for each in digests)

    await mark(version.weights_blob)
    for refused in (publish, lambda: registry.restorer.restore_version(acme, "sql", 1, actor="test")):
        with pytest.raises(Overloaded):
            await refused()
    for digest in (last, upload.sha256):
        await mark(digest)
        received = (await uploads.get(acme, upload.id)).received
        with pytest.raises(Overloaded):
            await uploads.receive(acme, upload.id, received, 20, 20, pieces(data[received:]))
    await mark()
    assert (await uploads.finish(acme, upload.id)).is_complete
    assert (await registry.restorer.restore_version(acme, "sql", 1, actor="test")).version == 1


async def test_stopped_collector_leaves_no_mark(
    collector: Collector, database: Database, store: LocalStore, time: Time
) -> None:
    blob = put(store)
    await passes(collector, time, 0)
    time.passed_s += GRACE_S + 1
    began, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        may_end.wait(10)

    with faults.arm("blob.delete", wait):
        collecting = asyncio.create_task(collector.collect())
        await asyncio.to_thread(began.wait, 10)
        collecting.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await collecting
    assert not store.exists(blob)
    async with database.read() as session:
        assert (await session.scalars(select(GcCandidate.digest))).all() == []


async def test_blobs_may_exceed_statement_parameter_limit(database: Database) -> None:
    blobs = [Digest(f"{number:064x}") for number in range(33_000)]
    async with database.write() as session:
        assert await add_gc_candidates(session, blobs, utc_now()) == len(blobs)
        assert await referenced(session, blobs, utc_now(), timedelta()) == set()
    await retain(database, blobs)
    async with database.read() as session:
        assert (await session.scalars(select(GcCandidate.digest).limit(1))).all() == []


async def test_two_servers_never_collect_simultaneously(
    collector: Collector, database: Database, store: LocalStore, time: Time
) -> None:
    other = make_collector(database, store, time)
    assert await collector.collect()
    assert not await other.collect()
    # one that is killed doesn't keep it for ever
    time.passed_s += 121
    assert await other.collect()
    assert not await collector.collect()


async def test_clock_jump_does_not_end_grace_period(collector: Collector, store: LocalStore, time: Time) -> None:
    blob = put(store)
    await passes(collector, time, 0)
    time.jumped_s += 86_400
    await passes(collector, time, GRACE_S - 1)
    assert store.exists(blob)


async def test_failed_blob_deletion_is_retried(collector: Collector, store: LocalStore, time: Time) -> None:
    blob = put(store)
    await passes(collector, time, 0)
    with faults.arm("blob.delete", "EIO"):
        await passes(collector, time, GRACE_S + 1)
    assert store.exists(blob)
    await passes(collector, time, 1)
    assert not store.exists(blob)


async def test_unavailable_store_is_tried_with_few_blobs(
    collector: Collector, store: LocalStore, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        put(store, bytes([number]))
    await passes(collector, time, 0)
    asked: list[str] = []

    def fail(digest: str) -> bool:
        asked.append(digest)
        raise StorageError("The store is away.")

    with monkeypatch.context() as away:
        away.setattr(store, "delete", fail)
        await passes(collector, time, GRACE_S + 1)
    assert len(asked) == 3
    await passes(collector, time, 1)
    assert list(store.iter_digests()) == []


async def test_no_transaction_is_held_for_many_slow_deletions(
    collector: Collector, store: LocalStore, time: Time
) -> None:
    for number in range(6):
        put(store, bytes([number]))
    await passes(collector, time, 0)
    num_asked, num_transactions = 0, 0

    def delete() -> None:
        nonlocal num_asked
        num_asked += 1
        time.passed_s += 3

    def end() -> None:
        nonlocal num_transactions
        num_transactions += 1

    with faults.arm("blob.delete", delete), faults.arm("gc.after_delete", end):
        await passes(collector, time, GRACE_S + 1)
    assert (num_asked, num_transactions) == (6, 3)
    assert list(store.iter_digests()) == []


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_expired_uploads_bytes_are_kept_through_grace_period(
    collector: Collector, store: LocalStore, time: Time, registry: Registry, acme: TenantId
) -> None:
    uploads = registry.uploads.resumable
    data = bytes(1000)
    whole, part = hashlib.sha256(data).hexdigest(), hashlib.sha256(bytes(10)).hexdigest()
    done, _ = await uploads.create(acme, whole, 1000, actor="test")
    await uploads.receive(acme, done.id, 0, 1000, 1000, pieces(data))
    begun, _ = await uploads.create(acme, "0" * 64, 50, actor="test")
    await uploads.receive(acme, begun.id, 0, 10, 50, pieces(bytes(10)))
    await passes(collector, time, 0, GRACE_S + 1)
    assert store.exists(whole)
    assert store.exists(part)
    time.jumped_s += 90_000
    await passes(collector, time, 0)
    time.jumped_s -= 90_000
    assert (await registry.uploads.resumable.create(acme, whole, 1000, actor="test"))[1]
    await passes(collector, time, 90_000, GRACE_S + 1)
    assert not store.exists(whole)
    assert not store.exists(part)


async def test_the_pieces_of_a_complete_upload_go(
    collector: Collector, store: LocalStore, time: Time, registry: Registry, acme: TenantId
) -> None:
    uploads = registry.uploads.resumable
    data = bytes(range(200))
    upload, _ = await uploads.create(acme, hashlib.sha256(data).hexdigest(), 200, actor="test")
    await uploads.receive(acme, upload.id, 0, 50, 200, pieces(data[:50]))
    await uploads.receive(acme, upload.id, 50, 200, 200, pieces(data[50:]))
    assert len(list(store.iter_digests())) == 3
    await passes(collector, time, 0, GRACE_S + 1)
    assert list(store.iter_digests()) == [upload.sha256]
