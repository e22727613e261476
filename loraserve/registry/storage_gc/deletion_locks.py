"""Marks on what a collector is deleting: whoever wants such a blob waits for its end (`loraserve.registry.blob_references.keep`).

A lock is durable: the lock of a row would end with its connection, while the thread that deletes goes on. It ends with its deletions.
One that its collector left, since it was killed or couldn't reach the database, ends when it was seen for `LIMITS.gc_mark_s`: by then
nothing is deleted under it, also where its server lives. No deletion begins later than `DELETING_S` after the lock, by either clock of
its server, and a store gives one up within three minutes. A server's beats would say no more: one whose connection broke doesn't beat, and deletes.
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
"""From before a lock on: after so long no deletion is begun under it."""
_LOOK_S = 30.0


@dataclass(slots=True)
class DeletionLock:
    """Blobs that are being deleted."""

    at: datetime
    """By the wall clock, before it could be seen; by which it is told from other marks."""
    began_s: float
    """By the monotonic clock, before it could be seen."""
    digests: Sequence[Digest] = ()
    """Those that are marked; in order."""
    gone: list[Digest] = field(default_factory=list)
    """To be filled: those that are deleted."""

    def has_time(self, now_s: float, now: datetime) -> bool:
        """Whether another deletion may begin, by the monotonic clock and by the wall clock.

        The monotonic one may stand still while a machine is paused, and others have ended the lock meanwhile; the wall clock may be set
        back. Where it was, nobody knows how old the lock is.
        """
        return now_s - self.began_s < DELETING_S and timedelta(0) <= now - self.at < timedelta(seconds=DELETING_S)


class DeletionLocks:
    """The marks of one server, and its look at everybody's. One lock at a time.

    Args:
        monotonic: by which marks grow old: a clock that jumps must not end one.
    """

    def __init__(self, database: Database, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._monotonic = monotonic
        self._under_way: DeletionLock | None = None
        self._left: set[tuple[Digest, datetime]] = set()
        """This server's, whose deletions are over, but not they themselves: the database was away."""
        self._ages: SightingAges[tuple[Digest, datetime]] = SightingAges(monotonic)
        self._task = BackgroundTask(
            "deletion locks",
            self.release,
            lambda: min(_LOOK_S, LIMITS.gc_interval_s),
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
        """A lock for the length of a with block, on those of `digests` that nothing refers to and that were listed for `grace`.

        Afterwards those that are `gone` are off the list, and so is what something refers to. If the block fails, `release` ends the lock.

        Raises:
            DatabaseUnavailable
        """
        lock = self._under_way = DeletionLock(now, self._monotonic())
        is_over = False
        try:
            await self._begin(lock, digests, now - grace, retention)
            # No transaction is open: whoever wants to refer to one of these finds the lock, and afterwards finds the bytes gone or
            # still listed, never about to go.
            yield lock
            await self._end(lock)
            is_over = True
        finally:
            self._under_way = None
            if not is_over:
                self._left.update((digest, now) for digest in lock.digests)

    async def _begin(
        self, lock: DeletionLock, digests: Collection[Digest], cutoff: datetime, retention: timedelta
    ) -> None:
        async with self._database.write() as session:
            query = select(GcCandidate.digest).where(
                GcCandidate.digest.in_(digests), GcCandidate.listed_at <= cutoff, GcCandidate.deleting_at.is_(None)
            )
            # A row that a publish is taking off the list is left to it.
            due = [Digest(digest) for digest in (await session.scalars(query.with_for_update(skip_locked=True))).all()]
            needed = await referenced(session, due, lock.at, retention)
            # before the commit, whose answer may be lost
            lock.digests = sorted(set(due) - needed)
            await session.execute(delete(GcCandidate).where(GcCandidate.digest.in_(needed)))
            marked = GcCandidate.digest.in_(lock.digests)
            await session.execute(update(GcCandidate).where(marked).values(deleting_at=lock.at))

    async def _end(self, lock: DeletionLock) -> None:
        if not lock.digests:
            return
        mine = GcCandidate.digest.in_(lock.digests) & (GcCandidate.deleting_at == lock.at)
        async with self._database.write() as session:
            # in the order in which who wants them locks them
            await session.execute(select(GcCandidate.digest).where(mine).order_by(GcCandidate.digest).with_for_update())
            await session.execute(delete(GcCandidate).where(mine, GcCandidate.digest.in_(lock.gone)))
            await session.execute(update(GcCandidate).where(mine).values(deleting_at=None))

    async def release(self) -> int:
        """Marks that were left are ended; what was under them is listed still. Returns how many blobs.

        Raises:
            DatabaseUnavailable
        """
        left = set(self._left)
        query = select(GcCandidate.digest, GcCandidate.deleting_at).where(GcCandidate.deleting_at.is_not(None))
        async with self._database.read() as session:
            found = {(Digest(digest), at) for digest, at in (await session.execute(query)).all() if at is not None}
        self._ages.update(found)
        abandoned = left | set(self._ages.older_than(LIMITS.gc_mark_s))
        mine = None if self._under_way is None else self._under_way.at
        over = [(digest, at) for digest, at in sorted(found & abandoned) if at != mine]
        if over:
            async with self._database.write() as session:
                for digest, at in over:
                    row = GcCandidate.digest == digest, GcCandidate.deleting_at == at
                    await session.execute(update(GcCandidate).where(*row).values(deleting_at=None))
            logger.info("%d blobs are no longer marked as being deleted: their collector left them", len(over))
        self._left -= left
        return len(over)
