"""How shadow versions did against those that answered, by the hour: added up here, and taken to the database now and then."""

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
from loraserve.db.paging import Page, check_limit, decode_cursor, make_page
from loraserve.db.session import Clock, Database
from loraserve.db.upsert import upsert
from loraserve.errors import InvalidRequest, LoraserveError
from loraserve.limits import LIMITS
from loraserve.registry.binding import Shadow
from loraserve.registry.model_name import MAX_VERSION
from loraserve.registry.repository import AdapterRepository
from loraserve.types import TenantId

logger = logging.getLogger(__name__)

MAX_PENDING = 10_000
"""Hours of versions that wait for the database; of more, what was compared is lost, and counted."""
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
    """What comparisons add up to."""

    num_requests: int = 0
    num_failed: int = 0
    """Of those, the ones to which the shadow had no answer."""
    num_equal: int = 0
    """Those where both made the same tokens."""
    num_tokens: int = 0
    """The answers', of those that the shadow answered too."""
    num_agreed_tokens: int = 0
    """Of those, the ones before the first that differs."""
    live_ms: int = 0
    shadow_ms: int = 0
    """From the request to the last token, summed over the requests that both answered."""

    def add(self, other: Tally) -> None:
        for name in _AMOUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class ShadowHourRecord:
    """One hour of one pair of versions."""

    hour: datetime
    """Its first instant."""
    version: int
    shadow_version: int
    tally: Tally


class ShadowHours:
    """The comparisons of every tenant's shadows.

    What was recorded is in the database within `LIMITS.shadow_flush_s`, or once it can be reached again; what a killed server had in
    memory is lost, as is what it compared just then: these are samples, not bills.
    """

    def __init__(self, database: Database, *, clock: Clock, flush_s: float | None = None) -> None:
        self.num_lost = 0
        """Comparisons that couldn't be kept, since the start."""
        self._database = database
        self._clock = clock
        self._flush_s = LIMITS.shadow_flush_s if flush_s is None else flush_s
        self._pending: dict[_Key, Tally] = {}
        self._task: asyncio.Task[None] | None = None
        self._pruned_at: datetime | None = None

    def record(self, shadow: Shadow, version: int, tally: Tally) -> None:
        """`tally` counts, in the present hour, for the shadow of the alias by which `version` was asked for."""
        now = self._clock().astimezone(UTC)
        hour = now.replace(minute=0, second=0, microsecond=0)
        key = _Key(shadow.adapter_id, shadow.alias, hour, version, shadow.adapter.version)
        if not self._add(key, tally):
            return
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._flush_later(), name="shadow-hours")

    async def flush(self) -> None:
        """What was recorded before is in the database.

        Raises:
            DatabaseUnavailable, StorageFull: some of it isn't; it is kept for the next time.
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
        """What to try apart of rows that were refused together: others' aren't lost for one."""
        if len(refused) > 1:
            rows = sorted(refused.items(), key=lambda row: row[0])
            return [dict(rows[: len(rows) // 2]), dict(rows[len(rows) // 2 :])]
        # the adapter's row is gone: there is nobody to tell
        self.num_lost += sum(tally.num_requests for tally in refused.values())
        logger.warning("what a shadow did isn't kept: %s", type(error.orig).__name__)
        return []

    async def close(self) -> None:
        """What was recorded is in the database, or given up."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        try:
            await self.flush()
        except LoraserveError as error:
            logger.warning("what shadows did since the last write is lost: %s", error)

    async def list(
        self, tenant: TenantId, name: str, alias: str, *, limit: int = 50, cursor: str | None = None
    ) -> Page[ShadowHourRecord]:
        """The hours of the alias's shadows, the newest first; of all that it had within `LIMITS.shadow_retention_s`.

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
        is_told = False
        while self._pending:
            await asyncio.sleep(self._flush_s)
            try:
                await self.flush()
            except LoraserveError as error:
                if not is_told:
                    logger.warning("what shadows did can't be kept now, and is tried again: %s", error)
                is_told = True

    async def _write(self, taken: dict[_Key, Tally]) -> None:
        now = self._clock()
        # One order for everybody: two replicas never wait for each other's rows.
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
        raise InvalidRequest(
            "cursor isn't one of this list.", param="cursor", hint="Pass next_cursor of the page before."
        )
    hour, version, shadow_version = numbers
    return datetime.fromtimestamp(hour, UTC), version, shadow_version
