"""Certificates: the engine's word on how far a version's answers are from the reference's; asked for, stored, and heeded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
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
    FAILED,
    NUMERICS,
    PASSED,
    SKIPPED,
    STORED,
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
VERDICTS = (PASSED, FAILED, SKIPPED, REJECTED)
"""What is counted. `REJECTED`: the engine can never serve it."""


def verdict_of(check: Mapping[str, Any]) -> str:
    """One of `VERDICTS`: what was counted when `Certificates.verify` stored this check."""
    is_rejected = check["status"] == FAILED and check["certificate"] is None
    return REJECTED if is_rejected else str(check["status"])


class Certificates:
    """Asks the engine for certificates, and keeps what versions have.

    Args:
        certify: the engine's verification; None: nothing is verified.
        served_base: the base that it verifies on.
        names: what that base is called.
        is_at_upload: whether uploads are verified; otherwise versions are when somebody asks.
        on_change: told whose name it was after a new state is durable.
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
    ) -> None:
        self.num_by_verdict: Counter[str] = Counter()
        """Since the start."""
        self._database = database
        self._certify = certify
        self._served_base = served_base
        self._names = names
        self._is_at_upload = is_at_upload
        self._on_change = on_change
        self._clock = clock
        self._num_running: Counter[TenantId] = Counter()

    @property
    def is_at_upload(self) -> bool:
        """Whether uploads are verified."""
        return self._certify is not None and self._is_at_upload

    def check_dry_run(self) -> CertificateOutcome | None:
        """The outcome for bytes that aren't kept; None where nothing is verified."""
        return (
            None
            if self._certify is None
            else CertificateOutcome(SKIPPED, "a dry run stores nothing that could be served")
        )

    async def check_upload(self, ref: AdapterRef) -> CertificateOutcome | None:
        """The outcome for committed blobs that aren't a version yet; None where nothing is verified.

        An engine that is away or busy is no reason to refuse an upload: the outcome is `SKIPPED` then, and says why; `CertificateBackfill`
        asks again, but not for ever where the engine died of it.

        Raises:
            AdapterRejected: the engine can never serve it.
        """
        if self._certify is None:
            return None
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
        """The version with a new certificate, and in the state that follows from it; durable. This may end or begin a quarantine.

        What the engine can never serve (any more: its memory or its bounds may have changed) is quarantined too. A version of another
        base becomes one of this server's, if the caller says so and its certificate here passes; servers of the other base refuse it then.

        Args:
            is_rebasing: whether the version may leave its base for this server's.

        Raises:
            AdapterNotFound, VersionNotFound
            AdapterOfAnotherBase: it is of another base, and may not leave it; nothing was changed.
            AdapterRejected: it may, but doesn't fit this base, or its certificate failed; nothing was changed.
            Conflict: its base was changed meanwhile; nothing was.
            RateLimited: the tenant has `LIMITS.max_concurrent_verifications_per_tenant` under way.
            EngineUnavailable, Overloaded, AdapterUnavailable: there is no certificate now; nothing was changed.
            EngineDied: nor is there one, and a missing certificate's check says why.
            Replay: `once` was used before.
        """
        async with self._database.read() as session:
            if once is not None:
                await once.check(session)
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name)
            record = await repository.version_record(adapter, await repository.version(adapter, number))
            ref, known = record.ref, record.checks
        base = self._served_base.spec
        is_moving = record.base_digest != base.digest
        if is_moving and not is_rebasing:
            raise other_base_error(name, number, record.base_digest, known, base)
        with self._place(tenant):
            if is_moving:
                outcome = await self._ask_for_move(ref, record, base)
            else:
                outcome = await self._ask_to_stay(ref, actor)
        now = self._clock()
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name, is_locking=True)
            row = await repository.version(adapter, number)
            if row.base_digest != record.base_digest:
                raise Conflict(f"{name}@{number} was moved to another base meanwhile.", hint="Look at it again.")
            before = row.state
            # A new list: a change inside the old one would go unnoticed. The engine has read the stored bytes, and found them whole;
            # but what was reported since it was asked may be newer than what it read.
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
        """The failed certificate that a version of the tenant's with these very weights has on this base, under whatever name, deleted or not.

        For uploads whose own was skipped: pushing bytes again under another name must not end their quarantine. Of other tenants'
        versions nothing is said: who has the same bytes is nobody's business.
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
                        FAILED, f"{check['detail']} (found of the same weights as {name}@{number})"
                    )
        return None

    async def _record_death(self, tenant: TenantId, name: str, number: int, actor: str) -> None:
        """The version's missing certificate says that the engine died instead: all servers must know it, also after they are restarted."""
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

    async def _ask_to_stay(self, ref: AdapterRef, actor: str) -> CertificateOutcome:
        """Return the outcome for a version of this base; what the engine can never serve has failed."""
        try:
            return await self._ask(ref)
        except AdapterRejected as error:
            return CertificateOutcome(FAILED, error.message.rstrip("."))
        except EngineDied:
            await self._record_death(ref.tenant, ref.name, ref.version, actor)
            raise

    async def _ask_for_move(self, ref: AdapterRef, record: VersionRecord, base: BaseSpec) -> CertificateOutcome:
        """Return the outcome for a version of another base, which passed.

        Raises:
            AdapterRejected: it can't be served on this one. Nothing of that is kept: on its own base it is as good as before.
        """
        stays = f"{ref.name}@{ref.version} stays a version of sha256:{record.base_digest[:12]}"
        try:
            outcome = await self._ask(ref)
        except AdapterRejected as error:
            raise type(error)(f"{stays}: on {base.id}, {error.message}", problems=error.problems) from error
        if outcome.status == FAILED:
            raise AdapterRejected(f"{stays}: its certificate on {base.id} failed, {outcome.detail}.")
        return outcome

    async def _ask(self, ref: AdapterRef) -> CertificateOutcome:
        if self._certify is None:
            raise EngineUnavailable("This server has no engine that verifies.")
        try:
            async with asyncio.timeout(LIMITS.verification_timeout_s):
                certificate = await self._certify(ref)
                # after it: there may have been no base before
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
    def _place(self, tenant: TenantId) -> Iterator[None]:
        if self._num_running[tenant] >= LIMITS.max_concurrent_verifications_per_tenant:
            raise RateLimited(
                f"{self._num_running[tenant]} verifications of this tenant are under way, the most at a time.",
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


def _moved(checks: list[Mapping[str, Any]], row: AdapterVersion, base: BaseSpec) -> list[Mapping[str, Any]]:
    """Return the checks of a version that is moved to `base`: what they say of its base is new."""
    detail = (
        f"taken from base {row.base_digest[:12]} to {base.id} ({base.digest[:12]}) by request: it was verified there"
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
    """Note that the version's resource has changed, and audit by whose call; of a move, from which base to which."""
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
