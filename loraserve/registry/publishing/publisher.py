"""Publishing of versions: from staged or stored bytes to a version that resolves."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from adapters_store.base import BlobStore
from loraserve import faults
from loraserve.adapters.extra_files import NO_EXTRA_FILES, ExtraFiles
from loraserve.adapters.ir import SCORE
from loraserve.db.idempotency import Once
from loraserve.db.models import AdapterVersion
from loraserve.db.session import Clock, Database
from loraserve.errors import AlreadyExists, Overloaded
from loraserve.registry.blob_references import retain, retain_stored
from loraserve.registry.changes import point_alias
from loraserve.registry.health.certificates import Certificates
from loraserve.registry.health.checks import SKIPPED, is_corrupt
from loraserve.registry.health.outcome import CertificateOutcome
from loraserve.registry.model_name import LIVE
from loraserve.registry.publishing.conversion import with_container
from loraserve.registry.publishing.inspector import UploadInspector
from loraserve.registry.publishing.push import Push, Stored, Weights, add_version, checks_of, repair_version
from loraserve.registry.quota import check_quota
from loraserve.registry.records import CHECKED, QUARANTINED, Published, VersionRecord
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.served_base import other_base_error
from loraserve.registry.uploads.staging import BoundedBlob
from loraserve.registry.uploads.transfers import Uploads
from loraserve.types import AdapterRef, BaseSpec, Digest, TenantId


class Publisher:
    """Publish versions.

    First come the blobs, durably, then the certificate, the database's commit, and the answer.

    Args:
        base: the resident base model; may raise `EngineUnavailable` while there is none.
        inspector: inspects the files before anything is stored.
        certificates: issues the certificate of each new version.
        on_change: called with tenant and adapter name after a publish is durable.
        retention_s: time for which the bytes of deleted versions are retained.
        uploads: stages what uploads in other containers are converted to.
        check_free: raises `Conflict` if the tenant has something else of this name.
    """

    def __init__(
        self,
        database: Database,
        store: BlobStore,
        base: Callable[[], BaseSpec],
        inspector: UploadInspector,
        certificates: Certificates,
        on_change: Callable[[TenantId, str], None],
        *,
        retention_s: float,
        clock: Clock,
        uploads: Uploads,
        check_free: Callable[[TenantId, str], None],
    ) -> None:
        self._inspector = inspector
        self._check_free = check_free
        self._uploads = uploads
        self._database = database
        self._certificates = certificates
        self._store = store
        self._base = base
        self._on_change = on_change
        self.retention = timedelta(seconds=retention_s)
        """Time for which the bytes of deleted versions are retained, from the next use on."""
        self._clock = clock

    async def publish(
        self,
        tenant: TenantId,
        name: str,
        config: bytes,
        weights: Weights,
        *,
        actor: str,
        extras: ExtraFiles = NO_EXTRA_FILES,
        is_promoting: bool = True,
        is_dry_run: bool = False,
        is_new_name: bool = False,
        once: Once[Published] | None = None,
        on_stored: Callable[[], object] = lambda: None,
    ) -> Published:
        """Publish these files as a version: durable, checked against the base and certified.

        The alias `LIVE` moves to the version if `is_promoting`, unless its certificate failed: then
        it is quarantined. Publishing the same bytes again returns the existing version with its
        certificate, and moves `LIVE` to it. The bytes are written again, so that a corrupt version
        is repaired, gets a new certificate and leaves its quarantine. A dry run makes the same
        checks except for the certificate, which needs stored bytes, and leaves nothing behind. The
        caller still has to `Uploads.release` staged `weights`.

        Args:
            extras: files of the version for chats with it.
            is_new_name: refuse the files if the tenant has the adapter.
            on_stored: called once the bytes are in the store, before the certificate.

        Raises:
            AdapterRejected: the files can't be served, according to inspection or the engine; lists
                every reason.
            AdapterOfAnotherBase: the version with these bytes belongs to another base, which other
                servers may serve.
            InvalidRequest: the name isn't valid for an adapter.
            AlreadyExists: the tenant has the adapter, and `is_new_name`.
            Conflict: the name is an ephemeral adapter's, or differs in case only from another's.
            QuotaExceeded: another adapter or these bytes would exceed the tenant's quota.
            StorageFull, StorageError: the bytes can't be stored.
            Conflict: the bytes in the store are corrupt and must be uploaded again.
            Overloaded: the bytes were collected, or their version was deleted, meanwhile; the same
                request works again.
            Replay: `once` was used before.
        """
        self._inspector.check_name(name)
        if once is not None:
            async with self._database.read() as session:
                await once.check(session)
        self._check_free(tenant, name)
        base = self._base()
        stage = partial(self._uploads.stage_converted, tenant)
        converted = await self._inspector.convert(config, weights, base, stage, BoundedBlob.discard, extras=extras)
        if converted is None:
            inspected = await self._inspector.inspect(config, weights.read, base, tenant=tenant, extras=extras)
            push = Push(
                tenant, name, config, weights, base, inspected, actor, is_promoting, inspected.files, is_new_name
            )
            return await self._publish(push, once, on_stored, is_dry_run=is_dry_run)
        config, files = converted.config, converted.weights
        try:
            inspected = await self._inspector.inspect(config, files.read, base, tenant=tenant, extras=extras)
            inspected = with_container(inspected, converted.notes)
            push = Push(
                tenant,
                name,
                config,
                files,
                base,
                inspected,
                actor,
                is_promoting,
                inspected.files,
                is_new_name,
                weights.digest,
            )
            return await self._publish(push, once, on_stored, is_dry_run=is_dry_run)
        finally:
            await asyncio.to_thread(files.discard)

    async def _publish(
        self, push: Push, once: Once[Published] | None, on_stored: Callable[[], object], *, is_dry_run: bool
    ) -> Published:
        if is_dry_run:
            return await self._preview(push)
        known = await self._look(push)
        stored = await self._store_blobs(push, known)
        on_stored()
        outcome = await self._certify(push, known, stored)
        if stored.is_uploaded:
            await retain_stored(self._database, self._store, _blobs(push, stored.config_blob, stored.weights_blob))
        published = await self._record(push, known, stored, outcome, once)
        self._on_change(push.tenant, push.name)
        return published

    async def _preview(self, push: Push) -> Published:
        """Predict what a publish would return, without the certificate."""
        async with self._database.read() as session:
            repository = AdapterRepository(session, push.tenant)
            await repository.has_adapter(push.name)
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
            extras=push.inspected.extras,
        )
        return Published(version, is_new=True)

    async def _look(self, push: Push) -> _Known:
        """Read what the registry has before the publish.

        Check the quota early, so that a refused publish stores no bytes and doesn't occupy the
        engine. The check under the lock in `_record` is the one that counts.

        Raises:
            AlreadyExists, Conflict, AdapterOfAnotherBase, QuotaExceeded
        """
        async with self._database.read() as session:
            repository = AdapterRepository(session, push.tenant)
            is_known = await repository.has_adapter(push.name)
            if push.is_new_name and is_known:
                raise _has_name(push.name)
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
                    is_new_adapter=not is_known,
                    size_bytes=push.size_bytes,
                    is_counted=False,
                    blob=push.upload or push.weights.digest,
                    restorable_since=now - self.retention,
                )
        return _Known(None if found is None else found[1], next_number)

    async def _store_blobs(self, push: Push, known: _Known) -> Stored:
        """Store the files and return the version's blobs.

        An equal version's blobs are reused if they come from other files.
        """
        config_blob, weights_blob = Digest(hashlib.sha256(push.config).hexdigest()), push.weights.digest
        version = known.version
        # These files aren't needed if an equal version has others. The same files are written
        # again: the stored ones may have become corrupt unnoticed, and this call acknowledges that
        # they are there.
        is_same = version is not None and (config_blob, weights_blob) == (version.config_blob, version.weights_blob)
        if version is not None and not known.was_corrupt and not is_same:
            return Stored(Digest(version.config_blob), Digest(version.weights_blob), is_uploaded=False)
        await retain(self._database, _blobs(push, config_blob, weights_blob))
        await asyncio.to_thread(self._commit, (push.config, *push.extras.files), push.weights)
        return Stored(config_blob, weights_blob, is_uploaded=True)

    async def _certify(self, push: Push, known: _Known, stored: Stored) -> CertificateOutcome | None:
        """Request a certificate if the version is new or repaired.

        Return None if it has one or nothing is verified.

        Raises:
            AdapterRejected: the engine can never serve the version.
        """
        if known.version is not None and not known.was_corrupt:
            return None
        ref = AdapterRef(
            tenant=push.tenant,
            name=push.name,
            # Shown to people only: another upload may take the number first.
            version=known.next_number if known.version is None else known.version.number,
            digest=push.inspected.digest,
            config_blob=stored.config_blob,
            weights_blob=stored.weights_blob,
            has_head=SCORE in push.inspected.target_modules,
            extras=push.inspected.extras,
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
        """Write the version to the database, and move `LIVE`.

        The version is added, repaired or left as it is. All of it is one transaction, which locks
        the tenant.
        """
        name, now = push.name, self._clock()
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            repository = AdapterRepository(session, push.tenant)
            limits = (await repository.lock_tenant()).limits
            adapter, is_new_adapter = await repository.adapter_to_publish(name, now)
            if push.is_new_name and not is_new_adapter:
                raise _has_name(name)
            # an ephemeral load may have begun meanwhile
            self._check_free(push.tenant, name)
            found = await repository.version_of_digest(name, push.inspected.digest)
            if found is None:
                if known.version is not None and outcome is None:
                    # its certificate was deleted with it: a new version needs one of its own
                    raise Overloaded(
                        f"{name}@{known.version.number} has these bytes, and was deleted while the request ran.",
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
                    blob=push.upload or stored.weights_blob,
                    restorable_since=now - self.retention,
                )
                version = await add_version(session, repository, adapter, push, stored, outcome, now)
            else:
                version = found[1]
                _check_base(push, version)
                if stored.is_uploaded and is_corrupt(version.checks):
                    await repair_version(session, repository, adapter, version, push, stored, outcome, now)
            if push.is_promoting and version.state != QUARANTINED:
                # one that was there before; a new one's certificate was requested
                self._certificates.check_promotion(name, version.number, version.checks)
                await point_alias(session, repository, adapter, LIVE, version.number, actor=push.actor, now=now)
            await session.flush()
            published = Published(await repository.version_record(adapter, version), is_new=found is None)
            if once is not None:
                await once.finish(session, published)
            faults.hit("registry.before_commit")
        faults.hit("registry.after_commit")
        return published

    def _commit(self, files: Iterable[bytes], weights: Weights) -> None:
        for data in files:
            staged = self._store.stage()
            try:
                staged.write(data)
                staged.commit()
            except BaseException:
                staged.discard()
                raise
        weights.commit()


@dataclass(frozen=True, slots=True)
class _Known:
    """State of the registry before a publish; another publish may change it meanwhile."""

    version: AdapterVersion | None
    """The adapter's version with the same weights."""
    next_number: int

    @property
    def was_corrupt(self) -> bool:
        return self.version is not None and is_corrupt(self.version.checks)


def _blobs(push: Push, config_blob: Digest, weights_blob: Digest) -> tuple[Digest, ...]:
    """List the blobs of the pushed files."""
    extras = () if push.inspected.extras is None else push.inspected.extras.files
    return (config_blob, weights_blob, *(file.blob for file in extras))


def _has_name(name: str) -> AlreadyExists:
    return AlreadyExists(f'The tenant has an adapter "{name}" already.')


def _check_base(push: Push, version: AdapterVersion) -> None:
    """Check that the version is of the base that the push was checked against.

    Raises:
        AdapterOfAnotherBase: it isn't.
    """
    if version.base_digest != push.base.digest:
        raise other_base_error(push.name, version.number, version.base_digest, version.checks, push.base)
