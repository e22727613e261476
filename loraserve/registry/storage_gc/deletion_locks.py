"""Locks on blobs that a collector is deleting.

`loraserve.registry.blob_references.retain` waits for them. A lock is durable: a row lock would end
with its connection while the deleting thread continues. It ends with its deletions. A lock that its
collector abandoned, because it was killed or lost the database, ends after it was seen for
`LIMITS.gc_mark_s`. By then nothing is deleted under it: no deletion begins later than `DELETING_S`
after the lock, by both clocks of its server, and a store gives up a deletion within three minutes.
A server's heartbeat would show no more: a server without a connection deletes without a heartbeat.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import delete, select, update

from loraserve.background import BackgroundTask
from loraserve.db.leases import SightingAges
from loraserve.db.models import GcCandidate
from loraserve.db.session import Database
from loraserve.limits import LIMITS
from loraserve.registry.blob_references import referenced
from loraserve.types import Digest

logger = logging.getLogger(__name__)

DELETING_S = 5.0
"""Time from before a lock during which deletions may begin under it."""
_RELEASE_INTERVAL_S = 30.0


@dataclass(slots=True)
class DeletionLock:
    """Blobs that are being deleted."""

    at: datetime
    """Wall-clock time before the lock became visible; identifies the lock."""
    began_s: float
    """Monotonic time before the lock became visible."""
    digests: Sequence[Digest] = ()
    """Locked digests, sorted."""
    gone: list[Digest] = field(default_factory=list)
    """Deleted digests; filled by the holder."""

    def has_time(self, now_s: float, now: datetime) -> bool:
        """Check whether another deletion may begin, by the monotonic clock and by the wall clock.

        The monotonic clock may stand still while a machine is paused and others end the lock; the
        wall clock may be set back, after which the age of the lock is unknown.
        """
        return now_s - self.began_s < DELETING_S and timedelta(0) <= now - self.at < timedelta(seconds=DELETING_S)


class DeletionLocks:
    """Locks of one server, one at a time, and release of all servers' abandoned locks.

    Args:
        monotonic: clock that measures the age of locks; it must not jump.
    """

    def __init__(self, database: Database, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._monotonic = monotonic
        self._current: DeletionLock | None = None
        self._unreleased: set[tuple[Digest, datetime]] = set()
        """Our locks whose deletions finished but could not be cleared because the database was
        unreachable.
        """
        self._ages: SightingAges[tuple[Digest, datetime]] = SightingAges(monotonic)
        self._task = BackgroundTask(
            "deletion locks",
            self.release,
            lambda: min(_RELEASE_INTERVAL_S, LIMITS.gc_interval_s),
            failure="abandoned deletion locks can't be looked up",
            logger=logger,
            level=logging.INFO,
            first_delay_s=None,
        )

    def start(self) -> None:
        """Release abandoned locks from now on, until `close`."""
        self._task.start()

    async def close(self) -> None:
        """Stop releasing abandoned locks."""
        await self._task.close()

    @asynccontextmanager
    async def hold(
        self, digests: Collection[Digest], now: datetime, *, grace: timedelta, retention: timedelta
    ) -> AsyncIterator[DeletionLock]:
        """Lock the unreferenced digests that were candidates for `grace`.

        They are locked for the length of a with block. Afterwards neither deleted nor referenced
        blobs are candidates. If the block fails, `release` ends the lock.

        Raises:
            DatabaseUnavailable
        """
        lock = self._current = DeletionLock(now, self._monotonic())
        is_over = False
        try:
            await self._begin(lock, digests, now - grace, retention)
            # No transaction is open: a publish that needs a blob finds the lock, and afterwards the
            # blob either gone or still a candidate, never about to be deleted.
            yield lock
            await self._end(lock)
            is_over = True
        finally:
            self._current = None
            if not is_over:
                self._unreleased.update((digest, now) for digest in lock.digests)

    async def _begin(
        self, lock: DeletionLock, digests: Collection[Digest], cutoff: datetime, retention: timedelta
    ) -> None:
        async with self._database.write(frees_space=True) as session:
            query = select(GcCandidate.digest).where(
                GcCandidate.digest.in_(digests), GcCandidate.listed_at <= cutoff, GcCandidate.deleting_at.is_(None)
            )
            # Skip rows that a publish is removing from the candidates.
            due = [Digest(digest) for digest in (await session.scalars(query.with_for_update(skip_locked=True))).all()]
            needed = await referenced(session, due, lock.at, retention)
            # set before the commit, whose answer may be lost
            lock.digests = sorted(set(due) - needed)
            await session.execute(delete(GcCandidate).where(GcCandidate.digest.in_(needed)))
            marked = GcCandidate.digest.in_(lock.digests)
            await session.execute(update(GcCandidate).where(marked).values(deleting_at=lock.at))

    async def _end(self, lock: DeletionLock) -> None:
        if not lock.digests:
            return
        mine = GcCandidate.digest.in_(lock.digests) & (GcCandidate.deleting_at == lock.at)
        async with self._database.write(frees_space=True) as session:
            # lock in the same order as `retain` does
            await session.execute(select(GcCandidate.digest).where(mine).order_by(GcCandidate.digest).with_for_update())
            await session.execute(delete(GcCandidate).where(mine, GcCandidate.digest.in_(lock.gone)))
            await session.execute(update(GcCandidate).where(mine).values(deleting_at=None))

    async def release(self) -> int:
        """End abandoned locks, and return the number of their blobs, which stay candidates.

        Raises:
            DatabaseUnavailable
        """
        left = set(self._unreleased)
        query = select(GcCandidate.digest, GcCandidate.deleting_at).where(GcCandidate.deleting_at.is_not(None))
        async with self._database.read() as session:
            found = {(Digest(digest), at) for digest, at in (await session.execute(query)).all() if at is not None}
        self._ages.update(found)
        abandoned = left | set(self._ages.older_than(LIMITS.gc_mark_s))
        mine = None if self._current is None else self._current.at
        over = [(digest, at) for digest, at in sorted(found & abandoned) if at != mine]
        if over:
            async with self._database.write(frees_space=True) as session:
                for digest, at in over:
                    row = GcCandidate.digest == digest, GcCandidate.deleting_at == at
                    await session.execute(update(GcCandidate).where(*row).values(deleting_at=None))
            logger.info("%d blobs are no longer locked for deletion: their collector abandoned them", len(over))
        self._unreleased -= left
        return len(over)
