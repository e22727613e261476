"""Certificates: how far a version's answers are from the reference's.

The engine measures it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.idempotency import Once
from loraserve.db.models import Adapter, AdapterVersion
from loraserve.db.session import Clock, Database
from loraserve.errors import (
    AdapterRejected,
    AdapterUncertified,
    Conflict,
    EngineDied,
    EngineUnavailable,
    LoraserveError,
    Overloaded,
    RateLimited,
)
from loraserve.limits import LIMITS
from loraserve.registry.changes import record_change
from loraserve.registry.health.base_names import BaseNames
from loraserve.registry.health.checks import (
    CERTIFICATE,
    DEGRADED,
    FAILED,
    NOT_POSSIBLE,
    NUMERICS,
    PASSED,
    SKIPPED,
    STORED,
    find_check,
    replace_check,
    set_checks,
)
from loraserve.registry.health.inspection import base_check
from loraserve.registry.health.outcome import DIED_ONCE, ON_REQUEST, CertificateOutcome, after_death, setup_of
from loraserve.registry.records import VersionRecord
from loraserve.registry.repository import AdapterRepository
from loraserve.registry.served_base import BASE, ServedBase, other_base_error
from loraserve.types import AdapterRef, BaseSpec, Certificate, Digest, TenantId

Certify = Callable[[AdapterRef], Awaitable[Certificate]]
REJECTED = "rejected"
VERDICTS = (PASSED, DEGRADED, NOT_POSSIBLE, FAILED, SKIPPED, REJECTED)
"""Verdicts that are counted; with `REJECTED`, the engine can never serve the version."""


def verdict_of(check: Mapping[str, Any]) -> str:
    """Read the verdict, one of `VERDICTS`, of this check.

    It was counted when `Certificates.verify` stored the check.
    """
    is_rejected = check["status"] == FAILED and check["certificate"] is None
    return REJECTED if is_rejected else str(check["status"])


class Certificates:
    """Requests certificates from the engine, and stores them with the versions.

    Args:
        certify: verification by the engine; None: nothing is verified.
        served_base: base that the engine verifies on.
        names: names of that base.
        is_at_upload: whether uploads are verified; otherwise versions are verified on request.
        is_strict: whether an upload is refused unless its certificate is passed, and so an alias's
            move to a version.
        on_change: called with tenant and adapter name after a new state is durable.
    """

    def __init__(
        self,
        database: Database,
        certify: Certify | None,
        served_base: ServedBase,
        on_change: Callable[[TenantId, str], None],
        *,
        names: BaseNames,
        is_at_upload: bool,
        clock: Clock,
        is_strict: bool = False,
    ) -> None:
        self.num_by_verdict: Counter[str] = Counter()
        """Verifications since the start, by verdict."""
        self._database = database
        self._certify = certify
        self._served_base = served_base
        self._names = names
        self._is_at_upload = is_at_upload
        self.is_strict = is_strict
        """Whether an upload is refused unless its certificate is passed."""
        self._on_change = on_change
        self._clock = clock
        self._num_running: Counter[TenantId] = Counter()

    @property
    def is_at_upload(self) -> bool:
        """Whether uploads are verified."""
        return self._certify is not None and self._is_at_upload

    @is_at_upload.setter
    def is_at_upload(self, value: bool) -> None:
        self._is_at_upload = value

    def check_dry_run(self) -> CertificateOutcome | None:
        """Choose the outcome for a dry run; None if nothing is verified."""
        return (
            None
            if self._certify is None
            else CertificateOutcome(SKIPPED, "a dry run stores nothing that could be served")
        )

    async def check_upload(self, ref: AdapterRef) -> CertificateOutcome | None:
        """Request the certificate of committed blobs that aren't a version yet.

        Return None if nothing is verified. If the engine is unreachable or busy, the upload isn't
        refused: the outcome is `SKIPPED` with the reason, and `CertificateBackfill` tries again,
        with a limit if the engine died. A strict server refuses it, and an upload whose certificate
        is degraded or wasn't possible.

        Raises:
            AdapterRejected: the engine can never serve the adapter.
            AdapterUncertified: the server is strict, and the certificate isn't passed.
            EngineUnavailable, Overloaded: the server is strict, and there is no certificate now.
        """
        if self._certify is None:
            return None
        if self.is_strict:
            outcome = await self._ask(ref)
            if outcome.status in (DEGRADED, NOT_POSSIBLE):
                raise _uncertified(outcome)
            return outcome
        if not self._is_at_upload:
            self.num_by_verdict[SKIPPED] += 1
            return CertificateOutcome(SKIPPED, ON_REQUEST)
        try:
            return await self._ask(ref)
        except AdapterRejected:
            raise
        except EngineDied:
            self.num_by_verdict[SKIPPED] += 1
            return CertificateOutcome(SKIPPED, DIED_ONCE)
        except LoraserveError as error:
            self.num_by_verdict[SKIPPED] += 1
            return CertificateOutcome(SKIPPED, error.message.rstrip("."))

    def check_promotion(self, name: str, number: int, checks: Iterable[Mapping[str, Any]]) -> None:
        """Check that an alias may point to the version.

        A certificate that was skipped may still come; a failed one is a quarantine anyway.

        Raises:
            AdapterUncertified: the server is strict, and the certificate is degraded, or wasn't
                possible.
        """
        check = find_check(checks, CERTIFICATE)
        if self.is_strict and check is not None and check["status"] in (DEGRADED, NOT_POSSIBLE):
            verdict = str(check["status"]).replace("_", " ")
            raise AdapterUncertified(
                f"The certificate of {name}@{number} is {verdict}, and this server's aliases point to passed versions "
                f"only (--strict-certificates): {check['detail']}.",
                hint=f"Point the alias at another version, use {name}@{number} itself, or verify it again where the "
                f"base is served with a finer --quantize: loraserve adapter verify {name}@{number}",
            )

    async def verify(
        self,
        tenant: TenantId,
        name: str,
        number: int,
        *,
        actor: str,
        is_rebasing: bool = False,
        once: Once[VersionRecord] | None = None,
    ) -> VersionRecord:
        """Issue a new certificate for the version, and set its state durably.

        This may begin or end a quarantine. A version that the engine can never serve, or not any
        more, is quarantined too. A version of another base moves to this server's base if the
        caller allows it and the certificate passes; servers of the other base refuse it from then
        on.

        Args:
            is_rebasing: whether the version may leave its base for this server's.

        Raises:
            AdapterNotFound, VersionNotFound
            AdapterOfAnotherBase: the version is of another base and may not move; nothing was
                changed.
            AdapterRejected: the move failed: the version doesn't fit, or its certificate failed;
                nothing was changed.
            Conflict: another call moved the version meanwhile; nothing was changed.
            RateLimited: the tenant runs `LIMITS.max_concurrent_verifications_per_tenant` already.
            EngineUnavailable, Overloaded, AdapterUnavailable: there is no certificate now; nothing
                was changed.
            EngineDied: there is no certificate; a missing certificate's check gives this reason.
            Replay: `once` was used before.
        """
        async with self._database.read() as session:
            if once is not None:
                await once.check(session)
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name)
            name = adapter.name
            record = await repository.version_record(adapter, await repository.version(adapter, number))
            ref, known = record.ref, record.checks
        base = self._served_base.spec
        is_moving = record.base_digest != base.digest
        if is_moving and not is_rebasing:
            raise other_base_error(name, number, record.base_digest, known, base)
        with self._slot(tenant):
            if is_moving:
                outcome = await self._certify_move(ref, record, base)
            else:
                outcome = await self._certify_in_place(ref, actor)
        now = self._clock()
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name, is_locking=True)
            row = await repository.version(adapter, number)
            if row.base_digest != record.base_digest:
                raise Conflict(
                    f"{name}@{number} was moved to another base while it was verified.",
                    hint="Show it again, then retry.",
                )
            before = row.state
            # The engine has read whole bytes, which answers earlier reports; reports made since may
            # be newer than its read.
            answered = [check for check in row.checks if check["name"] in (STORED, NUMERICS) and check in known]
            checks = [check for check in row.checks if check not in answered]
            if is_moving:
                checks = [dict(check) for check in _moved(self._names.again(checks, base), row, base)]
                row.base_digest = base.digest
            else:
                outcome = outcome.after(row.checks)
            set_checks(row, replace_check(checks, outcome.as_check()))
            _note(
                session,
                repository,
                adapter,
                row,
                now,
                actor=actor,
                verdict=outcome.status,
                before=before,
                base_before=record.base_digest if is_moving else None,
            )
            await session.flush()
            record = await repository.version_record(adapter, row)
            if once is not None:
                await once.finish(session, record)
        self._on_change(tenant, name)
        return record

    async def known_failure(
        self, session: AsyncSession, tenant: TenantId, digest: Digest, base_digest: Digest
    ) -> CertificateOutcome | None:
        """Find the failed certificate of the tenant's same weights on this base.

        It may be of any version, deleted or not. Used for uploads whose own certificate was
        skipped: pushing the bytes under another name must not end their quarantine. Other tenants'
        versions aren't consulted, so as not to reveal that they have the same bytes.
        """
        query = (
            select(Adapter.name, AdapterVersion.number, AdapterVersion.checks)
            .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
            .where(
                Adapter.tenant_id == tenant, AdapterVersion.digest == digest, AdapterVersion.base_digest == base_digest
            )
            .order_by(AdapterVersion.created_at.desc())
        )
        for name, number, checks in (await session.execute(query)).all():
            for check in checks:
                if check["name"] == CERTIFICATE and check["status"] == FAILED:
                    return CertificateOutcome(
                        FAILED, f"{check['detail']} (found for the same weights as {name}@{number})"
                    )
        return None

    async def _record_death(self, tenant: TenantId, name: str, number: int, actor: str) -> None:
        """Store in the version's missing certificate that the engine died.

        So all servers have it, also after restarts.
        """
        now = self._clock()
        async with self._database.write() as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name, is_locking=True)
            row = await repository.version(adapter, number)
            setup = setup_of(self._served_base.spec)
            checks = [after_death(check, setup) for check in row.checks]
            if checks == row.checks:
                return
            set_checks(row, checks)
            _note(session, repository, adapter, row, now, actor=actor, verdict=SKIPPED, before=row.state)

    async def _certify_in_place(self, ref: AdapterRef, actor: str) -> CertificateOutcome:
        """Certify a version of this base.

        What the engine can never serve has failed.
        """
        try:
            return await self._ask(ref)
        except AdapterRejected as error:
            return CertificateOutcome(FAILED, error.message.rstrip("."))
        except EngineDied:
            await self._record_death(ref.tenant, ref.name, ref.version, actor)
            raise

    async def _certify_move(self, ref: AdapterRef, record: VersionRecord, base: BaseSpec) -> CertificateOutcome:
        """Certify a version of another base, which has to pass.

        Raises:
            AdapterRejected: it can't be served on this one. Nothing of that is kept: on its own
                base it is as good as before.
        """
        stays = f"{ref.name}@{ref.version} stays a version of sha256:{record.base_digest[:12]}"
        try:
            outcome = await self._ask(ref)
        except AdapterRejected as error:
            raise type(error)(f"{stays}: on {base.id}, {error.message}", problems=error.problems) from error
        if outcome.status == FAILED:
            raise AdapterRejected(f"{stays}: its certificate on {base.id} failed, {outcome.detail}.")
        if self.is_strict and outcome.status != PASSED:
            refusal = _uncertified(outcome)
            raise AdapterUncertified(f"{stays}: {refusal.message}", hint=refusal.hint)
        return outcome

    async def _ask(self, ref: AdapterRef) -> CertificateOutcome:
        if self._certify is None:
            raise EngineUnavailable("This server has no engine that can verify a version.")
        try:
            async with asyncio.timeout(LIMITS.verification_timeout_s):
                certificate = await self._certify(ref)
                # read now: before the certificate there may have been no base
                outcome = CertificateOutcome.of(certificate, setup_of(self._served_base.spec))
        except TimeoutError:
            raise Overloaded(
                f"The engine gave no certificate within {LIMITS.verification_timeout_s:g} s.", retry_after_s=10
            ) from None
        except AdapterRejected:
            self.num_by_verdict[REJECTED] += 1
            raise
        self.num_by_verdict[outcome.status] += 1
        return outcome

    @contextmanager
    def _slot(self, tenant: TenantId) -> Iterator[None]:
        if self._num_running[tenant] >= LIMITS.max_concurrent_verifications_per_tenant:
            raise RateLimited(
                f"{self._num_running[tenant]} verifications of this tenant are running, the maximum.",
                retry_after_s=5,
            )
        self._num_running[tenant] += 1
        try:
            yield
        finally:
            self._num_running[tenant] -= 1
            if not self._num_running[tenant]:
                # one entry per verifying tenant, not per tenant ever seen
                del self._num_running[tenant]


def _uncertified(outcome: CertificateOutcome) -> AdapterUncertified:
    verdict = outcome.status.replace("_", " ")
    return AdapterUncertified(
        f"Its certificate is {verdict}, and this server accepts passed ones only (--strict-certificates):"
        f" {outcome.detail}.",
        hint="Serve the base with a finer --quantize (int8, or none), or start the server without "
        "--strict-certificates.",
    )


def _moved(checks: list[Mapping[str, Any]], row: AdapterVersion, base: BaseSpec) -> list[Mapping[str, Any]]:
    """Update the checks of a version that is moved to `base`: its base's entry is new."""
    detail = (
        f"taken from base {row.base_digest[:12]} to {base.id} ({base.digest[:12]}) by request, "
        "after it was verified there"
    )
    return [base_check(base, detail) if check["name"] == BASE else check for check in checks]


def _note(
    session: AsyncSession,
    repository: AdapterRepository,
    adapter: Adapter,
    row: AdapterVersion,
    now: datetime,
    *,
    actor: str,
    verdict: str,
    before: str,
    base_before: str | None = None,
) -> None:
    """Increment the adapter's revision, and write the audit row of the verification."""
    repository.touch(adapter, now)
    moved = {} if base_before is None else {"base_before": base_before, "base_after": row.base_digest}
    record_change(
        session,
        repository,
        "version.verify",
        f"{adapter.name}@{row.number}",
        actor=actor,
        now=now,
        verdict=verdict,
        before=before,
        after=row.state,
        **moved,
    )
