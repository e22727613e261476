"""Metering of usage.

It is exact to the token, kept through a kill, and in the database within seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Protocol

import msgspec

from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import LoraserveError
from loraserve.limits import LIMITS
from loraserve.tenancy.billing.journal import (
    Amounts,
    Journal,
    OrphanedJournal,
    Totals,
    UsageKey,
    add_to,
    orphaned_journals,
)
from loraserve.tenancy.billing.usage_hours import count, counted_sequence, forget_journal
from loraserve.tenancy.prices import Price
from loraserve.types import TenantId

logger = logging.getLogger(__name__)

FOLDER = "usage"
"""Subfolder of the data folder for journals."""
_HOUR_S = 3600
_LOOK_S = 30.0
"""Interval in seconds between searches for orphaned journals."""
_WARN_S = 60.0
_CLOSE_S = 10.0


def price_tag(currency: str, price: Price) -> str:
    """Write the price as one line, equal for equal prices: the key under which usage is summed."""
    return " ".join((currency, *(plain(amount) for amount in (price.prompt, price.cached, price.completion))))


def read_price_tag(tag: str) -> tuple[str, Price]:
    """Parse the result of `price_tag` to currency and price."""
    currency, *amounts = tag.split(" ")
    return currency, Price(*(Decimal(amount) for amount in amounts))


def plain(amount: Decimal) -> str:
    """Write the amount without trailing zeros or an exponent."""
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class UsageEvent(msgspec.Struct, frozen=True):
    """Part of a request's usage. Parts add up; each is recorded once."""

    tenant: TenantId
    owner: str
    """Id of the tenant that owns the adapter, if it is another one; empty otherwise."""
    adapter: str
    """Name of the adapter; empty for the base; the parts without weights for a sum."""
    version: int
    """Number of the version; 0 for the base or a sum."""
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were cached."""
    completion_tokens: int
    """Completion tokens delivered to the client."""
    at: float
    """Time in seconds since 1970."""
    undelivered_tokens: int = 0
    """Tokens that were generated and not delivered."""
    num_cached_requests: int = 0
    """Requests, among `num_requests`, whose answers the result cache had."""
    cached_completion_tokens: int = 0
    """Tokens, among `completion_tokens`, of these answers."""
    price: str = ""
    """Prices of a million tokens: ``EUR 0.5 0.05 1.5``; empty for none."""

    def key(self) -> UsageKey:
        hour = int(self.at // _HOUR_S)
        return UsageKey(self.tenant, hour, self.owner, self.adapter, self.version, self.price)

    def amounts(self) -> Amounts:
        return Amounts(
            self.num_requests,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            self.undelivered_tokens,
            self.num_cached_requests,
            self.cached_completion_tokens,
        )


class UsageSource(Protocol):
    """Counts usage that it hasn't recorded yet."""

    def record(self) -> None:
        """Record it."""
        ...


class CollectedUsage:
    """Usage of one request, held back until what it is for is durable.

    The caller bills it in the same transaction (`usage_hours.bill`), or drops it.
    """

    def __init__(self) -> None:
        self.totals: Totals = {}

    def record(self, event: UsageEvent) -> None:
        """Add the event to the usage."""
        add_to(self.totals, ((event.key(), event.amounts()),))

    def expect(self, source: UsageSource) -> None:
        """Record the source's usage now."""
        source.record()

    def forget(self, source: UsageSource) -> None:
        """Do nothing: all of its usage is recorded."""

    def persist(self) -> None:
        """Do nothing: it isn't delivered yet."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Sums for one transaction, repeated unchanged if the outcome of its commit isn't known."""

    sequence: int
    totals: Totals


class UsageMeter:
    """Meter of the usage of this server's clients.

    Usage is in the journal, where a kill doesn't lose it, after `LIMITS.usage_journal_s`, or what
    was recorded when `persist` returns. It reaches the database exactly once within
    `LIMITS.usage_flush_s`, or as soon as the database is reachable, or when the next server on this
    folder starts.
    """

    def __init__(
        self,
        database: Database,
        folder: Path,
        *,
        clock: Clock = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a meter; it counts from `start` on.

        Args:
            folder: folder of the journals of this machine's servers.

        Raises:
            ConfigError: it can't be written to.
        """
        self.database = database
        self._folder = folder
        self._clock = clock
        self._monotonic = monotonic
        self._journal = Journal(folder)
        self._pending: Totals = {}
        """Usage that isn't in the journal yet."""
        self._sources: set[UsageSource] = set()
        """Sources with usage that they haven't recorded."""
        self._uncounted: Totals = {}
        """Usage in the journal that isn't in the database."""
        self._unit: _Unit | None = None
        """Unit being written to the database, or whose outcome isn't known."""
        self._counted = 0
        """Number of the last entry that is known to be in the database."""
        self._oldest_at: float | None = None
        """Time at which the oldest usage that isn't in the database was recorded."""
        self._flush_lock = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = asyncio.Event()
        self._warned_at = -_WARN_S
        self.recorded = Amounts()
        """Usage recorded since this process started."""
        self.num_failed_writes = 0
        """Failed writes to the journal; their usage stays in memory and still reaches the
        database.
        """
        self.num_failed_flushes = 0
        self.num_recovered_journals = 0
        """Journals of ended processes that were counted."""

    def start(self) -> None:
        """Count orphaned journals, and flush recorded usage periodically from now on."""
        self._tasks = [
            asyncio.create_task(self._collect_periodically(), name="usage collection"),
            asyncio.create_task(self._flush_periodically(), name="usage"),
        ]

    async def close(self) -> None:
        """Flush; usage that can't be written stays in the journal for the next start."""
        self._is_closing.set()
        if self._tasks:
            # let a running transaction finish
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.flush()
        except LoraserveError as error:
            logger.warning("usage stays in the journal until the next start: %s", error)
        else:
            with contextlib.suppress(OSError, LoraserveError):
                await asyncio.to_thread(self._journal.remove)
                async with self.database.write() as session:
                    await forget_journal(session, self._journal.id)
        self._journal.close()

    @property
    def lag_s(self) -> float:
        """Seconds since the oldest usage that isn't in the database was recorded.

        It is 0 if there is none.
        """
        return 0.0 if self._oldest_at is None else self._monotonic() - self._oldest_at

    @property
    def journal_bytes(self) -> int:
        return self._journal.num_bytes

    def record(self, event: UsageEvent) -> None:
        """Add the event to the usage."""
        amounts = event.amounts()
        add_to(self._pending, ((event.key(), amounts),))
        self.recorded += amounts
        if self._oldest_at is None:
            self._oldest_at = self._monotonic()

    def expect(self, source: UsageSource) -> None:
        """Have the source record its usage within `LIMITS.usage_journal_s`."""
        self._sources.add(source)

    def forget(self, source: UsageSource) -> None:
        """Expect nothing more of the source."""
        self._sources.discard(source)

    def _collect(self) -> None:
        sources, self._sources = self._sources, set()
        for source in sources:
            try:
                source.record()
            except Exception as error:
                # the others' usage is recorded, whatever the error
                self._warn("a request's usage can't be recorded now (%s)", error)

    def note_billed(self, totals: Totals) -> None:
        """Count usage that another transaction has added to the hours."""
        for amounts in totals.values():
            self.recorded += amounts

    def persist(self) -> None:
        """Write everything recorded so far to the journal, where it survives a kill.

        Call it before delivering an answer.

        A failed write is counted in `num_failed_writes` and doesn't fail the answer.
        """
        if not self._pending:
            return
        totals, self._pending = self._pending, {}
        add_to(self._uncounted, totals.items())
        try:
            self._journal.append(totals)
        except OSError as error:
            self._fail_write(error)

    async def flush(self) -> None:
        """Write everything recorded before the call to the database.

        Raises:
            DatabaseUnavailable, StorageFull: some may not be written; it is tried again later.
        """
        async with self._flush_lock:
            began = self._monotonic()
            self._collect()
            self.persist()
            upto = self._journal.sequence
            while self._unit is not None or (self._uncounted and self._counted < upto):
                await self._count()
            self._oldest_at = began if self._uncounted or self._pending else None
            if not self._uncounted:
                self._journal.clear()
            elif self._journal.num_bytes > LIMITS.max_usage_journal_bytes:
                self._compact()

    async def recover(self) -> int:
        """Count and remove the orphaned journals; return their number.

        Raises:
            DatabaseUnavailable, StorageFull: some journals remain.
        """
        num = 0
        for journal in orphaned_journals(self._folder):
            try:
                num += await self._recover(journal)
            finally:
                journal.close()
        self.num_recovered_journals += num
        return num

    async def _recover(self, journal: OrphanedJournal) -> bool:
        now = self._clock()
        entries = await asyncio.to_thread(journal.entries)
        unknown_tenants: frozenset[str] = frozenset()
        async with self.database.write() as session:
            counted = await counted_sequence(session, journal.id, now)
            totals: Totals = {}
            for entry in entries:
                if entry.sequence > counted:
                    add_to(totals, entry.amounts)
            if totals:
                unknown_tenants = await count(session, journal.id, entries[-1].sequence, totals, now)
            if unknown_tenants:
                # before the commit: after it, a kill would leave a journal that looks counted
                refused = await asyncio.to_thread(journal.preserve)
                logger.error(
                    "%s has usage of tenants that aren't in this database; the file is kept, "
                    "and their usage isn't billed",
                    refused,
                )
        await asyncio.to_thread(journal.remove)
        if unknown_tenants:
            return False
        async with self.database.write() as session:
            await forget_journal(session, journal.id)
        if totals:
            logger.info("the usage in another process's journal is recorded now")
        return bool(totals)

    async def _count(self) -> None:
        """Write one unit to the database."""
        if self._unit is None:
            self._unit = _Unit(self._journal.sequence, self._uncounted)
            self._uncounted = {}
        unit, now = self._unit, self._clock()
        async with self.database.write() as session:
            # An earlier commit may have succeeded though its answer was lost.
            unknown_tenants: frozenset[str] = frozenset()
            if await counted_sequence(session, self._journal.id, now) < unit.sequence:
                unknown_tenants = await count(session, self._journal.id, unit.sequence, unit.totals, now)
        self._unit = None
        if unknown_tenants:
            # The database was replaced while the server ran.
            lost = {str(key): str(amounts) for key, amounts in unit.totals.items() if key.tenant in unknown_tenants}
            logger.error("usage of tenants that aren't in the database isn't billed: %s", lost)
        self._counted = unit.sequence

    async def _collect_periodically(self) -> None:
        """Bring usage to the journal, however long the database takes."""
        while not self._is_closing.is_set():
            self._collect()
            try:
                self.persist()
            except Exception as error:
                # metering continues, whatever the error
                self._warn("usage can't be written to the journal now (%s)", error)
            await self._wait()

    async def _flush_periodically(self) -> None:
        looked = flushed = -1e9
        while not self._is_closing.is_set():
            now = self._monotonic()
            try:
                if now - flushed >= LIMITS.usage_flush_s:
                    await self.flush()
                    flushed = self._monotonic()
                if now - looked >= _LOOK_S:
                    await self.recover()
                    looked = self._monotonic()
            except Exception as error:
                # Metering continues, whatever the error.
                self.num_failed_flushes += 1
                flushed = self._monotonic()
                self._warn("usage can't be written to the database now (%s); it stays in the journal", error)
                await self._sync_journal()
            await self._wait()

    async def _wait(self) -> None:
        """Wait for `LIMITS.usage_journal_s`, or until the meter closes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIMITS.usage_journal_s):
                await self._is_closing.wait()

    async def _sync_journal(self) -> None:
        """Bound and sync the journal, the only record while the database is unreachable."""
        if self._journal.num_bytes > LIMITS.max_usage_journal_bytes:
            self._compact()
        try:
            await asyncio.to_thread(self._journal.sync)
        except OSError as error:
            self._fail_write(error)

    def _compact(self) -> None:
        """Replace the journal's entries by sums of what isn't counted."""
        units = [(self._journal.sequence, self._uncounted)]
        if self._unit is not None:
            # It keeps its number, because it may be counted already.
            units.insert(0, (self._unit.sequence, self._unit.totals))
        try:
            self._journal.compact(units)
        except OSError as error:
            self._fail_write(error)

    def _fail_write(self, error: OSError) -> None:
        self.num_failed_writes += 1
        self._warn(
            "usage can't be written to the journal (%s); a kill would lose usage that isn't in the database yet", error
        )

    def _warn(self, text: str, error: Exception) -> None:
        """Log a warning, at most once in `_WARN_S`."""
        now = self._monotonic()
        if now - self._warned_at >= _WARN_S:
            self._warned_at = now
            logger.warning(text, error)
