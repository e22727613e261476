"""Metering: what clients were given, counted to the token, kept through a kill, and in the database within seconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

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
"""Of the data folder: where journals are."""
_HOUR_S = 3600
_LOOK_S = 30.0
"""Between two looks for journals that other processes left in the folder."""
_WARN_S = 60.0
_CLOSE_S = 10.0


def price_tag(currency: str, price: Price) -> str:
    """The price in one line, equal for equal prices: what usage is kept by."""
    return " ".join((currency, *(plain(amount) for amount in (price.prompt, price.cached, price.completion))))


def read_price_tag(tag: str) -> tuple[str, Price]:
    """The currency and price that `price_tag` wrote."""
    currency, *amounts = tag.split(" ")
    return currency, Price(*(Decimal(amount) for amount in amounts))


def plain(amount: Decimal) -> str:
    """The amount without needless zeros or an exponent."""
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """A part of what one request used. Its parts add up; each is recorded once."""

    tenant: TenantId
    owner: str
    """The id of the tenant whose adapter it was, where that is another; empty otherwise."""
    adapter: str
    """Its name; the base: empty; a sum: its parts, without their weights."""
    version: int
    """0: the base, or a sum."""
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt tokens."""
    completion_tokens: int
    """Handed to the client."""
    at: float
    """Seconds since 1970."""
    undelivered_tokens: int = 0
    """Made, and given to nobody."""
    price: str = ""
    """Of a million tokens each: ``EUR 0.5 0.05 1.5``; empty: no price."""

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
        )


@dataclass(frozen=True, slots=True)
class _Unit:
    """What goes to the database in one transaction, and again as it is if it isn't known whether it got there."""

    sequence: int
    totals: Totals


class UsageMeter:
    """What this server's clients used.

    `record` costs a dictionary's look-up. What was recorded is in the journal `LIMITS.usage_journal_s` later at the latest, or once `persist` has
    returned; from then on a kill doesn't lose it. It is in the database, exactly once, within `LIMITS.usage_flush_s`, or as soon as the
    database can be reached again, or when the next server on this folder starts.
    """

    def __init__(
        self,
        database: Database,
        folder: Path,
        *,
        clock: Clock = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            folder: where the journals of this machine's servers are.

        Raises:
            ConfigError: it can't be written to.
        """
        self.database = database
        self._folder = folder
        self._clock = clock
        self._monotonic = monotonic
        self._journal = Journal(folder)
        self._pending: Totals = {}
        """Recorded, and in no file yet."""
        self._uncounted: Totals = {}
        """In the journal, and not in the database."""
        self._unit: _Unit | None = None
        """On its way to the database, or of unknown fate."""
        self._counted = 0
        """The number of the last entry that is known to be in the database."""
        self._oldest_at: float | None = None
        """When the first of what isn't in the database was recorded."""
        self._flush_lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._is_closing = asyncio.Event()
        self._warned_at = -_WARN_S
        self.recorded = Amounts()
        """Since this process started."""
        self.num_failed_writes = 0
        """To the journal; what they held is in memory, and goes to the database all the same."""
        self.num_failed_flushes = 0
        self.num_recovered_journals = 0
        """Of processes that ended without counting all of theirs."""

    def start(self) -> None:
        """Journals left behind are counted, and from now on what is recorded goes to the database by itself."""
        self._task = asyncio.create_task(self._run(), name="usage")

    async def close(self) -> None:
        """What was recorded is in the database; where that can't be reached, in the journal, which the next start counts."""
        self._is_closing.set()
        if self._task is not None:
            # A transaction under way comes to its end.
            await asyncio.wait({self._task}, timeout=_CLOSE_S)
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        try:
            await self.flush()
        except LoraserveError as error:
            logger.warning("usage stays in its journal until the next start: %s", error)
        else:
            with contextlib.suppress(OSError, LoraserveError):
                await asyncio.to_thread(self._journal.remove)
                async with self.database.write() as session:
                    await forget_journal(session, self._journal.id)
        self._journal.close()

    @property
    def lag_s(self) -> float:
        """Since the first of what isn't in the database yet was recorded; 0: all of it is."""
        return 0.0 if self._oldest_at is None else self._monotonic() - self._oldest_at

    @property
    def journal_bytes(self) -> int:
        return self._journal.num_bytes

    def record(self, event: UsageEvent) -> None:
        """The event counts, once."""
        amounts = event.amounts()
        add_to(self._pending, ((event.key(), amounts),))
        self.recorded += amounts
        if self._oldest_at is None:
            self._oldest_at = self._monotonic()

    def persist(self) -> None:
        """Everything recorded so far survives a kill, before whoever asked is told that it was used.

        A journal that can't be written is counted among `num_failed_writes`, and refuses nobody's answer.
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
        """What was recorded before the call is in the database.

        Raises:
            DatabaseUnavailable, StorageFull: some of it may not be; it is tried again.
        """
        async with self._flush_lock:
            began = self._monotonic()
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
        """How many journals of ended processes were counted, and are gone.

        Raises:
            DatabaseUnavailable, StorageFull: some are still there.
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
                # before the commit: a kill after it would leave a journal that looks counted
                refused = await asyncio.to_thread(journal.keep)
                logger.error(
                    "%s has usage of tenants that this database doesn't know; it is kept, and theirs not counted",
                    refused,
                )
        await asyncio.to_thread(journal.remove)
        if unknown_tenants:
            return False
        async with self.database.write() as session:
            await forget_journal(session, journal.id)
        if totals:
            logger.info("the usage that a process had left is counted now")
        return bool(totals)

    async def _count(self) -> None:
        """One unit is in the database."""
        if self._unit is None:
            self._unit = _Unit(self._journal.sequence, self._uncounted)
            self._uncounted = {}
        unit, now = self._unit, self._clock()
        async with self.database.write() as session:
            # A commit may have gone well though its answer never came.
            unknown_tenants: frozenset[str] = frozenset()
            if await counted_sequence(session, self._journal.id, now) < unit.sequence:
                unknown_tenants = await count(session, self._journal.id, unit.sequence, unit.totals, now)
        self._unit = None
        if unknown_tenants:
            # Another database was put in its place while the server ran.
            lost = {str(key): str(amounts) for key, amounts in unit.totals.items() if key.tenant in unknown_tenants}
            logger.error("the database doesn't know tenants whose usage isn't counted: %s", lost)
        self._counted = unit.sequence

    async def _run(self) -> None:
        looked = flushed = -1e9
        while not self._is_closing.is_set():
            now = self._monotonic()
            try:
                self.persist()
                if now - flushed >= LIMITS.usage_flush_s:
                    await self.flush()
                    flushed = self._monotonic()
                if now - looked >= _LOOK_S:
                    await self.recover()
                    looked = self._monotonic()
            except Exception as error:
                # Counting goes on, whatever this was.
                self.num_failed_flushes += 1
                flushed = self._monotonic()
                self._warn("usage can't be counted now (%s); its journal has it", error)
                await self._keep()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LIMITS.usage_journal_s):
                    await self._is_closing.wait()

    async def _keep(self) -> None:
        """While the database is away the journal is all there is: it doesn't grow without end, and is on the disk."""
        if self._journal.num_bytes > LIMITS.max_usage_journal_bytes:
            self._compact()
        try:
            await asyncio.to_thread(self._journal.sync)
        except OSError as error:
            self._fail_write(error)

    def _compact(self) -> None:
        """The journal holds what isn't counted, summed."""
        units = [(self._journal.sequence, self._uncounted)]
        if self._unit is not None:
            # It may be counted already: it keeps its number.
            units.insert(0, (self._unit.sequence, self._unit.totals))
        try:
            self._journal.compact(units)
        except OSError as error:
            self._fail_write(error)

    def _fail_write(self, error: OSError) -> None:
        self.num_failed_writes += 1
        self._warn("usage can't be written to its journal (%s); a kill would lose what isn't counted yet", error)

    def _warn(self, text: str, error: Exception) -> None:
        """Now and then, not at every attempt."""
        now = self._monotonic()
        if now - self._warned_at >= _WARN_S:
            self._warned_at = now
            logger.warning(text, error)
