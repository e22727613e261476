"""Calls of the registry's classes that `benchmarks.million` times, and its passes.

Two tenants call: the largest, and a small one (of 2,000 the 250th by size).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from benchmarks.registry_rows import (
    ACTOR,
    BASE,
    NUM_GARBAGE,
    NUM_SERVERS,
    Filled,
    ListedStore,
    OneAdapter,
    make_registry,
    publish,
    weights_blob,
)
from loraserve.backups.folder import BackupFolder
from loraserve.backups.table_rows import write_tables
from loraserve.db import migrate
from loraserve.db.models import AdapterVersion
from loraserve.db.paging import Page, encode_cursor
from loraserve.db.session import Database, utc_now
from loraserve.doctor.storage import check_bases
from loraserve.registry.blob_references import all_referenced
from loraserve.registry.model_name import parse_model
from loraserve.registry.records import AliasTarget
from loraserve.registry.registry import Registry
from loraserve.registry.storage_gc.collector import Collector
from loraserve.registry.storage_gc.store_claim import StoreClaim
from loraserve.registry.storage_totals import TENANTS_AT_ONCE, find_differences
from loraserve.tenancy.billing.meter import UsageMeter
from loraserve.tenancy.billing.usage_report import UsageQuery, UsageReports
from loraserve.tenancy.limits.servers import Servers
from loraserve.types import TenantId

Action = Callable[[], Awaitable[Any]]
PAGE = 50
QUOTA_ROWS = 200
"""Rows that a call with a quota's check may read: the tenant's totals have its sums."""
PAGES = 4 * (PAGE + 1)
"""Rows that a page may read: of each item the adapter, some versions and aliases."""
BATCH_ROWS = 4000
"""Rows that a pass may read for some of its blobs: of the 400 that it lists at once, two for each
of four kinds of reference. More share a config, but one row of each is enough.
"""
TOTALS_ADAPTERS, TOTALS_VERSIONS, TOTALS_ROWS = 5, 3, 20_000
"""Times that the totals read the adapters of some tenants, and their versions: counted are adapters
and those that are deleted, versions, those that are deleted, and those by day. Rows of others come
on top: where all tenants have deleted few versions, PostgreSQL reads these in one go.
"""


@dataclass(slots=True)
class Call:
    name: str
    make: Callable[[], Action]
    """Makes the next call."""
    max_rows: int
    """Rows that it may read."""
    times: int = 40
    """Calls of all rounds together."""


@dataclass(slots=True)
class Pass:
    name: str
    run: Callable[[], Awaitable[int]]
    """Returns what it was about: the number of blobs, versions or rows."""
    max_rows: int | None = None
    """Rows that one statement of each kind may read; None: all there are."""
    is_of_share: bool = False
    """Whether `max_rows` is a share of all rows, of any size: to read a table whole is right where
    it isn't more.
    """
    includes: str | None = None
    """Earlier pass that is a part of this one: its statements are explained there."""


class Calls:
    """The calls on a filled registry."""

    def __init__(self, url: str, database: Database, store: ListedStore, filled: Filled, folder: Path) -> None:
        self._url, self._database, self._store, self._filled, self._folder = url, database, store, filled, folder
        self._registry = make_registry(database, store)
        self._binding = self._registry
        self._rng = random.Random(2)
        self._large = filled.tenants[0][0]
        self._small = filled.tenants[len(filled.tenants) // 8][0]
        self._usage = UsageReports(UsageMeter(database, folder / "usage"))
        self._servers = Servers(database)
        self._seed = 1
        self._deleted: list[OneAdapter] = []

    async def open(self) -> None:
        # adopting looks at every blob that is listed, which is a pass of its own
        num_versions, self._store.num_versions = self._store.num_versions, 0
        await self._registry.claim.adopt(actor=ACTOR)
        self._store.num_versions = num_versions

    # --- binding ---

    def forget_routes(self) -> None:
        """Bind from now on by a registry that has looked no name up yet."""
        self._binding = make_registry(self._database, self._store)

    def draw_binds(self, count: int) -> list[tuple[TenantId, str]]:
        """So many different names, of tenants by their sizes."""
        tenants = [ident for ident, _ in self._filled.tenants]
        weights = [len(self._filled.adapters_of[ident]) for ident in tenants]
        drawn: dict[tuple[TenantId, str], None] = {}
        for tenant in self._rng.choices(tenants, weights, k=4 * count):
            one = self._rng.choice(self._filled.adapters_of[tenant])
            if one.deleted_at is None:
                name = f"{one.name}@1" if self._rng.random() < 0.2 else one.name
                drawn[tenant, name] = None
        return list(drawn)[:count]

    async def bind(self, asked: tuple[TenantId, str]) -> None:
        tenant, name = asked
        model = parse_model(name, BASE.id)
        await self._binding.resolve(tenant, model, sticky=None)

    # --- calls ---

    def _pick(self, tenant: TenantId, *, min_versions: int = 1) -> OneAdapter:
        live = self._filled.live(tenant)[1:] or self._filled.live(tenant)
        found = [one for one in live if one.num_versions >= min_versions] or live
        return self._rng.choice(found)

    def _next(self) -> int:
        self._seed += 1
        return self._seed

    def all(self) -> list[Call]:
        return [*self._reading(), *self._changing()]

    def _reading(self) -> list[Call]:
        large, small = self._large, self._small
        first = self._filled.adapters_of[large][0]
        middle = self._filled.live(large)[len(self._filled.live(large)) // 2]
        name, number = encode_cursor(middle.name), encode_cursor(str(first.num_versions // 2))
        of_trainer = encode_cursor(f"{first.name} {first.num_versions // 2}")
        of_middle = encode_cursor(f"{middle.name} {middle.num_versions}")
        owner = self._filled.tenants[0][1]
        granted_to = self._filled.tenants[1][0]
        usage, month = self._usage, utc_now() - timedelta(days=30)

        def of(action: Callable[[Registry], Awaitable[Any]]) -> Callable[[], Action]:
            return lambda: lambda: action(self._registry)

        def versions(registry: Registry, cursor: str | None) -> Awaitable[Any]:
            return registry.list_versions(large, first.name, limit=PAGE, cursor=cursor)

        def look_up(name: str, tenant: TenantId) -> Action:
            self.forget_routes()
            return lambda: self._binding.check_model(tenant, parse_model(name, BASE.id))

        def canary() -> Action:
            return look_up(f"{self._rng.choice([one for one in live if one.has_canary] or live).name}@canary", large)

        live = self._filled.live(large)
        calls = [
            Call("bind a granted adapter", lambda: look_up(f"{owner}/{first.name}@1", granted_to), 16),
            Call("get an adapter", lambda: _get(self._registry, large, self._pick(large)), 64),
            Call("get the trainer's adapter", of(lambda r: r.get(large, first.name)), PAGES),
            Call("get a version", of(lambda r: r.get_version(large, first.name, 1)), 64),
            Call("list adapters, first page", of(lambda r: r.list(large, limit=PAGE)), PAGES * 4),
            Call("list adapters, in the middle", of(lambda r: r.list(large, limit=PAGE, cursor=name)), PAGES * 4),
            Call("list versions, first page", of(lambda r: versions(r, None)), PAGES),
            Call("list versions, in the middle", of(lambda r: versions(r, number)), PAGES),
            Call("models of a small tenant", of(lambda r: r.list_servable(small)), 4000),
            Call("models of the largest tenant", of(lambda r: r.list_servable(large)), 50_000, times=5),
            Call("residency page, all tenants", of(lambda _: self._owned(None, None)), PAGES * 2),
            Call("residency page, all, in the middle", of(lambda _: self._owned(None, self._middle_id())), PAGES * 2),
            Call("residency page, largest tenant", of(lambda _: self._owned(large, None)), PAGES * 2),
            Call("residency page, trainer's, in the middle", of(lambda _: self._owned(large, of_trainer)), PAGES * 2),
            Call("residency page, largest, in the middle", of(lambda _: self._owned(large, of_middle)), PAGES * 2),
            Call("residency page, small tenant", of(lambda _: self._owned(small, None)), PAGES * 2),
            Call("residency of 200 digests", of(lambda _: self._owned_digests()), 2000),
            Call("audit page, largest tenant", of(lambda r: r.list_audit(large, limit=PAGE)), PAGES),
            Call("audit page, all tenants", of(lambda r: r.list_audit(None, limit=PAGE)), PAGES),
            Call("usage by day, small tenant", lambda: _usage(usage, small, month, "day"), 4000),
            Call("usage by adapter, largest tenant", lambda: _usage(usage, large, month, "adapter"), 10**9, times=5),
            Call(f"heartbeat among {NUM_SERVERS:,} servers", lambda: self._servers.beat, NUM_SERVERS),
        ]
        if any(one.has_canary for one in live):
            calls.insert(0, Call("bind a canary with a split", canary, 16))
        return calls

    def _changing(self) -> list[Call]:
        large, small = self._large, self._small

        def move() -> Action:
            one = self._pick(large, min_versions=2)
            number = self._rng.choice((1, one.num_versions))
            return lambda: self._registry.aliases.set(large, one.name, "beta", AliasTarget(number), actor=ACTOR)

        def push(tenant: TenantId) -> Callable[[], Action]:
            return lambda: lambda: publish(self._registry, tenant, self._pick(tenant).name, self._next())

        def push_new() -> Action:
            return lambda: publish(self._registry, large, f"new-{self._next()}", self._next())

        def delete() -> Action:
            one = self._pick(large)
            while one in self._deleted:
                one = self._pick(large)
            self._deleted.append(one)
            return lambda: self._registry.delete(large, one.name, actor=ACTOR)

        def restore() -> Action:
            one = self._deleted.pop()
            return lambda: self._registry.restorer.restore(large, one.name, actor=ACTOR)

        def begin_upload() -> Action:
            sha, size = weights_blob(10**9 + self._next())[::-1], 1 << 20
            return lambda: self._registry.uploads.resumable.create(large, sha, size, actor=ACTOR)

        return [
            Call("move an alias", move, 64),
            Call("push a version, small tenant", push(small), QUOTA_ROWS),
            Call("push a version, largest tenant", push(large), QUOTA_ROWS, times=20),
            Call("push a new adapter, largest tenant", push_new, QUOTA_ROWS, times=20),
            Call("delete an adapter", delete, 64, times=20),
            Call("restore an adapter", restore, QUOTA_ROWS, times=20),
            Call("begin a resumable upload, largest tenant", begin_upload, QUOTA_ROWS, times=20),
        ]

    def _middle_id(self) -> str:
        one = self._filled.adapters_of[self._large][len(self._filled.adapters_of[self._large]) // 2]
        return encode_cursor(one.id)

    def _owned(self, tenant: TenantId | None, cursor: str | None) -> Awaitable[Page[Any]]:
        return self._registry.list_owned(tenant, limit=PAGE, cursor=cursor, digests=None)

    def _owned_digests(self) -> Awaitable[Page[Any]]:
        numbers = self._rng.sample(range(self._store.num_versions), min(200, self._store.num_versions))
        digests = [type(weights_blob(0))(weights_blob(number)[::-1]) for number in numbers]
        return self._registry.list_owned(None, limit=200, cursor=None, digests=digests)

    # --- passes ---

    def passes(self) -> list[Pass]:
        database, registry, store = self._database, self._registry, self._store
        later_s, retention_s = 2 * 3600.0, 7 * 86_400.0
        totals = "collector: totals"
        self._later_s = 0.0
        collector = Collector(
            database,
            store,
            StoreClaim(database, store),
            retention_s=retention_s,
            clock=lambda: utc_now() + timedelta(seconds=self._later_s),
            monotonic=lambda: self._later_s,
        )

        async def sweep() -> int:
            await registry.certificate_backfill.sweep()
            return store.num_versions

        async def collect() -> int:
            """Make a first pass; check that it lists what isn't in use, no more and no less."""
            expected = await self._num_expired(retention_s)
            store.num_listed = 0
            await collector.collect()
            # an earlier run on these rows has listed what expires within its two hours
            most = await self._num_expired(retention_s - later_s)
            if not expected <= collector.num_gc_candidates <= most:
                raise AssertionError(f"{collector.num_gc_candidates} blobs are listed; {expected} aren't in use")
            return store.num_listed

        async def collect_again() -> int:
            """Make a pass an hour later on the server that made the first; it deletes garbage."""
            due, self._later_s = collector.num_gc_candidates, later_s
            await collector.collect()
            return due

        async def check_totals() -> int:
            after: str | None = ""
            while after is not None:
                async with database.read() as session:
                    found, after = await find_differences(session, after)
                if found:
                    raise AssertionError(f"totals are wrong: {found[:3]}")
            return store.num_versions

        async def read_backup() -> int:
            folder = BackupFolder(self._folder / f"backup-{store.num_versions}", is_made=True)
            async with database.read() as session:
                return sum(table.num_rows for table in await write_tables(session, folder.store))

        async def referenced() -> int:
            async with database.read() as session:
                return len(await all_referenced(session, utc_now(), timedelta(days=7)))

        async def check() -> int:
            await migrate.check(self._url)
            return 1

        async def bases() -> int:
            await asyncio.to_thread(lambda: list(check_bases(self._url, BASE.digest)))
            return store.num_versions

        return [
            Pass("certificates: first sweep", sweep),
            Pass("certificates: next sweep", sweep, max_rows=4000),
            Pass(totals, check_totals, max_rows=self._max_totals_rows(), is_of_share=True),
            Pass("collector: pass that lists", collect, max_rows=BATCH_ROWS, includes=totals),
            Pass("collector: pass that deletes", collect_again, max_rows=BATCH_ROWS, includes=totals),
            Pass("backup: rows", read_backup),
            Pass("backup: blobs in use", referenced),
            Pass("db check", check),
            Pass("doctor: bases of versions", bases),
        ]

    def _max_totals_rows(self) -> int:
        """Return how many rows the first step of the totals may read: by what its tenants have.

        Of 10,000 versions, these are all tenants: each adapter and each version. Of a million, they
        are the smallest of 2,000 tenants.
        """
        first = sorted(ident for ident, _ in self._filled.tenants)[:TENANTS_AT_ONCE]
        adapters = [one for ident in first for one in self._filled.adapters_of[ident]]
        num_versions = sum(one.num_versions for one in adapters)
        return TOTALS_ADAPTERS * len(adapters) + TOTALS_VERSIONS * num_versions + TOTALS_ROWS

    async def _num_expired(self, retention_s: float) -> int:
        """Return the number of blobs that nothing uses any more: garbage, and expired versions'."""
        since = utc_now() - timedelta(seconds=retention_s)
        async with self._database.read() as session:
            query = select(func.count()).select_from(AdapterVersion).where(AdapterVersion.deleted_at <= since)
            return NUM_GARBAGE + (await session.scalar(query) or 0)


def _get(registry: Any, tenant: TenantId, one: OneAdapter) -> Action:
    return lambda: registry.get(tenant, one.name)


def _usage(usage: UsageReports, tenant: TenantId, start: datetime, by: str) -> Action:
    return lambda: usage.page(UsageQuery(tenant=tenant, start=start, group_by=(by,)), limit=PAGE)
