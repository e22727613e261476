"""A short-lived cache in front of the database, which keeps the token path going while the database is away."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from loraserve.errors import DatabaseUnavailable
from loraserve.limits import LIMITS

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

RETRY_S = 1.0
"""While the database is away it is asked again so long after it failed; known answers are given at once meanwhile."""


class LookupCache(Generic[K, V]):
    """Answers that are at most `ttl_s` old, or, while the database is away, at most `ttl_s` + `grace_s`.

    One look-up per key is under way at a time, whoever asks. Errors aren't kept, so what was absent is found as soon as it is
    there. `forget` takes effect at once, also on look-ups under way.

    The database is away from a look-up that it failed, or left without an answer for `timeout_s`, to the first one that it answers;
    and never for longer than one more attempt takes, so that nobody is given old answers for an outage that is over.
    """

    def __init__(
        self,
        *,
        ttl_s: float,
        grace_s: float = LIMITS.outage_grace_s,
        timeout_s: float = 2.0,
        max_entries: int = 20_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s = ttl_s
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._max_entries = max_entries
        self._clock = clock
        self._entries: OrderedDict[K, tuple[V, float]] = OrderedDict()
        self._flights: dict[K, asyncio.Task[V]] = {}
        self._failed_at: float | None = None
        self._retry: asyncio.Task[V] | None = None

    async def get(self, key: K, fetch: Callable[[], Awaitable[V]]) -> V:
        """The value of `key`, from the cache or from `fetch()`.

        Raises:
            DatabaseUnavailable: `fetch` raised it or took longer than `timeout_s`, and no answer is young enough.
        """
        entry = self._entries.get(key)
        if entry is not None:
            age = self._clock() - entry[1]
            if age <= self._ttl_s or (age <= self._ttl_s + self._grace_s and self._is_away()):
                self._entries.move_to_end(key)
                if age > self._ttl_s:
                    self._ask_again(key, fetch)
                return entry[0]
        # Shielded: one waiter that goes away doesn't cancel the look-up of the others.
        return await asyncio.shield(self._start(key, fetch))

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

    def _start(self, key: K, fetch: Callable[[], Awaitable[V]]) -> asyncio.Task[V]:
        """The look-up of `key` that is under way, from now on."""
        flight = self._flights.get(key)
        if flight is None:
            flight = asyncio.create_task(self._look_up(key, fetch))
            self._flights[key] = flight
            flight.add_done_callback(lambda done: self._land(key, done))
        return flight

    async def _look_up(self, key: K, fetch: Callable[[], Awaitable[V]]) -> V:
        asked_at = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                value = await fetch()
        except (DatabaseUnavailable, TimeoutError) as error:
            self._failed_at = self._clock()
            entry = self._entries.get(key)
            if entry is not None and self._clock() - entry[1] <= self._ttl_s + self._grace_s:
                return entry[0]
            if isinstance(error, DatabaseUnavailable):
                raise
            raise DatabaseUnavailable(
                f"The registry's database gave no answer within {self._timeout_s:g} s.", hint="Try again in a moment."
            ) from error
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

    def _land(self, key: K, flight: asyncio.Task[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not flight.cancelled():
            # Every waiter may be gone: an error that nobody takes isn't worth a warning.
            flight.exception()
