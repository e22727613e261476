"""The way in: from staged bytes to a version that resolves."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

from adapters_store.base import BlobStore, StagedBlob
from loraserve import faults
from loraserve.db.idempotency import Once
from loraserve.db.session import Clock, Database
from loraserve.errors import Overloaded
from loraserve.limits import LIMITS
from loraserve.registry.certificates import Certificates
from loraserve.registry.changes import point_alias, record_change
from loraserve.registry.damage import is_damaged, mend
from loraserve.registry.inspection import Inspected, inspect_upload
from loraserve.registry.model_name import LIVE, check_adapter_name
from loraserve.registry.parity import SKIPPED, Parity
from loraserve.registry.places import Places
from loraserve.registry.quota import check_quota
from loraserve.registry.records import CHECKED, QUARANTINED, READY, Published, VersionRecord
from loraserve.registry.references import keep, keep_stored
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.resumable import ResumableUploads
from loraserve.types import AdapterRef, BaseSpec, Digest, TenantId

MAX_INSPECTIONS = 2
"""Uploads that are checked at the same time: each holds a thread, and its bytes in memory."""


class Weights(Protocol):
    """The bytes of a version's weights: staged, or in the store already."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def digest(self) -> Digest: ...

    def read(self) -> memoryview: ...

    def commit(self) -> Digest: ...


class Uploads:
    """Publishes versions: blobs first (bytes, fsync, rename, fsync of the folder), then the certificate, the database's commit, and the answer.

    `resumable` are the uploads that come in pieces; complete, their blobs are published as staged ones are.

    Args:
        base: the resident base model; may raise `EngineUnavailable` while there is none.
        certificates: asked for one per new version.
        on_change: told whose name it was after a publish is durable.
        retention_s: for so long the bytes of deleted versions are kept.
    """

    def __init__(
        self,
        database: Database,
        store: BlobStore,
        base: Callable[[], BaseSpec],
        certificates: Certificates,
        on_change: Callable[[TenantId, str], None],
        *,
        retention_s: float,
        clock: Clock,
    ) -> None:
        self._database = database
        self._certificates = certificates
        self._store = store
        self._base = base
        self._on_change = on_change
        self._retention = timedelta(seconds=retention_s)
        self._clock = clock
        self._inspections = asyncio.Semaphore(MAX_INSPECTIONS)
        self._places = Places(
            "uploads",
            max_in_all=LIMITS.max_concurrent_uploads,
            max_per_tenant=LIMITS.max_concurrent_uploads_per_tenant,
        )
        self.downloads = Places(
            "downloads",
            max_in_all=LIMITS.max_concurrent_downloads,
            max_per_tenant=LIMITS.max_concurrent_downloads_per_tenant,
        )
        """Files on their way out."""
        self.resumable = ResumableUploads(database, store, self._places, clock=clock)

    def check_name(self, name: str) -> str:
        """`name` if an adapter may be called so; before a byte of its upload is read.

        Raises:
            InvalidRequest
        """
        return check_adapter_name(name, self._base().id)

    async def stage(self, tenant: TenantId) -> StagedBlob:
        """A place for an upload's weights; `publish` takes it, or the caller discards it (`release`).

        Raises:
            RateLimited: `LIMITS.max_concurrent_uploads_per_tenant` of the tenant are under way: nobody takes every place.
            Overloaded: `LIMITS.max_concurrent_uploads` are under way.
            StorageFull: no room.
        """
        self._places.take(tenant)
        try:
            return await asyncio.to_thread(self._store.stage)
        except BaseException:
            self._places.give_back(tenant)
            raise

    def place(self, tenant: TenantId) -> AbstractContextManager[None]:
        """An upload's place, for what publishes bytes that are in the store already: it holds them in memory too.

        Raises:
            RateLimited, Overloaded: as `stage`.
        """
        return self._places.taken(tenant)

    async def release(self, tenant: TenantId, staged: StagedBlob) -> None:
        """Ends what `stage` began: what isn't committed is removed."""
        self._places.give_back(tenant)
        await asyncio.to_thread(staged.discard)

    async def publish(
        self,
        tenant: TenantId,
        name: str,
        config: bytes,
        weights: Weights,
        *,
        actor: str,
        is_promoting: bool = True,
        is_dry_run: bool = False,
        once: Once[Published] | None = None,
    ) -> Published:
        """The version that holds these files; durable, checked against the base, certified, and named `LIVE` if `is_promoting`.

        A version whose certificate failed is quarantined: no alias is moved to it. The same bytes again give the version that has
        them, with the certificate that it has (and `LIVE` moves to it); they are written again, and a version whose stored bytes were
        damaged has whole ones, and a new certificate: that ends its quarantine. A dry run checks the same things but for the certificate,
        which takes stored bytes, and leaves nothing behind. `weights` that were staged stay the caller's to `release`.

        Raises:
            AdapterRejected: the files can't be served, by their own look or by the engine's word; it lists every reason.
            InvalidRequest: the name can't be an adapter's.
            QuotaExceeded: the tenant may not hold another adapter or as many bytes.
            StorageFull, StorageError: the bytes can't be kept.
            Conflict: those that are in the store already are damaged: they must be uploaded again.
            Overloaded: they were collected, or the version that has them deleted, meanwhile; the same request works again.
            Replay: `once` was used before.
        """
        self.check_name(name)
        if once is not None:
            async with self._database.read() as session:
                await once.check(session)
        base = self._base()
        async with self._inspections:
            inspected = await asyncio.to_thread(_inspect, config, weights, base)
        size_bytes = len(config) + weights.num_bytes
        async with self._database.read() as session:
            repository = AdapterRepository(session, tenant)
            known = await repository.version_of_digest(name, inspected.digest)
            next_number = await repository.next_number(name)
            if is_dry_run:
                if known is not None:
                    return Published(await repository.version_record(*known), is_new=False)
                return Published(self._preview(tenant, name, inspected, size_bytes), is_new=True)
            if known is None:
                # What will be refused keeps no bytes, and the engine isn't asked. What counts is the look under the lock below.
                now = self._clock()
                await check_quota(
                    session,
                    repository,
                    (await repository.tenant_row()).limits,
                    now,
                    is_new_adapter=not await repository.has_adapter(name),
                    size_bytes=size_bytes,
                    is_counted=False,
                    blob=weights.digest,
                    restorable_since=now - self._retention,
                )
        had_damage = known is not None and is_damaged(known[1].checks)
        config_blob, weights_blob = Digest(hashlib.sha256(config).hexdigest()), weights.digest
        # Of an equal version that other files hold, these are not needed. The same files are written again: what is acknowledged here
        # is there, though what lay there may have been damaged unnoticed.
        is_kept = (
            known is None or had_damage or (config_blob, weights_blob) == (known[1].config_blob, known[1].weights_blob)
        )
        if is_kept:
            await keep(self._database, (config_blob, weights_blob))
            await asyncio.to_thread(self._commit, config, weights)
        elif known is not None:
            config_blob, weights_blob = Digest(known[1].config_blob), Digest(known[1].weights_blob)
        parity = None
        if known is None or had_damage:
            ref = AdapterRef(
                tenant=tenant,
                name=name,
                # For people: another upload may take the number first.
                version=next_number if known is None else known[1].number,
                digest=inspected.digest,
                config_blob=config_blob,
                weights_blob=weights_blob,
            )
            parity = await self._certificates.check_upload(ref)
        if is_kept:
            await keep_stored(self._database, self._store, (config_blob, weights_blob))
        now = self._clock()
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            repository = AdapterRepository(session, tenant)
            limits = (await repository.lock_tenant()).limits
            adapter, is_new_adapter = await repository.adapter_to_publish(name, now)
            found = await repository.version_of_digest(name, inspected.digest)
            if found is None:
                if known is not None and parity is None:
                    # what it was found to be went with it: new, it needs a certificate of its own
                    raise Overloaded(
                        f"{name}@{known[1].number} has these bytes, and was deleted meanwhile.",
                        hint="Send the same request again.",
                        retry_after_s=1,
                    )
                if parity is not None and parity.status == SKIPPED:
                    failure = await self._certificates.known_failure(
                        session, tenant, inspected.digest, Digest(base.digest)
                    )
                    parity = failure or parity
                await check_quota(
                    session,
                    repository,
                    limits,
                    now,
                    is_new_adapter=is_new_adapter,
                    size_bytes=size_bytes,
                    blob=weights_blob,
                    restorable_since=now - self._retention,
                )
                version = repository.add_version(
                    adapter,
                    now,
                    actor,
                    digest=inspected.digest,
                    config_blob=config_blob,
                    weights_blob=weights_blob,
                    base_digest=base.digest,
                    size_bytes=size_bytes,
                    rank=inspected.rank,
                    target_modules=list(inspected.target_modules),
                    dtype=inspected.dtype,
                    state=READY if parity is None else parity.state,
                    checks=list(_checks(inspected, parity)),
                )
                repository.touch(adapter, now)
                record_change(
                    session,
                    repository,
                    "version.publish",
                    f"{name}@{version.number}",
                    actor=actor,
                    now=now,
                    digest=version.digest,
                    size_bytes=size_bytes,
                    state=version.state,
                )
            else:
                version = found[1]
                if is_kept and is_damaged(version.checks):
                    mend(version, config_blob, weights_blob, size_bytes, parity)
                    repository.touch(adapter, now)
                    record_change(
                        session,
                        repository,
                        "version.mend",
                        f"{name}@{version.number}",
                        actor=actor,
                        now=now,
                        digest=version.digest,
                        state=version.state,
                    )
            if is_promoting and version.state != QUARANTINED:
                await point_alias(session, repository, adapter, LIVE, version.number, actor=actor, now=now)
            await session.flush()
            published = Published(await repository.version_record(adapter, version), is_new=found is None)
            if once is not None:
                await once.finish(session, published)
            faults.hit("registry.before_commit")
        faults.hit("registry.after_commit")
        self._on_change(tenant, name)
        return published

    def _commit(self, config: bytes, weights: Weights) -> None:
        staged_config = self._store.stage()
        try:
            staged_config.write(config)
            staged_config.commit()
        except BaseException:
            staged_config.discard()
            raise
        weights.commit()

    def _preview(self, tenant: TenantId, name: str, inspected: Inspected, size_bytes: int) -> VersionRecord:
        return VersionRecord(
            tenant=tenant,
            name=name,
            version=None,
            digest=inspected.digest,
            config_blob=Digest(""),
            weights_blob=Digest(""),
            state=CHECKED,
            size_bytes=size_bytes,
            rank=inspected.rank,
            target_modules=inspected.target_modules,
            dtype=inspected.dtype,
            aliases=(),
            created_at=self._clock(),
            checks=_checks(inspected, self._certificates.check_dry_run()),
            revision=0,
        )


def _checks(inspected: Inspected, parity: Parity | None) -> tuple[Mapping[str, Any], ...]:
    return inspected.checks if parity is None else (*inspected.checks, parity.as_check())


def _inspect(config: bytes, weights: Weights, base: BaseSpec) -> Inspected:
    return inspect_upload(config, weights.read(), base)
