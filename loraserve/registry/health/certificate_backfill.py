"""Certificate backfill.

It verifies in the background what was published without a certificate, or verified on other setups.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, Text, cast, not_, or_, select
from ulid import ULID

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

LEASE, FULL_LEASE = "late-certificates", "late-certificates-all"
"""Beginnings of the leases' names; each base and setup has leases of its own, see `_lease_of`."""
ACTOR = "server"
RETRY_S, MAX_RETRY_S = 60.0, 3600.0
"""Delay before a failed verification is repeated, doubled with each consecutive failure,
and its maximum.
"""
_LEASE_LENGTH = timedelta(seconds=3 * LIMITS.verification_timeout_s)
"""Length of the lease, which is renewed before each version.

A verification and the pause after it take two thirds at most.
"""
_FULL_INTERVAL_S = 3600.0
"""Seconds after which all versions are looked at again, by one server of all.

Other sweeps look at new versions and at those that are left: of a million versions, a look at all
takes seconds of the database's time.
"""
_RELEASE_S = 2.0
"""Time that the end of a server may take to let another one look at all versions."""
_OVERLAP = timedelta(minutes=15)
"""Age of versions that a sweep takes for new although an earlier one has begun after them.

Longer than a publish takes from its version's id to the commit, and than servers' clocks differ.
"""
_NUM_TIME_DIGITS = 10
"""Digits of a ULID that are its time."""
_NUM_DIGITS = 32
"""Digits of a hash in a lease's name: the column has room for 63 characters."""
_WINDOW = 2000
"""Versions that one statement looks at."""


@dataclass(frozen=True, slots=True)
class _Due:
    id: str
    tenant: TenantId
    name: str
    number: int


class CertificateBackfill:
    """Verify versions without a certificate for this server's setup.

    They are verified one at a time and on one server of all. They were published while the engine
    was unreachable or busy, or verified with another quantization, dtype or arithmetic. They are
    served meanwhile.

    The outcome is that of `Certificates.verify`: a failure puts the version in quarantine. A
    version that made the engine die twice, counting its upload, isn't tried again, so that one push
    can't make the engine unavailable. Versions of another base and those to be verified on request
    stay as they are.

    Args:
        certificates: issues the certificates; no sweep is made while uploads aren't verified.
        base: returns the resident base; may raise `EngineUnavailable`.
        monotonic: clock that measures delays.
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
        """Verifications since the start, by verdict as in `Certificates`."""
        self._database = database
        self._certificates = certificates
        self._base = base
        self._monotonic = monotonic
        self._leases = LeaseHolder(database, _LEASE_LENGTH, clock=clock)
        self._full_leases = LeaseHolder(database, timedelta(seconds=_FULL_INTERVAL_S), clock=clock)
        self._clock = clock
        self._retries: RetrySchedule[str] = RetrySchedule(Backoff(RETRY_S, MAX_RETRY_S), monotonic)
        self._left: set[str] = set()
        """Ids of versions that were due and aren't verified: each sweep looks at them."""
        self._full_at: float | None = None
        """Monotonic time at which this server's last complete sweep over all versions began."""
        self._since = ""
        """Beginning of the ids of versions that are new to the last complete sweep."""
        self._setup: BaseSpec | None = None
        """Base of that sweep, with its setup."""
        self._task = BackgroundTask(
            "certificate backfill",
            self.sweep,
            lambda: LIMITS.late_certificates_interval_s,
            failure="verifying the versions without a certificate stopped early",
            logger=logger,
            level=logging.INFO,
            first_delay_s=None,
        )

    def start(self) -> None:
        """Verify from now on, until `close`, while uploads are verified too."""
        self._task.start()

    async def close(self) -> None:
        """Stop verifying. A verification under way is abandoned, and changes nothing."""
        await self._task.close()
        if self._setup is not None:
            with contextlib.suppress(LoraserveError, TimeoutError):
                async with asyncio.timeout(_RELEASE_S):
                    await self._full_leases.release(_lease_of(self._setup, FULL_LEASE))

    async def sweep(self) -> bool:
        """Verify each due version once, except those whose delay isn't over.

        One sweep an hour, on one server of all, looks at all versions; others at new ones, and at
        those that are left.

        Returns:
            Whether the sweep was made; False if uploads aren't verified, the base isn't loaded or
            another server is sweeping.

        Raises:
            EngineError, Overloaded: the engine or the database is unreachable or busy. The next
                sweep, or another server without delay, continues.
        """
        # looked at each time: a reload of the settings changes it
        if not self._certificates.is_at_upload:
            return False
        try:
            base = self._base()
        except EngineUnavailable:
            return False
        lease, full_lease = _lease_of(base, LEASE), _lease_of(base, FULL_LEASE)
        started, now = self._monotonic(), self._clock()
        if self._setup is None or _lease_of(self._setup, LEASE) != lease:
            # if another server has looked at all versions, it began within the lease's length
            self._setup, self._full_at = base, None
            self._since = _first_id(now - timedelta(seconds=_FULL_INTERVAL_S) - _OVERLAP)
        is_due = self._full_at is None or started - self._full_at >= _FULL_INTERVAL_S
        is_full = is_due and await self._full_leases.acquire(full_lease)
        seen: set[str] = set()
        after: str | None = "" if is_full else self._since
        left = [] if is_full else await self._look_again(base)
        while after is not None:
            found, after = await self._look(after, base)
            for due in (*left, *found):
                if due.id in seen:
                    continue
                seen.add(due.id)
                if not self._retries.is_due(due.id):
                    continue
                if not await self._leases.acquire(lease):
                    return False
                began = self._monotonic()
                failure = await self._verify(due)
                if failure is not None:
                    with contextlib.suppress(LoraserveError):
                        # the lease expires by itself if the database is unreachable
                        await self._leases.release(lease)
                        await self._full_leases.release(full_lease)
                # take half of the engine's time at most, whatever the outcome: it has requests to
                # answer
                await asyncio.sleep(self._monotonic() - began)
                if failure is not None:
                    # the next version would fail likewise
                    raise failure
            left = []
        self._retries.retain(seen)
        self._left.intersection_update(seen)
        if is_full:
            self._full_at = started
        self._since = _first_id(now - _OVERLAP)
        return True

    async def _look(self, after: str, base: BaseSpec) -> tuple[list[_Due], str | None]:
        """Find the due versions among the next `_WINDOW`, and the last id.

        None instead of the id if there are no more.
        """
        window = select(AdapterVersion.id).where(AdapterVersion.id > after).order_by(AdapterVersion.id)
        query = _due(base).where(AdapterVersion.id > after)
        async with self._database.read() as session:
            end = await session.scalar(window.offset(_WINDOW - 1).limit(1))
            rows = (await session.execute(query if end is None else query.where(AdapterVersion.id <= end))).all()
        return self._found(rows, base), end

    async def _look_again(self, base: BaseSpec) -> list[_Due]:
        """Find the versions that earlier sweeps left, as far as they are due still."""
        if not self._left:
            return []
        async with self._database.read() as session:
            query = _due(base).where(AdapterVersion.id.in_(sorted(self._left)[:_WINDOW]))
            rows = (await session.execute(query)).all()
        return self._found(rows, base)

    def _found(self, rows: Iterable[Any], base: BaseSpec) -> list[_Due]:
        setup = setup_of(base)
        found = [
            _Due(ident, TenantId(tenant), name, number)
            for ident, tenant, name, number, checks in rows
            if any(is_due(check, setup) for check in checks)
        ]
        self._left.update(due.id for due in found)
        return found

    async def _verify(self, due: _Due) -> LoraserveError | None:
        """Verify one version; return the error if the sweep should stop, otherwise None."""
        try:
            version = await self._certificates.verify(due.tenant, due.name, due.number, actor=ACTOR)
        except NotFound:
            # deleted meanwhile
            return None
        except LoraserveError as error:
            self._retries.fail(due.id)
            if isinstance(error, EngineDied):
                logger.error(
                    "the engine died while it verified %s@%d of tenant %s; a version is verified at most twice",
                    due.name,
                    due.number,
                    due.tenant,
                )
            if isinstance(error, EngineError | Overloaded):
                return error
            logger.info("%s@%d of tenant %s isn't verified yet: %s", due.name, due.number, due.tenant, error)
            return None
        except Exception:
            # a bug of ours, maybe with this version alone, must not stop the others
            self._retries.fail(due.id)
            logger.exception("verifying %s@%d of tenant %s failed", due.name, due.number, due.tenant)
            return None
        self._retries.succeed(due.id)
        self._left.discard(due.id)
        if (check := find_check(version.checks, CERTIFICATE)) is not None:
            self.num_by_verdict[verdict_of(check)] += 1
        if version.state == QUARANTINED:
            logger.error(
                "%s@%d of tenant %s is quarantined: its late certificate failed", due.name, due.number, due.tenant
            )
        return None


def _due(base: BaseSpec) -> Select[Any]:
    """Select the live versions of this base whose checks may be due, by id."""
    return (
        select(AdapterVersion.id, Adapter.tenant_id, Adapter.name, AdapterVersion.number, AdapterVersion.checks)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .where(AdapterVersion.deleted_at.is_(None), Adapter.deleted_at.is_(None), Tenant.deleted_at.is_(None))
        .where(AdapterVersion.state == READY, AdapterVersion.base_digest == base.digest)
        # a coarse filter that both databases support: most versions have a certificate
        .where(
            or_(
                cast(AdapterVersion.checks, Text).contains(f'"{SKIPPED}"', autoescape=True),
                not_(cast(AdapterVersion.checks, Text).contains(json.dumps(setup_of(base)), autoescape=True)),
            )
        )
        .order_by(AdapterVersion.id)
    )


def _first_id(at: datetime) -> str:
    """Compute the beginning of the ids that are made at that time."""
    return str(ULID.from_datetime(at))[:_NUM_TIME_DIGITS]


def _lease_of(base: BaseSpec, beginning: str) -> str:
    """Format the lease's name.

    It depends on base and setup: servers of other ones can't issue these certificates and must not
    block those that can.
    """
    subject = hashlib.sha256(f"{base.digest} {setup_of(base)}".encode()).hexdigest()
    return f"{beginning}/{subject[:_NUM_DIGITS]}"
