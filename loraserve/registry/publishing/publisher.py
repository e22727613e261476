"""The way in: from bytes, staged or in the store, to a version that resolves."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from adapters_store.base import BlobStore
from loraserve import faults
from loraserve.background import Pause, Throttle
from loraserve.db.idempotency import Once
from loraserve.db.models import AdapterVersion
from loraserve.db.session import Clock, Database
from loraserve.errors import Overloaded
from loraserve.registry.blob_references import retain, retain_stored
from loraserve.registry.changes import point_alias
from loraserve.registry.health.base_names import BaseNames
from loraserve.registry.health.certificates import Certificates
from loraserve.registry.health.checks import SKIPPED, is_corrupt
from loraserve.registry.health.inspection import Inspected, inspect_upload
from loraserve.registry.health.outcome import CertificateOutcome
from loraserve.registry.model_name import LIVE, check_adapter_name
from loraserve.registry.publishing.push import Push, Stored, Weights, add_version, checks_of, repair_version
from loraserve.registry.quota import check_quota
from loraserve.registry.records import CHECKED, QUARANTINED, Published, VersionRecord
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.served_base import other_base_error
from loraserve.types import AdapterRef, BaseSpec, Digest, TenantId

MAX_INSPECTIONS = 2
"""Uploads that are checked at the same time: each holds a thread, and its bytes in memory."""


class Publisher:
    """Publishes versions: blobs first (bytes, fsync, rename, fsync of the folder), then the certificate, the database's commit, and the answer.

    Args:
        base: the resident base model; may raise `EngineUnavailable` while there is none.
        certificates: asked for one per new version.
        on_change: told whose name it was after a publish is durable.
        retention_s: for so long the bytes of deleted versions are kept.
        throttle: pauses work while an engine computes on this machine's processors.
        names: what the base is called.
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
        throttle: Throttle,
        names: BaseNames,
    ) -> None:
        self._database = database
        self._certificates = certificates
        self._store = store
        self._base = base
        self._on_change = on_change
        self._retention = timedelta(seconds=retention_s)
        self._clock = clock
        self._throttle = throttle
        self._names = names
        self._inspections = asyncio.Semaphore(MAX_INSPECTIONS)

    def check_name(self, name: str) -> str:
        """`name` if an adapter may be called so; before a byte of its upload is read.

        Raises:
            InvalidRequest
        """
        return check_adapter_name(name, self._base().id)

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
        which takes stored bytes, and leaves nothing behind. `weights` that were staged stay the caller's to `Uploads.release`.

        Raises:
            AdapterRejected: the files can't be served, by their own look or by the engine's word; it lists every reason.
            AdapterOfAnotherBase: the version that has these bytes was made for another base. It stays that one's: servers of it may be there.
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
            inspected = await self._throttle.run_in_pieces(partial(_inspect, config, weights, base, self._names))
        push = Push(tenant, name, config, weights, base, inspected, actor, is_promoting)
        if is_dry_run:
            return await self._preview(push)
        known = await self._look(push)
        stored = await self._keep(push, known)
        outcome = await self._certify(push, known, stored)
        if stored.is_kept:
            await retain_stored(self._database, self._store, (stored.config_blob, stored.weights_blob))
        published = await self._record(push, known, stored, outcome, once)
        self._on_change(tenant, name)
        return published

    async def _preview(self, push: Push) -> Published:
        """What a publish would give, but for its certificate."""
        async with self._database.read() as session:
            repository = AdapterRepository(session, push.tenant)
            found = await repository.version_of_digest(push.name, push.inspected.digest)
            if found is not None:
                _check_base(push, found[1])
                return Published(await repository.version_record(*found), is_new=False)
        version = VersionRecord(
            tenant=push.tenant,
            name=push.name,
            version=None,
            digest=push.inspected.digest,
            config_blob=Digest(""),
            weights_blob=Digest(""),
            state=CHECKED,
            size_bytes=push.size_bytes,
            rank=push.inspected.rank,
            target_modules=push.inspected.target_modules,
            dtype=push.inspected.dtype,
            aliases=(),
            created_at=self._clock(),
            checks=checks_of(push.inspected, self._certificates.check_dry_run()),
            revision=0,
            base_digest=push.base.digest,
        )
        return Published(version, is_new=True)

    async def _look(self, push: Push) -> _Known:
        """What the registry has of it now.

        Raises:
            AdapterOfAnotherBase
            QuotaExceeded: what will be refused keeps no bytes, and the engine isn't asked. What counts is the look under the lock in `_record`.
        """
        async with self._database.read() as session:
            repository = AdapterRepository(session, push.tenant)
            found = await repository.version_of_digest(push.name, push.inspected.digest)
            next_number = await repository.next_number(push.name)
            if found is not None:
                _check_base(push, found[1])
            else:
                now = self._clock()
                await check_quota(
                    session,
                    repository,
                    (await repository.tenant_row()).limits,
                    now,
                    is_new_adapter=not await repository.has_adapter(push.name),
                    size_bytes=push.size_bytes,
                    is_counted=False,
                    blob=push.weights.digest,
                    restorable_since=now - self._retention,
                )
        return _Known(None if found is None else found[1], next_number)

    async def _keep(self, push: Push, known: _Known) -> Stored:
        """The version's blobs, in the store: these files, or those of an equal version that other files hold."""
        config_blob, weights_blob = Digest(hashlib.sha256(push.config).hexdigest()), push.weights.digest
        version = known.version
        # Of an equal version that other files hold, these are not needed. The same files are written again: what is acknowledged here
        # is there, though what lay there may have been damaged unnoticed.
        is_same = version is not None and (config_blob, weights_blob) == (version.config_blob, version.weights_blob)
        if version is not None and not known.was_corrupt and not is_same:
            return Stored(Digest(version.config_blob), Digest(version.weights_blob), is_kept=False)
        await retain(self._database, (config_blob, weights_blob))
        await asyncio.to_thread(self._commit, push.config, push.weights)
        return Stored(config_blob, weights_blob, is_kept=True)

    async def _certify(self, push: Push, known: _Known, stored: Stored) -> CertificateOutcome | None:
        """The certificate of a version that is new, or has new bytes in the place of damaged ones; None: it has its own, or nothing is verified.

        Raises:
            AdapterRejected: the engine can never serve it.
        """
        if known.version is not None and not known.was_corrupt:
            return None
        ref = AdapterRef(
            tenant=push.tenant,
            name=push.name,
            # For people: another upload may take the number first.
            version=known.next_number if known.version is None else known.version.number,
            digest=push.inspected.digest,
            config_blob=stored.config_blob,
            weights_blob=stored.weights_blob,
        )
        return await self._certificates.check_upload(ref)

    async def _record(
        self,
        push: Push,
        known: _Known,
        stored: Stored,
        outcome: CertificateOutcome | None,
        once: Once[Published] | None,
    ) -> Published:
        """The version, in the database: new, mended, or as it was; and named `LIVE`, if it is to be. In one transaction, which locks the tenant."""
        name, now = push.name, self._clock()
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            repository = AdapterRepository(session, push.tenant)
            limits = (await repository.lock_tenant()).limits
            adapter, is_new_adapter = await repository.adapter_to_publish(name, now)
            found = await repository.version_of_digest(name, push.inspected.digest)
            if found is None:
                if known.version is not None and outcome is None:
                    # what it was found to be went with it: new, it needs a certificate of its own
                    raise Overloaded(
                        f"{name}@{known.version.number} has these bytes, and was deleted meanwhile.",
                        hint="Send the same request again.",
                        retry_after_s=1,
                    )
                if outcome is not None and outcome.status == SKIPPED:
                    failure = await self._certificates.known_failure(
                        session, push.tenant, push.inspected.digest, Digest(push.base.digest)
                    )
                    outcome = failure or outcome
                await check_quota(
                    session,
                    repository,
                    limits,
                    now,
                    is_new_adapter=is_new_adapter,
                    size_bytes=push.size_bytes,
                    blob=stored.weights_blob,
                    restorable_since=now - self._retention,
                )
                version = add_version(session, repository, adapter, push, stored, outcome, now)
            else:
                version = found[1]
                _check_base(push, version)
                if stored.is_kept and is_corrupt(version.checks):
                    repair_version(session, repository, adapter, version, push, stored, outcome, now)
            if push.is_promoting and version.state != QUARANTINED:
                await point_alias(session, repository, adapter, LIVE, version.number, actor=push.actor, now=now)
            await session.flush()
            published = Published(await repository.version_record(adapter, version), is_new=found is None)
            if once is not None:
                await once.finish(session, published)
            faults.hit("registry.before_commit")
        faults.hit("registry.after_commit")
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


@dataclass(frozen=True, slots=True)
class _Known:
    """What the registry had before a publish; another may change it meanwhile."""

    version: AdapterVersion | None
    """The adapter's version that has these very weights."""
    next_number: int

    @property
    def was_corrupt(self) -> bool:
        return self.version is not None and is_corrupt(self.version.checks)


def _inspect(config: bytes, weights: Weights, base: BaseSpec, names: BaseNames, pause: Pause) -> Inspected:
    data = weights.read()
    pause()
    return inspect_upload(config, data, base, names=names, pause=pause)


def _check_base(push: Push, version: AdapterVersion) -> None:
    """Raises:
    AdapterOfAnotherBase: the version isn't of the base that the push was checked against.
    """
    if version.base_digest != push.base.digest:
        raise other_base_error(push.name, version.number, version.base_digest, version.checks, push.base)
