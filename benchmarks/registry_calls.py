"""Calls of the registry's classes that `benchmarks.million` times, and its passes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.registry_rows import (
    ACTOR,
    BASE,
    NUM_GARBAGE,
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
from loraserve.db.paging import Page, encode_cursor
from loraserve.db.session import Database, utc_now
from loraserve.doctor.storage import check_bases
from loraserve.registry.blob_references import all_referenced
from loraserve.registry.model_name import parse_model
from loraserve.registry.records import AliasTarget
from loraserve.registry.storage_gc.collector import Collector
from loraserve.registry.storage_gc.store_claim import StoreClaim
from loraserve.tenancy.billing.meter import UsageMeter
from loraserve.tenancy.billing.usage_report import UsageQuery, UsageReports
from loraserve.types import TenantId

Action = Callable[[], Awaitable[Any]]
PAGE = 50
QUOTA_ROWS = 10**9
PAGES = 4 * (PAGE + 1)
"""Rows that a page may read: of each item the adapter, some versions and aliases."""


@dataclass(slots=True)
class Call:
    name: str
    make: Callable[[int], Action]
    """Makes the call by its number."""
    max_rows: int
    times: int = 40


@dataclass(slots=True)
class Pass:
    name: str
    run: Action
    max_rows: int | None = None
    """Rows that one statement of each kind may read; None: all there are."""


class Calls:
    """The calls on a filled registry."""

    def __init__(self, url: str, database: Database, store: ListedStore, filled: Filled, folder: Path) -> None:
        self._url, self._database, self._store, self._filled, self._folder = url, database, store, filled, folder
        self._registry = make_registry(database, store)
        self._rng = random.Random(2)
        self._large = filled.tenants[0][0]
        self._median = filled.tenants[len(filled.tenants) // 8][0]
        self._seed = 1

    async def open(self) -> None:
        await self._registry.claim.adopt(actor=ACTOR)

    # --- binding ---

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
        await self._registry.resolve(tenant, model, sticky=None)

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
        registry, large, median = self._registry, self._large, self._median
        first = self._filled.adapters_of[large][0]
        middle = self._filled.live(large)[len(self._filled.live(large)) // 2]
        deep = {"limit": PAGE, "cursor": encode_cursor(middle.name)}
        deep_number = {"limit": PAGE, "cursor": encode_cursor(str(first.num_versions // 2))}
        owner = self._filled.tenants[0][1]
        granted_to = self._filled.tenants[1][0]
        meter = UsageMeter(self._database, self._folder / "usage")
        usage = UsageReports(meter)
        month = utc_now() - timedelta(days=30)

        def of(action: Callable[[], Awaitable[Any]]) -> Callable[[int], Action]:
            return lambda _: action

        def has(name: str, tenant: TenantId) -> Action:
            return lambda: registry.check_model(tenant, parse_model(name, BASE.id))

        return [
            Call("bind a canary with a split", lambda _: has(f"{self._pick(large).name}@1", large), 16),
            Call("bind a granted adapter", lambda _: has(f"{owner}/{first.name}@1", granted_to), 16, times=1),
            Call("get an adapter", lambda _: _get(registry, large, self._pick(large)), 64),
            Call("get the trainer's adapter", of(lambda: registry.get(large, first.name)), PAGES),
            Call("get a version", of(lambda: registry.get_version(large, first.name, 2)), 64),
            Call("list adapters, first page", of(lambda: registry.list(large, limit=PAGE)), PAGES * 4),
            Call("list adapters, in the middle", of(lambda: registry.list(large, **deep)), PAGES * 4),
            Call("list versions, first page", of(lambda: registry.list_versions(large, first.name, limit=PAGE)), PAGES),
            Call(
                "list versions, in the middle",
                of(lambda: registry.list_versions(large, first.name, **deep_number)),
                PAGES,
            ),
            Call("models of a median tenant", of(lambda: registry.list_servable(median)), 4000),
            Call("models of the largest tenant", of(lambda: registry.list_servable(large)), 50_000, times=5),
            Call("residency page, all tenants", of(lambda: self._owned(None, None)), PAGES * 2),
            Call("residency page, all, in the middle", of(lambda: self._owned(None, self._middle_id())), PAGES * 2),
            Call("residency page, largest tenant", of(lambda: self._owned(large, None)), PAGES * 2),
            Call("residency page, median tenant", of(lambda: self._owned(median, None)), PAGES * 2),
            Call("residency of 200 digests", of(self._owned_digests), 2000),
            Call("audit page, largest tenant", of(lambda: registry.list_audit(large, limit=PAGE)), PAGES),
            Call("audit page, all tenants", of(lambda: registry.list_audit(None, limit=PAGE)), PAGES),
            Call("usage by day, median tenant", of(_usage(usage, median, month, "day")), 4000),
            Call("usage by adapter, largest tenant", of(_usage(usage, large, month, "adapter")), 10**9, times=5),
        ]

    def _changing(self) -> list[Call]:
        registry, large, median = self._registry, self._large, self._median

        def move(_: int) -> Action:
            one = self._pick(large, min_versions=2)
            number = self._rng.choice((1, one.num_versions))
            return lambda: registry.aliases.set(large, one.name, "beta", AliasTarget(number), actor=ACTOR)

        def push(tenant: TenantId) -> Callable[[int], Action]:
            return lambda _: lambda: publish(registry, tenant, self._pick(tenant).name, self._next())

        def push_new(_: int) -> Action:
            return lambda: publish(registry, large, f"new-{self._next()}", self._next())

        deleted: list[OneAdapter] = []

        def delete(_: int) -> Action:
            one = self._pick(large)
            while one in deleted:
                one = self._pick(large)
            deleted.append(one)
            return lambda: registry.delete(large, one.name, actor=ACTOR)

        def restore(number: int) -> Action:
            return lambda: registry.restorer.restore(large, deleted[number].name, actor=ACTOR)

        def begin_upload(number: int) -> Action:
            sha, size = weights_blob(10**9 + number)[::-1], 1 << 20
            return lambda: registry.uploads.resumable.create(large, sha, size, actor=ACTOR)

        return [
            Call("move an alias", move, 64),
            Call("push a version, median tenant", push(median), QUOTA_ROWS),
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
        database, registry = self._database, self._registry
        later_s = 2 * 3600.0
        store = self._store

        async def collect_again() -> None:
            """A pass an hour later, on the server that made the first: garbage goes."""
            self._later_s = later_s
            await collector.collect()
            if collector.num_blobs + collector.num_gc_candidates < NUM_GARBAGE:
                raise AssertionError("the collector didn't find the garbage")

        self._later_s = 0.0
        collector = Collector(
            database,
            store,
            StoreClaim(database, store),
            retention_s=7 * 86_400.0,
            clock=lambda: utc_now() + timedelta(seconds=self._later_s),
            monotonic=lambda: self._later_s,
        )

        async def read_backup() -> None:
            folder = BackupFolder(self._folder / "backup", is_made=True)
            async with database.read() as session:
                await write_tables(session, folder.store)

        async def referenced() -> None:
            async with database.read() as session:
                await all_referenced(session, utc_now(), timedelta(days=7))

        async def bases() -> None:
            await asyncio.to_thread(lambda: list(check_bases(self._url, BASE.digest)))

        return [
            Pass("certificates: first sweep", registry.certificate_backfill.sweep),
            Pass("certificates: next sweep", registry.certificate_backfill.sweep, max_rows=4000),
            Pass("collector: first pass", collector.collect, max_rows=20_000),
            Pass("collector: pass that deletes", collect_again, max_rows=20_000),
            Pass("backup: rows", read_backup),
            Pass("backup: blobs in use", referenced),
            Pass("db check", lambda: migrate.check(self._url)),
            Pass("doctor: bases of versions", bases),
        ]


def _get(registry: Any, tenant: TenantId, one: OneAdapter) -> Action:
    return lambda: registry.get(tenant, one.name)


def _usage(usage: UsageReports, tenant: TenantId, start: Any, by: str) -> Action:
    return lambda: usage.page(UsageQuery(tenant=tenant, start=start, group_by=(by,)), limit=PAGE)
