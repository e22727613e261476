"""Short-lived cache in front of the database.

It keeps the token path working during an outage.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from loraserve.errors import DatabaseUnavailable, Overloaded
from loraserve.limits import LIMITS

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

RETRY_S = 1.0
"""Seconds between attempts while the database is unreachable;
cached answers are returned at once meanwhile.
"""
_MAX_TIMEOUTS = 3
"""Maximum wait for an answer, in multiples of `timeout_s`,
even if the database answers other queries.
"""
_MAX_UNKNOWN, _MAX_UNKNOWN_PER_HOLDER = 4, 2
"""Concurrent look-ups of keys without a cached answer: fewer than the database's connections,
left to known keys.
"""
_LOOKS_PER_TIMEOUT = 20
_MAX_LOOK = 2
"""Cap on the counted length of one wait, in multiples of the polling interval; beyond it,
the event loop was busy.
"""


class _StillAway(DatabaseUnavailable):
    """The database was found unreachable a moment ago; doesn't prolong the outage."""


class _UnknownKeyLimiter:
    """Limits concurrent look-ups of unknown keys, in all and per holder.

    So a flood of them doesn't block others.
    """

    def __init__(self) -> None:
        self._in_all = asyncio.Semaphore(_MAX_UNKNOWN)
        self._holders: dict[Hashable, tuple[asyncio.Semaphore, int]] = {}
        """Semaphore of each holder, and the number of look-ups that hold it or wait for it."""

    @asynccontextmanager
    async def slot(self, holder: Hashable) -> AsyncIterator[None]:
        own, number = self._holders.get(holder) or (asyncio.Semaphore(_MAX_UNKNOWN_PER_HOLDER), 0)
        self._holders[holder] = own, number + 1
        try:
            async with own, self._in_all:
                yield
        finally:
            own, number = self._holders.pop(holder)
            if number > 1:
                self._holders[holder] = own, number - 1


class LookupCache(Generic[K, V]):
    """Cache of answers for `ttl_s`, extended by `grace_s` while the database is unreachable.

    Concurrent callers of a key share one look-up, and few unknown keys are looked up at a time.
    Errors aren't cached, so that new rows are found at once. `forget` takes effect at once, also on
    running look-ups.

    The database counts as unreachable from a look-up that failed or timed out until one succeeds,
    and no longer than one more attempt takes, so that stale answers end with the outage. Only time
    in which the event loop is free and the database silent counts for the timeout: a busy server
    waits for a database that answers.

    Args:
        silence_s: returns the time since the database last answered a query.
        is_cancellable: whether abandoned queries are cancelled; otherwise they run to their end.
    """

    def __init__(
        self,
        *,
        ttl_s: float,
        grace_s: float = LIMITS.outage_grace_s,
        timeout_s: float = 2.0,
        max_entries: int = 20_000,
        clock: Callable[[], float] = time.monotonic,
        silence_s: Callable[[], float] = lambda: math.inf,
        is_cancellable: bool = True,
    ) -> None:
        self._ttl_s = ttl_s
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._max_entries = max_entries
        self._clock = clock
        self._silence_s = silence_s
        self._is_cancellable = is_cancellable
        self._entries: OrderedDict[K, tuple[V, float]] = OrderedDict()
        self._flights: dict[K, asyncio.Task[V]] = {}
        self._failed_at: float | None = None
        self._retry: asyncio.Task[V] | None = None
        self._unknown_keys = _UnknownKeyLimiter()
        self._given_up: set[asyncio.Future[V]] = set()
        """Abandoned queries that haven't ended; with a silent database,
        cancelling takes a while itself.
        """

    async def get(self, key: K, fetch: Callable[[], Awaitable[V]], *, holder: Hashable = None) -> V:
        """Look up the value of `key` in the cache, or call `fetch()`.

        Args:
            holder: tenant or address; look-ups of unknown keys are limited per holder.

        Raises:
            DatabaseUnavailable: `fetch` raised it or the database was silent for `timeout_s`, and
                nothing is cached.
            Overloaded: `fetch` raised it or took too long, and nothing is cached.
        """
        entry = self._entries.get(key)
        if entry is not None:
            age = self._clock() - entry[1]
            if age <= self._ttl_s or (age <= self._ttl_s + self._grace_s and self._is_away()):
                self._entries.move_to_end(key)
                if age > self._ttl_s:
                    self._ask_again(key, fetch)
                return entry[0]
        flight = self._start(key, fetch, holder)
        # A cancelled waiter doesn't cancel the look-up of the others.
        await asyncio.wait({flight})
        return flight.result()

    def forget(self, is_stale: Callable[[K], bool]) -> None:
        """Remove all keys for which `is_stale` returns True."""
        for key in [key for key in self._entries if is_stale(key)]:
            del self._entries[key]
        for key in [key for key in self._flights if is_stale(key)]:
            del self._flights[key]

    def _is_away(self) -> bool:
        return self._failed_at is not None and self._clock() - self._failed_at <= 2 * RETRY_S + self._timeout_s

    def _ask_again(self, key: K, fetch: Callable[[], Awaitable[V]]) -> None:
        """Probe in the background, with one key at a time, whether the database is back."""
        is_asking = self._retry is not None and not self._retry.done()
        if not is_asking and self._failed_at is not None and self._clock() - self._failed_at >= RETRY_S:
            self._retry = self._start(key, fetch)

    def _start(self, key: K, fetch: Callable[[], Awaitable[V]], holder: Hashable = None) -> asyncio.Task[V]:
        """Start the look-up of `key`, or return the running one."""
        flight = self._flights.get(key)
        if flight is None:
            flight = asyncio.create_task(self._look_up(key, fetch, holder))
            self._flights[key] = flight
            flight.add_done_callback(lambda done: self._land(key, done))
        return flight

    async def _look_up(self, key: K, fetch: Callable[[], Awaitable[V]], holder: Hashable) -> V:
        asked_at = self._clock()
        try:
            if key in self._entries:
                value = await self._ask(fetch)
            else:
                async with self._unknown_keys.slot(holder):
                    asked_at = self._clock()
                    self._check_not_away(asked_at)
                    value = await self._ask(fetch)
        except Overloaded as error:
            if isinstance(error, DatabaseUnavailable) and not isinstance(error, _StillAway):
                self._failed_at = self._clock()
            entry = self._entries.get(key)
            if entry is not None and self._clock() - entry[1] <= self._ttl_s + self._grace_s:
                return entry[0]
            raise
        except Exception:
            self._entries.pop(key, None)
            self._failed_at = None
            raise
        self._failed_at = None
        # A `forget` since the query means that this answer may be outdated.
        if self._flights.get(key) is asyncio.current_task():
            self._entries[key] = (value, asked_at)
            self._entries.move_to_end(key)
            if len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        return value

    def _check_not_away(self, now: float) -> None:
        """Check that the database wasn't found unreachable a moment ago.

        A queued look-up then needn't try.

        Raises:
            DatabaseUnavailable: it was.
        """
        if self._failed_at is not None and now - self._failed_at < RETRY_S:
            raise _StillAway("The registry's database can't be reached now.", hint="Try again in a moment.")

    async def _ask(self, fetch: Callable[[], Awaitable[V]]) -> V:
        """Await `fetch` with the timeout.

        Raises:
            DatabaseUnavailable: `fetch` raised it, or the database was silent for `timeout_s`.
            Overloaded: the database answers other queries but not this one.
        """
        asking = asyncio.ensure_future(fetch())
        look_s = self._timeout_s / _LOOKS_PER_TIMEOUT
        waited_s = 0.0
        try:
            while not asking.done() and waited_s < _MAX_TIMEOUTS * self._timeout_s:
                if waited_s >= self._timeout_s <= self._silence_s():
                    break
                began = time.monotonic()
                await asyncio.wait({asking}, timeout=look_s)
                waited_s += min(time.monotonic() - began, _MAX_LOOK * look_s)
        finally:
            if not asking.done():
                self._give_up(asking)
        if asking.done() and not asking.cancelled():
            return asking.result()
        if self._silence_s() < self._timeout_s:
            raise Overloaded("The registry's database is too slow now.", hint="Try again in a moment.")
        raise DatabaseUnavailable(
            f"The registry's database gave no answer within {self._timeout_s:g} s.", hint="Try again in a moment."
        )

    def _give_up(self, asking: asyncio.Future[V]) -> None:
        """Cancel the query if that frees its connection.

        Otherwise let it end and ignore its result.
        """
        self._given_up.add(asking)
        asking.add_done_callback(self._forget_given_up)
        if self._is_cancellable:
            asking.cancel()

    def _forget_given_up(self, asking: asyncio.Future[V]) -> None:
        self._given_up.discard(asking)
        if not asking.cancelled():
            asking.exception()

    def _land(self, key: K, flight: asyncio.Task[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not flight.cancelled():
            # All waiters may be gone: retrieve the error, so that asyncio doesn't warn.
            flight.exception()
