"""Comparisons of shadow versions with the versions that answered.

They are summed by the hour and flushed to the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from sqlalchemy import and_, delete, or_, select
from sqlalchemy.exc import IntegrityError

from loraserve.db.models import ShadowHour
from loraserve.db.paging import Page, check_limit, decode_cursor, make_page, wrong_cursor
from loraserve.db.session import Clock, Database
from loraserve.db.upsert import upsert
from loraserve.errors import LoraserveError
from loraserve.limits import LIMITS
from loraserve.registry.binding import Shadow
from loraserve.registry.model_name import MAX_VERSION
from loraserve.registry.repository import AdapterRepository
from loraserve.types import TenantId

logger = logging.getLogger(__name__)

MAX_PENDING = 10_000
"""Maximum number of sums that wait for the database;
further comparisons are dropped and counted.
"""
_AMOUNTS = ("num_requests", "num_failed", "num_equal", "num_tokens", "num_agreed_tokens", "live_ms", "shadow_ms")
_PRUNE_EVERY_S = 3600.0


class _Key(NamedTuple):
    adapter_id: str
    alias: str
    hour: datetime
    version: int
    shadow_version: int


@dataclass(slots=True)
class Tally:
    """Sum of comparisons."""

    num_requests: int = 0
    num_failed: int = 0
    """Requests that the shadow failed to answer."""
    num_equal: int = 0
    """Requests for which both generated the same tokens."""
    num_tokens: int = 0
    """Tokens of the answers, for requests that the shadow answered too."""
    num_agreed_tokens: int = 0
    """Tokens before the first difference."""
    live_ms: int = 0
    shadow_ms: int = 0
    """Times from the request to the last token, summed over the requests that both answered."""

    def add(self, other: Tally) -> None:
        for name in _AMOUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class ShadowHourRecord:
    """Sum of an hour for a pair of versions."""

    hour: datetime
    """Start of the hour."""
    version: int
    shadow_version: int
    tally: Tally


class ShadowHours:
    """Comparisons of all tenants' shadows.

    They reach the database within `LIMITS.shadow_flush_s`, or once it is reachable again. A killed
    server loses what it has in memory: these are samples, not bills.
    """

    def __init__(self, database: Database, *, clock: Clock, flush_s: float | None = None) -> None:
        self.num_lost = 0
        """Comparisons dropped since the start."""
        self._database = database
        self._clock = clock
        self._flush_s = LIMITS.shadow_flush_s if flush_s is None else flush_s
        self._pending: dict[_Key, Tally] = {}
        self._task: asyncio.Task[None] | None = None
        self._pruned_at: datetime | None = None

    def record(self, shadow: Shadow, version: int, tally: Tally) -> None:
        """Add `tally` to the present hour of the shadow and of `version`, which answered."""
        now = self._clock().astimezone(UTC)
        hour = now.replace(minute=0, second=0, microsecond=0)
        key = _Key(shadow.adapter_id, shadow.alias, hour, version, shadow.adapter.version)
        if not self._add(key, tally):
            return
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._flush_later(), name="shadow-hours")

    async def flush(self) -> None:
        """Write all recorded comparisons to the database.

        Raises:
            DatabaseUnavailable, StorageFull: some remain in memory for the next flush.
        """
        taken, self._pending = self._pending, {}
        if not taken:
            return
        pieces = [taken]
        try:
            while pieces:
                try:
                    await self._write(pieces[-1])
                except IntegrityError as error:
                    pieces += self._halves(pieces.pop(), error)
                else:
                    pieces.pop()
        except BaseException:
            for piece in pieces:
                for key, tally in piece.items():
                    self._add(key, tally)
            raise

    def _halves(self, refused: dict[_Key, Tally], error: IntegrityError) -> list[dict[_Key, Tally]]:
        """Split rows that were refused together, so that one bad row doesn't lose the others."""
        if len(refused) > 1:
            rows = sorted(refused.items(), key=lambda row: row[0])
            return [dict(rows[: len(rows) // 2]), dict(rows[len(rows) // 2 :])]
        # the adapter's row is gone
        self.num_lost += sum(tally.num_requests for tally in refused.values())
        logger.warning("a shadow's comparisons are dropped: %s", type(error.orig).__name__)
        return []

    async def close(self) -> None:
        """Flush once more; drop what can't be written."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        try:
            await self.flush()
        except LoraserveError as error:
            logger.warning("the shadows' comparisons since the last write are lost: %s", error)

    async def list(
        self, tenant: TenantId, name: str, alias: str, *, limit: int = 50, cursor: str | None = None
    ) -> Page[ShadowHourRecord]:
        """List a page of the hours of all shadows that the alias had, newest first.

        They are within `LIMITS.shadow_retention_s`.

        Raises:
            AdapterNotFound, AliasNotFound
            InvalidRequest: the cursor isn't one of this list.
        """
        after = decode_cursor(cursor)
        check_limit(limit)
        row = ShadowHour
        query = select(row).order_by(row.hour.desc(), row.version.desc(), row.shadow_version.desc()).limit(limit + 1)
        if after is not None:
            hour, version, shadow_version = _read_position(after)
            is_after = and_(row.version == version, row.shadow_version < shadow_version)
            query = query.where(
                or_(row.hour < hour, and_(row.hour == hour, or_(row.version < version, is_after))),
            )
        async with self._database.read() as session:
            repository = AdapterRepository(session, tenant)
            adapter = await repository.adapter(name)
            repository.alias_record(adapter, await repository.alias(adapter, alias), alias)
            rows = (await session.scalars(query.where(row.adapter_id == adapter.id, row.alias == alias))).all()
        return make_page([_to_record(one) for one in rows], limit, _write_position, lambda record: record)

    def _add(self, key: _Key, tally: Tally) -> bool:
        found = self._pending.get(key)
        if found is None:
            if len(self._pending) >= MAX_PENDING:
                self.num_lost += tally.num_requests
                return False
            found = self._pending[key] = Tally()
        found.add(tally)
        return True

    async def _flush_later(self) -> None:
        has_warned = False
        while self._pending:
            await asyncio.sleep(self._flush_s)
            try:
                await self.flush()
            except LoraserveError as error:
                if not has_warned:
                    logger.warning("the shadows' comparisons can't be stored now; trying again: %s", error)
                has_warned = True

    async def _write(self, taken: dict[_Key, Tally]) -> None:
        now = self._clock()
        # sorted, so that two replicas don't deadlock
        rows = [{**key._asdict(), **asdict(taken[key])} for key in sorted(taken)]
        async with self._database.write() as session:
            await upsert(session, ShadowHour, rows, add=_AMOUNTS)
            if self._pruned_at is None or (now - self._pruned_at).total_seconds() >= _PRUNE_EVERY_S:
                oldest = now - timedelta(seconds=LIMITS.shadow_retention_s)
                await session.execute(delete(ShadowHour).where(ShadowHour.hour < oldest))
                self._pruned_at = now


def _to_record(row: ShadowHour) -> ShadowHourRecord:
    tally = Tally(**{name: getattr(row, name) for name in _AMOUNTS})
    return ShadowHourRecord(row.hour, row.version, row.shadow_version, tally)


def _write_position(record: ShadowHourRecord) -> str:
    return f"{int(record.hour.timestamp())} {record.version} {record.shadow_version}"


def _read_position(text: str) -> tuple[datetime, int, int]:
    parts = text.split(" ")
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) <= 10]
    if len(parts) != 3 or len(numbers) != 3 or max(numbers[1:]) > MAX_VERSION:
        raise wrong_cursor()
    hour, version, shadow_version = numbers
    return datetime.fromtimestamp(hour, UTC), version, shadow_version
