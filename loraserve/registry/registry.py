"""The registry of adapters: from names to versions to digests.

It serves the token path and management calls.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

from adapters_store.base import BlobStore
from loraserve.background import Throttle
from loraserve.db import audit
from loraserve.db.idempotency import Once
from loraserve.db.lookup import LookupCache
from loraserve.db.names import name_key
from loraserve.db.paging import Page, check_limit, decode_cursor, decode_number_cursor, make_page
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import AdapterOfAnotherBase, AdapterQuarantined, AdapterUnavailable, Conflict
from loraserve.limits import DEFAULT_EPHEMERAL_BYTES, DEFAULT_EPHEMERAL_TTL_S, LIMITS
from loraserve.registry.binding import BASE, Binding, Route, Target
from loraserve.registry.catalog.aliases import Aliases
from loraserve.registry.catalog.ephemeral_adapters import EphemeralAdapters, Warm
from loraserve.registry.catalog.evaluations import Evaluations
from loraserve.registry.catalog.grants import Grants
from loraserve.registry.catalog.last_used import LastUsed
from loraserve.registry.catalog.metadata import MetadataEditor
from loraserve.registry.catalog.pins import PinningEngine, Pins
from loraserve.registry.catalog.restore import Restorer
from loraserve.registry.catalog.shadow_hours import ShadowHours
from loraserve.registry.changes import record_change
from loraserve.registry.composition import compose
from loraserve.registry.health.base_names import BaseNames
from loraserve.registry.health.base_precision import BasePrecisions, MeasureBase
from loraserve.registry.health.certificate_backfill import CertificateBackfill
from loraserve.registry.health.certificates import Certificates, Certify
from loraserve.registry.health.corruption import CorruptionQuarantine
from loraserve.registry.health.numeric_failures import NumericFailures
from loraserve.registry.health.stored_fit import StoredFit
from loraserve.registry.model_name import ParsedModel, Term, model_not_found, other_case
from loraserve.registry.operations import Operations
from loraserve.registry.publishing.inspector import UploadInspector
from loraserve.registry.publishing.local_folder import LocalFolders
from loraserve.registry.publishing.publisher import Publisher
from loraserve.registry.publishing.pulls import Pulls
from loraserve.registry.records import (
    AdapterRecord,
    ServableAdapter,
    VersionRecord,
)
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.residency import OwnedVersion, list_owned
from loraserve.registry.routing import RouteRepository
from loraserve.registry.served_base import ServedBase
from loraserve.registry.storage_gc.collector import Collector
from loraserve.registry.storage_gc.store_claim import ClaimedStore, StoreClaim
from loraserve.registry.uploads.transfers import Uploads
from loraserve.types import AdapterRef, BaseSpec, Digest, TenantId

T = TypeVar("T")
DEFAULT_RETENTION_S = 7 * 86_400.0


class Registry:
    """Adapters of all tenants; each call acts for one.

    A change is durable when the call returns: first the blobs (`adapters_store`), then the
    database's commit. `resolve` sees it at once in this process, and within
    `LIMITS.resolve_cache_s` in others.

    Its parts: `uploads`, `inspector` and `publisher` take in versions, `aliases`, `metadata`,
    `restorer`, `grants` and `pins` manage them; `ephemeral` has versions without a row;
    `certificates` and `certificate_backfill` verify versions, `corruption` and `numeric_failures`
    quarantine them; `shadow_hours` compares shadows, `evaluations` keeps results, and `claim`
    guards the store.

    Args:
        base: returns the resident base model; may raise `EngineUnavailable` while there is none.
        certify: verification by the engine; None: versions have no certificates.
        is_certified_at_upload: whether uploads wait for a certificate; otherwise versions are
            verified on request.
        is_certified_strictly: whether an upload is refused unless its certificate is passed.
        retention_s: time for which deleted versions can be restored.
        pull_allow: patterns of the sources that adapters may be pulled from.
        pinning: engine that holds operators' pins; None: nothing does.
        base_names: names of the base in adapters' configs; None: its id alone.
        throttle: pauses uploads while an engine computes on this machine's processors; None: never.
        claim: the registry's claim on `store`; None: a new one.
        warm: brings an adapter to the engine's device; None: its first request does.
        lora_dir: folder below which requests may name adapters by their path; None: none.
        ephemeral_memory_bytes: memory for ephemeral adapters.
        ephemeral_ttl_s: seconds after which an ephemeral adapter is unloaded.
        on_ephemeral_unused: called with the digest of bytes that no ephemeral version has any more.
        draw: uniform in [0, 1); chooses a split's version for requests that state no user.
    """

    def __init__(
        self,
        database: Database,
        store: BlobStore,
        base: Callable[[], BaseSpec],
        *,
        certify: Certify | None = None,
        measure_base: MeasureBase | None = None,
        is_certified_at_upload: bool = True,
        is_certified_strictly: bool = False,
        retention_s: float = DEFAULT_RETENTION_S,
        pull_allow: Sequence[str] = (),
        pinning: PinningEngine | None = None,
        base_names: BaseNames | None = None,
        throttle: Throttle | None = None,
        claim: StoreClaim | None = None,
        warm: Warm | None = None,
        lora_dir: str | None = None,
        ephemeral_memory_bytes: int = DEFAULT_EPHEMERAL_BYTES,
        ephemeral_ttl_s: float = DEFAULT_EPHEMERAL_TTL_S,
        on_ephemeral_unused: Callable[[Digest], None] = lambda _: None,
        clock: Clock = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._database = database
        self._clock = clock
        self._draw = draw
        self.served_base = ServedBase(base)
        self._routes: LookupCache[tuple[TenantId, ParsedModel], Route] = LookupCache(
            ttl_s=LIMITS.resolve_cache_s,
            clock=monotonic,
            silence_s=database.silence_s,
            is_cancellable=database.is_cancellable,
        )
        self.base_names = names = base_names or BaseNames()
        self.certificates = Certificates(
            database,
            certify,
            self.served_base,
            self.forget,
            names=names,
            is_at_upload=is_certified_at_upload,
            is_strict=is_certified_strictly,
            clock=clock,
        )
        self.certificate_backfill = CertificateBackfill(
            database, self.certificates, base, clock=clock, monotonic=monotonic
        )
        self.base_precisions = BasePrecisions(database, base, measure_base, clock=clock)
        throttle = throttle or Throttle()
        self.claim = claim or StoreClaim(database, store, clock=clock)
        self.collector = Collector(
            database, store, self.claim, retention_s=retention_s, clock=clock, monotonic=monotonic
        )
        self.store = store = ClaimedStore(store, self.claim)
        """Store of the registry's blobs, as long as it is the registry's own."""
        self.uploads = Uploads(database, store, clock=clock, throttle=throttle)
        self.inspector = UploadInspector(base, names, self.uploads, throttle)
        self.ephemeral = EphemeralAdapters(
            database,
            base,
            self.inspector,
            on_ephemeral_unused,
            warm=warm,
            throttle=throttle,
            memory_bytes=ephemeral_memory_bytes,
            ttl_s=ephemeral_ttl_s,
            clock=clock,
            monotonic=monotonic,
        )
        self.publisher = Publisher(
            database,
            store,
            base,
            self.inspector,
            self.certificates,
            self.forget,
            retention_s=retention_s,
            clock=clock,
            uploads=self.uploads,
            check_free=self.ephemeral.check_free,
        )
        self.stored_fit = StoredFit(store, base, self.inspector.check_device)
        self.aliases = Aliases(
            database, self.served_base, self.forget, fit=self.stored_fit, certificates=self.certificates, clock=clock
        )
        self.metadata = MetadataEditor(database, self.forget, clock=clock)
        self.evaluations = Evaluations(database, self.served_base, clock=clock)
        self.restorer = Restorer(
            database,
            store,
            self.forget,
            retention_s=retention_s,
            clock=clock,
            check_free=self.ephemeral.check_free,
        )
        self.pins = Pins(database, self.served_base, pinning, clock=clock, monotonic=monotonic)
        self.corruption = CorruptionQuarantine(database, self.forget, clock=clock)
        self.operations = Operations(database, clock=clock)
        self.pulls = Pulls(self.uploads, self.inspector, self.publisher, self.operations, pull_allow)
        self.local_folders = LocalFolders(lora_dir)
        self.grants = Grants(database, self.forget, clock=clock)
        self.numeric_failures = NumericFailures(
            database,
            self.served_base,
            self.forget,
            on_ephemeral=self.ephemeral.note_numeric_failure,
            clock=clock,
        )
        self.shadow_hours = ShadowHours(database, clock=clock)
        self.num_quarantined_refused = 0
        """Refused uses of quarantined versions since the start."""
        self.num_of_another_base_refused = 0
        """Refused uses of versions of another base since the start."""
        self.last_used = LastUsed(clock=monotonic)
        self.on_forget: Callable[[TenantId, str], None] = lambda *_: None
        """Callback with owner and name of an adapter that was changed, deleted or quarantined."""
        self.on_delete: Callable[[TenantId, str, int | None], None] = lambda *_: None
        """Callback with owner, name and number of a deleted version; None: of a whole adapter."""

    @property
    def database(self) -> Database:
        """Database of the registry, which files and batches share."""
        return self._database

    @property
    def is_database_available(self) -> bool:
        """Whether the database accepts writes, as far as is known."""
        return self._database.is_available

    # --- the token path ---

    async def bind(self, tenant: TenantId, terms: Sequence[Term], *, sticky: str | None) -> Binding:
        """Bind a request to its version for its whole life; without terms, to the base.

        Names are cached for `LIMITS.resolve_cache_s`, and for `LIMITS.outage_grace_s` while the
        database is unreachable. A sum of adapters has neither a fallback nor a shadow.

        Args:
            sticky: key that gets the same version of a split each time; None: the version is drawn
                for each request.

        Raises:
            ModelNotFound: a name is absent, deleted, or another tenant's without a grant; the text
                is the same.
            AdapterQuarantined: a version is in quarantine and has no fallback; the message gives
                the reason.
            AdapterOfAnotherBase: a version was made for another base than this server's and has no
                fallback.
            EngineUnavailable: the base isn't loaded yet.
            InvalidRequest: the weights of a version add up to too much.
            DatabaseUnavailable: a name isn't cached and can't be looked up.
        """
        if not terms:
            return BASE
        if len(terms) > 1 or terms[0].weight != 1:
            resolved = [(await self.resolve(tenant, term.adapter, sticky=sticky), term.weight) for term in terms]
            owners = _owners(tenant, zip((ref.tenant for ref, _ in resolved), terms, strict=True))
            return Binding(compose(tenant, resolved), owners=owners)
        route = await self._route(tenant, terms[0].adapter)
        try:
            binding = route.bind(sticky, self._draw)
        except AdapterUnavailable as error:
            self._count(error)
            raise
        if binding.adapter is not None:
            self.last_used.touch(tenant, binding.adapter)
        owners = _owners(tenant, [(route.main.ref.tenant, terms[0])])
        return replace(binding, owners=owners) if owners else binding

    async def resolve(self, tenant: TenantId, model: ParsedModel, *, sticky: str | None = None) -> AdapterRef:
        """Resolve `model`, which isn't the base, to a version for one request.

        It is never resolved to its fallback.

        Raises:
            ModelNotFound, AdapterQuarantined, AdapterOfAnotherBase, DatabaseUnavailable: as `bind`.
        """
        target = (await self._route(tenant, model)).choose(sticky, self._draw)
        if not target.is_servable:
            refusal = target.refusal()
            self._count(refusal)
            raise refusal
        self.last_used.touch(tenant, target.ref)
        return target.ref

    async def compose(self, tenant: TenantId, terms: Iterable[Term]) -> AdapterRef | None:
        """Compose the weighted sum of the terms, each resolved as by `resolve`.

        None, the base, if the weights cancel out.

        Raises:
            ModelNotFound, AdapterQuarantined, AdapterOfAnotherBase, DatabaseUnavailable: as
                `resolve`, for the first term that can't be used.
            InvalidRequest: the weights of a version add up to too much.
        """
        return compose(tenant, [(await self.resolve(tenant, term.adapter), term.weight) for term in terms])

    async def describe(self, tenant: TenantId, model: ParsedModel) -> Target:
        """Find the main version of `model`, which isn't the base, without counting a use.

        Raises:
            ModelNotFound, DatabaseUnavailable: as `bind`.
            AdapterQuarantined, AdapterOfAnotherBase: neither the version nor a fallback is served.
        """
        route = await self._route(tenant, model)
        if not route.main.is_servable and not route.has_fallback:
            raise route.main.refusal()
        return route.main

    async def check_model(self, tenant: TenantId, model: ParsedModel) -> None:
        """Check that `model`, which isn't the base, exists; it may not be served now.

        Raises:
            ModelNotFound, DatabaseUnavailable: as `bind`.
        """
        await self._route(tenant, model)

    async def list_servable(self, tenant: TenantId) -> list[ServableAdapter]:
        """List the ephemeral adapters and those that a bare name reaches, then granted ones.

        At most `LIMITS.max_listed_models`.
        """
        served = self.served_base.spec
        ephemeral = self.ephemeral.servable(tenant)
        async with self._database.read_columns() as connection:
            stored = await RouteRepository(connection, tenant, served).servable(LIMITS.max_listed_models)
        names = {name_key(item.model) for item in ephemeral}
        # an own one hides a granted one
        shown = (item for item in stored if name_key(item.model) not in names)
        return [*ephemeral, *shown][: LIMITS.max_listed_models]

    def _count(self, refusal: AdapterUnavailable) -> None:
        self.num_quarantined_refused += isinstance(refusal, AdapterQuarantined)
        self.num_of_another_base_refused += isinstance(refusal, AdapterOfAnotherBase)

    async def _route(self, tenant: TenantId, model: ParsedModel) -> Route:
        ephemeral = self.ephemeral.route(tenant, model)
        if ephemeral is not None:
            return ephemeral
        return await self._routes.get((tenant, model), lambda: self._look_up(tenant, model), holder=tenant)

    async def _look_up(self, tenant: TenantId, model: ParsedModel) -> Route:
        served = self.served_base.spec
        async with self._database.read_columns() as connection:
            route = await RouteRepository(connection, tenant, served).route(model)
        if route is None:
            raise model_not_found(model)
        return route

    def retain_deleted(self, seconds: float) -> None:
        """Retain the bytes of deleted versions for so long from now on."""
        for part in (self.collector, self.publisher, self.restorer):
            part.retention = timedelta(seconds=seconds)

    def forget(self, tenant: TenantId, name: str) -> None:
        """Invalidate the cached routes of this adapter of `tenant`, for all tenants."""
        changed = name_key(name)
        self._routes.forget(
            lambda key: (
                (key[0] == tenant and changed in key[1].own_keys)
                or ((granted := key[1].granted) is not None and granted[1] == changed)
            ),
        )
        self.on_forget(tenant, name)

    def forget_owner(self, tenant: TenantId) -> None:
        """Invalidate the cached routes of all adapters of `tenant`, for all tenants.

        Its ephemeral adapters are unloaded.
        """
        self.ephemeral.unload_tenant(tenant)
        self._routes.forget(lambda key: key[0] == tenant or key[1].granted is not None)

    # --- reading ---

    async def has(self, tenant: TenantId, name: str) -> bool:
        """Check whether the tenant has an adapter of this name, ephemeral or not.

        Raises:
            Conflict: it has one whose name differs in case only.
        """
        if (loaded := self.ephemeral.name_of(tenant, name)) is not None:
            if loaded != name:
                raise other_case(name, loaded)
            return True
        async with self._database.read() as session:
            return await AdapterRepository(session, tenant).has_adapter(name)

    async def get(self, tenant: TenantId, name: str) -> AdapterRecord:
        """Read the tenant's adapter.

        Raises:
            AdapterNotFound: there is no such adapter.
        """
        async with self._database.read() as session:
            repository = AdapterRepository(session, tenant)
            return (await repository.adapter_records([await repository.adapter(name)]))[0]

    async def list(
        self, tenant: TenantId, *, limit: int = 50, cursor: str | None = None, with_notes: bool = False
    ) -> Page[AdapterRecord]:
        """List a page of the tenant's adapters by name, without notes unless `with_notes`."""
        after = decode_cursor(cursor)
        check_limit(limit)
        async with self._database.read() as session:
            repository = AdapterRepository(session, tenant)
            records = await repository.adapter_records(
                await repository.adapters(after=after, limit=limit + 1, with_notes=with_notes)
            )
        return make_page(records, limit, lambda record: name_key(record.name), lambda record: record)

    async def get_version(self, tenant: TenantId, name: str, number: int) -> VersionRecord:
        """Read a version of the tenant's adapter.

        Raises:
            AdapterNotFound: there is no such adapter.
            VersionNotFound: it has no such version.
        """
        async with self._database.read() as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name)
            return await repository.version_record(adapter, await repository.version(adapter, number))

    async def list_versions(
        self,
        tenant: TenantId,
        name: str,
        *,
        limit: int = 50,
        cursor: str | None = None,
        with_notes: bool = False,
    ) -> Page[VersionRecord]:
        """List a page of the adapter's versions, newest first, without notes unless `with_notes`.

        Raises:
            AdapterNotFound
        """
        before = decode_number_cursor(cursor)
        check_limit(limit)
        async with self._database.read() as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name)
            rows = await repository.versions(adapter, before=before, limit=limit + 1, with_notes=with_notes)
            records = await repository.version_records(adapter, rows)
        return make_page(records, limit, lambda record: str(record.version), lambda record: record)

    async def list_owned(
        self, tenant: TenantId | None, *, limit: int, cursor: str | None, digests: Sequence[Digest] | None
    ) -> Page[OwnedVersion]:
        """List a page of the versions of `tenant`; with `digests`, only those.

        With None, they are all tenants'.
        """
        return await list_owned(self._database, tenant, limit=limit, cursor=cursor, digests=digests)

    async def list_audit(
        self, tenant: TenantId | None, *, limit: int = 50, cursor: str | None = None
    ) -> Page[audit.AuditEntry]:
        """List a page of the audit entries of `tenant`, newest first.

        With None, they are all tenants'.
        """
        return await audit.list_entries(self._database, tenant, limit=limit, cursor=cursor)

    # --- what the engine does at someone's request ---

    async def check_once(self, once: Once[T] | None) -> None:
        """Check that the request's `Idempotency-Key` is unused.

        Raises:
            Replay, IdempotencyKeyReused
        """
        if once is not None:
            async with self._database.read() as session:
                await once.check(session)

    async def record_action(
        self, tenant: TenantId, action: str, target: str, *, actor: str, once: Once[T] | None, result: T
    ) -> None:
        """Audit an action outside the database.

        Its answer is stored under the request's `Idempotency-Key`.

        Raises:
            Replay: the same request acted at the same time.
        """
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            audit.record(session, action, target, actor=actor, tenant=tenant, at=self._clock())
            if once is not None:
                await once.finish(session, result)

    # --- changing ---

    async def unload(self, tenant: TenantId, name: str, *, actor: str) -> None:
        """Unload the ephemeral adapter of this name, or delete the adapter as `delete` does.

        Raises:
            AdapterNotFound
        """
        loaded = self.ephemeral.name_of(tenant, name)
        if loaded is not None:
            self.ephemeral.unload(tenant, loaded)
            self.on_forget(tenant, loaded)
        else:
            await self.delete(tenant, name, actor=actor)

    async def delete(self, tenant: TenantId, name: str, *, actor: str) -> None:
        """Delete the adapter with all its versions.

        Running requests complete, and the rows stay as tombstones.

        Raises:
            AdapterNotFound
        """
        now = self._clock()
        async with self._database.write(frees_space=True) as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name, is_locking=True)
            name = adapter.name
            await repository.delete_adapter(adapter, now)
            record_change(session, repository, "adapter.delete", name, actor=actor, now=now)
        self.forget(tenant, name)
        self.on_delete(tenant, name, None)

    async def delete_version(self, tenant: TenantId, name: str, number: int, *, actor: str) -> None:
        """Delete the version; running requests complete, and its number is never reused.

        Raises:
            AdapterNotFound, VersionNotFound
            Conflict: an alias, a shadow or the fallback uses the version; the message says which.
        """
        now = self._clock()
        async with self._database.write(frees_space=True) as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name, is_locking=True)
            name = adapter.name
            row = await repository.version(adapter, number)
            if users := await repository.users_of(adapter, number):
                raise Conflict(
                    f"{name}@{number} can't be deleted: {'; '.join(users)}.",
                    hint="Move them to another version first, or delete the adapter.",
                )
            await repository.delete_version(adapter, row, now)
            record_change(
                session, repository, "version.delete", f"{name}@{number}", actor=actor, now=now, digest=row.digest
            )
        self.forget(tenant, name)
        self.on_delete(tenant, name, number)


def _owners(tenant: TenantId, found: Iterable[tuple[TenantId, Term]]) -> Mapping[TenantId, str]:
    """Collect the names of the terms' owners other than `tenant`, as the request gave them."""
    granted = ((owner, term.adapter.granted) for owner, term in found if owner != tenant)
    return {owner: name[0] for owner, name in granted if name is not None}
