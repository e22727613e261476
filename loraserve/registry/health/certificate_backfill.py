"""Late certificates: versions that were published while the engine couldn't verify them, or were verified on other setups, are verified in the background."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import Text, cast, not_, or_, select

from loraserve.background import BackgroundTask, Backoff, RetrySchedule
from loraserve.db.leases import LeaseHolder
from loraserve.db.models import Adapter, AdapterVersion, Tenant
from loraserve.db.session import Clock, Database
from loraserve.errors import EngineDied, EngineError, EngineUnavailable, LoraserveError, NotFound, Overloaded
from loraserve.limits import LIMITS
from loraserve.registry.health.certificates import Certificates, verdict_of
from loraserve.registry.health.checks import CERTIFICATE, SKIPPED, find_check
from loraserve.registry.health.outcome import is_due, setup_of
from loraserve.registry.records import QUARANTINED, READY
from loraserve.types import BaseSpec, TenantId

logger = logging.getLogger(__name__)

LEASE = "late-certificates"
"""Beginning of the lease's name; each base and setup has a lease of its own, see `_lease_of`."""
ACTOR = "server"
RETRY_S, MAX_RETRY_S = 60.0, 3600.0
"""A version of which there was no certificate isn't asked for again for this long; doubled each time in a row, up to the second."""
_LEASE_LENGTH = timedelta(seconds=3 * LIMITS.verification_timeout_s)
"""It is renewed before each version; one takes `LIMITS.verification_timeout_s` at most, and the pause after it as long."""
_NUM_DIGITS = 32
"""Digits of a hash in the lease's name: the column has room for 63 characters."""
_WINDOW = 2000
"""Versions that one statement looks at."""


@dataclass(frozen=True, slots=True)
class _Due:
    id: str
    tenant: TenantId
    name: str
    number: int


class CertificateBackfill:
    """Verifies what has no certificate for how this server computes its base; one version at a time, one server of all.

    It was published while the engine was away or busy; or the same weights were quantized to something else then, held in another dtype, or
    multiplied in another arithmetic. Certificates of the latter are issued anew, and the versions are served meanwhile.

    What comes of it is what `Certificates.verify` makes of it: a failed certificate is a quarantine. A version under which the engine
    died twice (its upload's try is one of them) isn't tried again: one push must not keep the engine from everybody. Versions that were left to whoever
    asks stay as they are, and so do those of another base: this server can't tell of them.

    Args:
        certificates: asked for them; where they aren't asked for at uploads, `start` begins nothing.
        base: the resident base; may raise `EngineUnavailable`.
        monotonic: by which pauses are measured.
    """

    def __init__(
        self,
        database: Database,
        certificates: Certificates,
        base: Callable[[], BaseSpec],
        *,
        clock: Clock,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_by_verdict: Counter[str] = Counter()
        """Since the start, by the verdict; as `Certificates` counts them."""
        self._database = database
        self._certificates = certificates
        self._base = base
        self._monotonic = monotonic
        self._leases = LeaseHolder(database, _LEASE_LENGTH, clock=clock)
        self._retries: RetrySchedule[str] = RetrySchedule(Backoff(RETRY_S, MAX_RETRY_S), monotonic)
        self._task = BackgroundTask(
            "certificate backfill",
            self.sweep,
            lambda: LIMITS.late_certificates_interval_s,
            failure="verifying versions without a certificate stopped early",
            logger=logger,
            level=logging.INFO,
            first_delay_s=None,
        )

    def start(self) -> None:
        """Verify from now on, until `close`; no-op if uploads aren't verified either."""
        if self._certificates.is_at_upload:
            self._task.start()

    async def close(self) -> None:
        """Stop verifying. A verification under way is abandoned, and changes nothing."""
        await self._task.close()

    async def sweep(self) -> bool:
        """Each version that is due has been asked for once, but for those whose pause isn't over.

        Returns:
            False: the base isn't loaded, or another server is at it.

        Raises:
            EngineError, Overloaded: the engine is away or busy again, or the database; the rest is for the next sweep, or for another
                server: nothing keeps it from going on.
        """
        try:
            base = self._base()
        except EngineUnavailable:
            return False
        lease = _lease_of(base)
        seen: set[str] = set()
        after: str | None = ""
        while after is not None:
            found, after = await self._look(after, base)
            for due in found:
                seen.add(due.id)
                if not self._retries.is_due(due.id):
                    continue
                if not await self._leases.acquire(lease):
                    return False
                began = self._monotonic()
                failure = await self._verify(due)
                if failure is not None:
                    with contextlib.suppress(LoraserveError):
                        # it ends by itself, where the database is what is away
                        await self._leases.release(lease)
                # the engine has requests to answer: half of its time at most, whatever came of it
                await asyncio.sleep(self._monotonic() - began)
                if failure is not None:
                    # it would be no better for the next one
                    raise failure
        self._retries.retain(seen)
        return True

    async def _look(self, after: str, base: BaseSpec) -> tuple[list[_Due], str | None]:
        """Those that are due among the next `_WINDOW` versions, and the last version's id; None: there are no more."""
        setup = setup_of(base)
        window = select(AdapterVersion.id).where(AdapterVersion.id > after).order_by(AdapterVersion.id)
        query = (
            select(AdapterVersion.id, Adapter.tenant_id, Adapter.name, AdapterVersion.number, AdapterVersion.checks)
            .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
            .join(Tenant, Tenant.id == Adapter.tenant_id)
            .where(AdapterVersion.deleted_at.is_(None), Adapter.deleted_at.is_(None), Tenant.deleted_at.is_(None))
            .where(AdapterVersion.id > after, AdapterVersion.state == READY, AdapterVersion.base_digest == base.digest)
            # a first sieve, in both databases' words: most versions have a certificate
            .where(
                or_(
                    cast(AdapterVersion.checks, Text).contains(f'"{SKIPPED}"', autoescape=True),
                    not_(cast(AdapterVersion.checks, Text).contains(json.dumps(setup), autoescape=True)),
                )
            )
            .order_by(AdapterVersion.id)
        )
        async with self._database.read() as session:
            end = await session.scalar(window.offset(_WINDOW - 1).limit(1))
            rows = (await session.execute(query if end is None else query.where(AdapterVersion.id <= end))).all()
        found = [
            _Due(ident, TenantId(tenant), name, number)
            for ident, tenant, name, number, checks in rows
            if any(is_due(check, setup) for check in checks)
        ]
        return found, end

    async def _verify(self, due: _Due) -> LoraserveError | None:
        """Returns why it is of no use to ask for another one now; None: go on."""
        try:
            version = await self._certificates.verify(due.tenant, due.name, due.number, actor=ACTOR)
        except NotFound:
            # deleted meanwhile
            return None
        except LoraserveError as error:
            self._retries.fail(due.id)
            if isinstance(error, EngineDied):
                logger.error(
                    "the engine died while it verified %s@%d of tenant %s, which is tried twice at most",
                    due.name,
                    due.number,
                    due.tenant,
                )
            if isinstance(error, EngineError | Overloaded):
                return error
            logger.info("%s@%d of tenant %s isn't verified yet: %s", due.name, due.number, due.tenant, error)
            return None
        except Exception:
            # a bug of ours, maybe with this version alone, must not keep the others from theirs
            self._retries.fail(due.id)
            logger.exception("verifying %s@%d of tenant %s failed", due.name, due.number, due.tenant)
            return None
        self._retries.succeed(due.id)
        if (check := find_check(version.checks, CERTIFICATE)) is not None:
            self.num_by_verdict[verdict_of(check)] += 1
        if version.state == QUARANTINED:
            logger.error(
                "%s@%d of tenant %s is quarantined: its late certificate failed", due.name, due.number, due.tenant
            )
        return None


def _lease_of(base: BaseSpec) -> str:
    """Return the lease's name.

    Servers of another base or setup can't make these certificates, and must not keep those from it that can.
    """
    subject = hashlib.sha256(f"{base.digest} {setup_of(base)}".encode()).hexdigest()
    return f"{LEASE}/{subject[:_NUM_DIGITS]}"
