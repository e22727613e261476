"""Coordination of the servers on one database.

There are leases, and the age of rows that other servers keep alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Generic, TypeVar

from sqlalchemy import delete, or_
from ulid import ULID

from loraserve.db.models import Lease
from loraserve.db.session import Clock, Database
from loraserve.db.upsert import upsert

K = TypeVar("K")


class LeaseHolder:
    """Hold of one server on the leases of a task that a single server does for all of them.

    A lease saves work and guards nothing: the task must be safe when two servers do it.

    Args:
        length: time after which a lease that isn't renewed ends.
    """

    def __init__(self, database: Database, length: timedelta, *, clock: Clock) -> None:
        self._database = database
        self._length = length
        self._clock = clock
        self._id = str(ULID())

    async def acquire(self, name: str) -> bool:
        """Take or renew the lease and return True; return False while another server holds it.

        Raises:
            DatabaseUnavailable
        """
        now = self._clock()
        row = {"name": name, "holder": self._id, "expires_at": now + self._length}
        is_free = or_(Lease.holder == self._id, Lease.expires_at <= now)
        async with self._database.write() as session:
            return bool(await upsert(session, Lease, [row], replace=("holder", "expires_at"), where=is_free))

    async def release(self, name: str) -> None:
        """Let another server take the lease at once; no-op if this one doesn't hold it.

        Raises:
            DatabaseUnavailable
        """
        async with self._database.write() as session:
            await session.execute(delete(Lease).where(Lease.name == name, Lease.holder == self._id))


class SightingAges(Generic[K]):
    """Ages of rows by this process's own clock: the time since each was first seen, without a gap.

    Clocks of other machines and jumps of the wall clock don't change them.

    Args:
        monotonic: clock in seconds.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._seen_at_s: dict[K, float] = {}

    def update(self, keys: Iterable[K]) -> None:
        """Note that exactly these keys exist now; a key that comes back later starts at age 0."""
        now_s = self._monotonic()
        self._seen_at_s = {key: self._seen_at_s.get(key, now_s) for key in keys}

    def older_than(self, age_s: float) -> list[K]:
        """List the keys that were first seen at least that many seconds ago.

        They are in the order of the last `update`.
        """
        now_s = self._monotonic()
        return [key for key, seen_at_s in self._seen_at_s.items() if now_s - seen_at_s >= age_s]
