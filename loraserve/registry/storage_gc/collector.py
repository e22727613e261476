"""The garbage collector.

It deletes blobs that nothing refers to, concurrently with everything else. It takes three steps,
each safe during publishing (`loraserve.registry.blob_references`) and with another server's
collector: an unreferenced blob becomes a candidate; it remains one for `LIMITS.gc_grace_s`; then it
is locked, in a transaction that looks for references again, and deleted. Rows of deleted versions
stay: only their bytes are deleted, after the retention.

A pass also counts what every tenant stores, and sets kept totals right that differ
(`loraserve.registry.storage_totals`): one server at a time may do it.

The collector touches only a store that is known to be this registry's
(`loraserve.registry.storage_gc.store_claim`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from sqlalchemy import select

from adapters_store.base import BlobStore
from loraserve import faults
from loraserve.background import BackgroundTask
from loraserve.db.leases import LeaseHolder, SightingAges
from loraserve.db.models import GcCandidate, Upload
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import BlobNotFound, StorageError
from loraserve.limits import LIMITS
from loraserve.registry.blob_references import add_gc_candidates, referenced
from loraserve.registry.storage_gc.deletion_locks import DeletionLock, DeletionLocks
from loraserve.registry.storage_gc.store_claim import StoreClaim
from loraserve.registry.storage_totals import check_totals
from loraserve.registry.uploads.chunks import remove_upload
from loraserve.types import Digest

logger = logging.getLogger(__name__)

LEASE = "gc"
_LEASE_LENGTH = timedelta(seconds=120)
_RENEW_S = 30.0
"""Time for which a lease isn't renewed: a pass over a million blobs takes thousands of batches."""
# Few are locked at a time: a publish that needs one of them waits for all of them.
_LISTED_AT_ONCE, _DELETED_AT_ONCE, _EXPIRED_AT_ONCE = 400, 8, 50
_MAX_FAILURES = 3
"""Failures that end a pass, so that an unreachable store isn't tried for every blob."""
_FIRST_PASS_S = 60.0


class Collector:
    """Collects periodically, on one server at a time.

    Args:
        retention_s: time for which the bytes of deleted versions are retained.
        monotonic: clock that measures the grace period too, starting when this process first saw
            the candidate, so that a jump of the wall clock doesn't end it.
    """

    def __init__(
        self,
        database: Database,
        store: BlobStore,
        claim: StoreClaim,
        *,
        retention_s: float,
        grace_s: float = LIMITS.gc_grace_s,
        clock: Clock = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_passes = 0
        self.num_blobs = 0
        """Blobs deleted since the start."""
        self.num_bytes = 0
        """Bytes deleted since the start."""
        self.num_gc_candidates = 0
        """Candidates at the last pass."""
        self.num_wrong_totals = 0
        """Totals of tenants that were set right since the start."""
        self.locks = DeletionLocks(database, monotonic=monotonic)
        self._database = database
        self._store = store
        self._claim = claim
        self.retention = timedelta(seconds=retention_s)
        """Time for which the bytes of deleted versions are retained, from the next use on."""
        self._grace_s = grace_s
        self._clock = clock
        self._monotonic = monotonic
        self._lease = LeaseHolder(database, _LEASE_LENGTH, clock=clock)
        self._renewed_at_s = -math.inf
        self._candidates: SightingAges[tuple[Digest, datetime]] = SightingAges(monotonic)
        self._task = BackgroundTask(
            "collector",
            self.collect,
            lambda: LIMITS.gc_interval_s,
            failure="collecting unreferenced blobs stopped early",
            logger=logger,
            first_delay_s=min(_FIRST_PASS_S, LIMITS.gc_interval_s),
        )

    def start(self) -> None:
        """Collect from now on, until `close`."""
        self._task.start()
        # A task of its own: a pass over a large store takes long, and a request may wait for an
        # abandoned lock.
        self.locks.start()

    async def close(self) -> None:
        """Stop collecting. The blobs that were being deleted are gone or still listed."""
        await asyncio.gather(self._task.close(), self.locks.close())

    async def collect(self) -> bool:
        """Make one pass.

        Delete expired uploads, list unreferenced blobs, and delete those whose grace period is
        over; then check the tenants' totals.

        Returns:
            Whether the pass was completed; False if another server is collecting.

        Raises:
            StoreMismatch: the store isn't known to be this registry's; nothing was listed or
                deleted.
            DatabaseUnavailable, StorageError
        """
        self._renewed_at_s = -math.inf
        if not await self._renew():
            return False
        await self._claim.renew()
        await self._delete_expired_uploads()
        if not await self._list_candidates():
            return False
        await self._update_ages()
        # the listing of a large store takes long
        await self._claim.look()
        is_done = await self._delete_due() and await self._check_totals()
        self.num_passes += is_done
        return is_done

    async def _renew(self) -> bool:
        """Take or renew the lease, unless it was renewed just now; return whether it is held."""
        now_s = self._monotonic()
        if now_s - self._renewed_at_s < _RENEW_S:
            return True
        is_held = await self._lease.acquire(LEASE)
        self._renewed_at_s = now_s if is_held else -math.inf
        return is_held

    async def _check_totals(self) -> bool:
        """Check the tenants' totals; return False if another server took the lease."""
        async for num_wrong in check_totals(self._database):
            self.num_wrong_totals += num_wrong
            if not await self._renew():
                return False
        return True

    async def _delete_expired_uploads(self) -> None:
        while True:
            now = self._clock()
            async with self._database.write(frees_space=True) as session:
                query = select(Upload).where(Upload.expires_at <= now).limit(_EXPIRED_AT_ONCE)
                rows = (await session.scalars(query.with_for_update(skip_locked=True))).all()
                for row in rows:
                    await remove_upload(session, row, now)
            if len(rows) < _EXPIRED_AT_ONCE:
                return

    async def _list_candidates(self) -> bool:
        """Make all unreferenced blobs of the store candidates.

        Return False if another server took the lease.
        """
        digests = self._store.iter_digests()
        while batch := await asyncio.to_thread(_take, digests, _LISTED_AT_ONCE):
            now = self._clock()
            async with self._database.read() as session:
                needless = set(batch) - await referenced(session, batch, now, self.retention)
            if needless:
                async with self._database.write(frees_space=True) as session:
                    await add_gc_candidates(session, needless, now)
            if not await self._renew():
                return False
        return True

    async def _update_ages(self) -> None:
        """Update the candidates' ages."""
        async with self._database.read() as session:
            rows = (await session.execute(select(GcCandidate.digest, GcCandidate.listed_at))).all()
        self._candidates.update((Digest(digest), listed_at) for digest, listed_at in rows)
        self.num_gc_candidates = len(rows)

    async def _delete_due(self) -> bool:
        """Delete the candidates whose grace period is over.

        Return False if another server took the lease.
        """
        due = [digest for digest, _ in self._candidates.older_than(self._grace_s)]
        # shuffled, so that blobs that can't be deleted don't block the others in every pass
        random.shuffle(due)
        num_failures = 0
        while due and num_failures < _MAX_FAILURES:
            if not await self._renew():
                return False
            batch, due = due[:_DELETED_AT_ONCE], due[_DELETED_AT_ONCE:]
            # a deletion that has begun is completed even if this task is cancelled
            deleted = await _completed(self._delete(batch))
            due += deleted.left
            num_failures += deleted.has_failed
        return True

    async def _delete(self, batch: Sequence[Digest]) -> _Deleted:
        """Delete the unreferenced blobs of `batch`."""
        grace = timedelta(seconds=self._grace_s)
        async with self.locks.hold(batch, self._clock(), grace=grace, retention=self.retention) as lock:
            deleted = await asyncio.to_thread(self._delete_blobs, lock)
            faults.hit("gc.after_delete")
        return deleted

    def _delete_blobs(self, lock: DeletionLock) -> _Deleted:
        left: Sequence[Digest] = ()
        has_failed = False
        for index, digest in enumerate(lock.digests):
            try:
                num_bytes = self._store.num_bytes(digest)
                # The last check before the deletion: a process that was stopped for long has lost
                # its lock.
                if not lock.has_time(self._monotonic(), self._clock()):
                    left, has_failed = lock.digests[index:], index == 0
                    break
                self._store.delete(digest)
            except BlobNotFound:
                lock.gone.append(digest)
            except StorageError as error:
                # It stays a candidate for the next pass. The store may be unreachable: release the
                # lock now.
                logger.warning("the unreferenced blob %s can't be deleted: %s", digest, error)
                left, has_failed = lock.digests[index + 1 :], True
                break
            else:
                lock.gone.append(digest)
                self.num_blobs += 1
                self.num_bytes += num_bytes
        if lock.gone:
            logger.info("%d unreferenced blobs are deleted", len(lock.gone))
        return _Deleted(left, has_failed)


@dataclass(frozen=True, slots=True)
class _Deleted:
    """Outcome of deleting a batch."""

    left: Sequence[Digest]
    """Blobs that weren't tried."""
    has_failed: bool
    """Whether the store failed, or there was no time for any blob."""


async def _completed(work: Coroutine[Any, Any, _Deleted]) -> _Deleted:
    """Await `work` and complete it even if the caller is cancelled.

    So no deletion stays locked.
    """
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            # retrieved, so that asyncio doesn't warn
            running.exception()
        raise


def _take(digests: Iterator[Digest], count: int) -> list[Digest]:
    return list(islice(digests, count))
