"""A short-lived cache in front of the database, which keeps the token path going while the database is away."""

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
"""While the database is away it is asked again so long after it failed; known answers are given at once meanwhile."""
_MAX_TIMEOUTS = 3
"""A question waits for at most so many times `timeout_s`, also where the database answers others."""
_MAX_UNKNOWN, _MAX_UNKNOWN_PER_HOLDER = 4, 2
"""Questions at once about keys that nothing is known of: fewer than the database's connections. Keys that are known pass them."""
_LOOKS_PER_TIMEOUT = 20
_MAX_LOOK = 2
"""Longest look that is counted, in looks: the rest of a longer one was the event loop's time, in which no answer could
be heard."""


class _StillAway(DatabaseUnavailable):
    """Say without a question that the database is away; this prolongs no outage."""


class _UnknownKeyLimiter:
    """Limit the questions about unknown keys: a few at once, and fewer for one holder, so that no flood of them is in others' way."""

    def __init__(self) -> None:
        self._in_all = asyncio.Semaphore(_MAX_UNKNOWN)
        self._holders: dict[Hashable, tuple[asyncio.Semaphore, int]] = {}
        """Each holder's semaphore, and how many questions hold it or wait for it."""

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
    """Answers that are at most `ttl_s` old, or, while the database is away, at most `ttl_s` + `grace_s`.

    One look-up per key is under way at a time, however many callers ask; of keys that nothing is known of, a few.
    Errors aren't kept, so what was absent is found as soon as it is there. `forget` takes effect at once, also on
    look-ups under way.

    The database is away from a look-up that it failed, or left without an answer for `timeout_s`, to the first one that it answers;
    and never for longer than one more attempt takes, so that no old answers are given for an outage that is over. Time counts
    while the event loop listens and the database is silent: a busy server waits for a database that answers, question by question.

    Args:
        silence_s: for how long the database has answered no question.
        is_cancellable: whether a question that is given up is cancelled; otherwise it ends when it does.
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
        """Questions that were given up and haven't ended: with a silent database being cancelled takes a while itself."""

    async def get(self, key: K, fetch: Callable[[], Awaitable[V]], *, holder: Hashable = None) -> V:
        """The value of `key`, from the cache or from `fetch()`.

        Args:
            holder: the tenant or address that asks: its own unknown keys wait for each other before they wait for others'.

        Raises:
            DatabaseUnavailable: `fetch` raised it or the database was silent for `timeout_s`, and no answer is young enough.
            Overloaded: `fetch` raised it or took too long beside others, and no answer is young enough.
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
        # One waiter that goes away doesn't cancel the look-up of the others.
        await asyncio.wait({flight})
        return flight.result()

    def forget(self, is_stale: Callable[[K], bool]) -> None:
        """Let the next `get` of every key that `is_stale` names ask the database."""
        for key in [key for key in self._entries if is_stale(key)]:
            del self._entries[key]
        for key in [key for key in self._flights if is_stale(key)]:
            del self._flights[key]

    def _is_away(self) -> bool:
        return self._failed_at is not None and self._clock() - self._failed_at <= 2 * RETRY_S + self._timeout_s

    def _ask_again(self, key: K, fetch: Callable[[], Awaitable[V]]) -> None:
        """Find out, for one key at a time and with nobody waiting, whether the database is back."""
        is_asking = self._retry is not None and not self._retry.done()
        if not is_asking and self._failed_at is not None and self._clock() - self._failed_at >= RETRY_S:
            self._retry = self._start(key, fetch)

    def _start(self, key: K, fetch: Callable[[], Awaitable[V]], holder: Hashable = None) -> asyncio.Task[V]:
        """The look-up of `key` that is under way, from now on."""
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
        # A `forget` since the question was asked means that this answer may be from before the change.
        if self._flights.get(key) is asyncio.current_task():
            self._entries[key] = (value, asked_at)
            self._entries.move_to_end(key)
            if len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        return value

    def _check_not_away(self, now: float) -> None:
        """Raises:
        DatabaseUnavailable: it was found away a moment ago, and a question that waited for its turn needn't find out anew.
        """
        if self._failed_at is not None and now - self._failed_at < RETRY_S:
            raise _StillAway("The registry's database can't be reached now.", hint="Try again in a moment.")

    async def _ask(self, fetch: Callable[[], Awaitable[V]]) -> V:
        """Return what `fetch` returns.

        Raises:
            DatabaseUnavailable: it raised it, or the database was silent for `timeout_s`.
            Overloaded: the database answers others, and not this.
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
            raise Overloaded("The registry's database answers too slowly now.", hint="Try again in a moment.")
        raise DatabaseUnavailable(
            f"The registry's database gave no answer within {self._timeout_s:g} s.", hint="Try again in a moment."
        )

    def _give_up(self, asking: asyncio.Future[V]) -> None:
        """Cancel the question where that frees anything, and let it end without a word otherwise."""
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
            # Every waiter may be gone: an error that nobody takes isn't worth a warning.
            flight.exception()
