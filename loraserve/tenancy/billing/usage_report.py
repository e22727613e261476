"""Usage reports: sums over the table of hours."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, Select, func, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import NAME_LENGTH, Tenant, UsageHour
from loraserve.db.names import name_key, split_owner
from loraserve.db.paging import Page, check_limit
from loraserve.errors import InvalidRequest, StorageFull
from loraserve.limits import LIMITS
from loraserve.tenancy.billing.journal import Amounts
from loraserve.tenancy.billing.meter import UsageMeter, read_price_tag
from loraserve.tenancy.identity.tenants import tenant_not_found
from loraserve.types import TenantId

logger = logging.getLogger(__name__)

GROUPS = ("tenant", "adapter", "version", "hour", "day")
_MAX_CURSOR_BYTES = 2048
_MAX_ADAPTER_LENGTH = 255
_HOUR = timedelta(hours=1)
_FORMATS = {"hour": ("%Y-%m-%dT%H:00:00Z", 'YYYY-MM-DD"T"HH24":00:00Z"'), "day": ("%Y-%m-%d", "YYYY-MM-DD")}
"""Formats of hours and days in SQLite and PostgreSQL; as text,
so that a cursor can contain them.
"""


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Selection of usage, and grouping of its sums."""

    tenant: TenantId | None = None
    """Tenant; None for all tenants."""
    adapter: str | None = None
    """``NAME``, ``OWNER/NAME``, or a sum's parts; empty for the base, None for all."""
    start: datetime | None = None
    """Start; usage counts from the beginning of this instant's hour."""
    end: datetime | None = None
    """End; hours that begin at this instant or later aren't counted."""
    group_by: tuple[str, ...] = ()
    """Names of `GROUPS`; empty for one sum of everything."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            InvalidRequest: a field is invalid; `param` names it.
        """
        if self.adapter is not None and not (self.adapter.isprintable() and len(self.adapter) <= _MAX_ADAPTER_LENGTH):
            raise InvalidRequest("adapter should be NAME, OWNER/NAME, or the base's id.", param="adapter")
        unknown = [name for name in self.group_by if name not in GROUPS]
        if unknown or len(set(self.group_by)) != len(self.group_by):
            raise InvalidRequest(f"group_by should be one or more of {', '.join(GROUPS)}, each once.", param="group_by")
        if "version" in self.group_by and "adapter" not in self.group_by:
            raise InvalidRequest(
                "group_by has version without adapter: a version's number is meaningless without its adapter.",
                param="group_by",
                hint="Use group_by=adapter,version.",
            )
        if self.start is not None and self.end is not None and self.start >= self.end:
            raise InvalidRequest("from should be before to.", param="from")


@dataclass(frozen=True, slots=True)
class UsageSum:
    """Usage of one group in one currency."""

    group: Mapping[str, str | int | None]
    """Values by the names of `UsageQuery.group_by`.

    None for the base's adapter and version, and for a sum's version.
    """
    amounts: Amounts
    currency: str | None
    """Currency; None if the usage had no price."""
    cost: Decimal | None


class UsageReports:
    """Reports of usage.

    They have this server's up to now, and that of other servers up to `LIMITS.usage_flush_s` ago.
    While the database's disk is full they lack what it can't store.
    """

    def __init__(self, meter: UsageMeter) -> None:
        self._meter = meter
        self._database = meter.database

    async def find_tenant(self, name: str) -> TenantId:
        """Find a tenant by name or, because the usage of deleted tenants is kept, by id.

        Raises:
            TenantNotFound: there is no such tenant.
        """
        if not (name.isascii() and name.isprintable() and len(name) <= NAME_LENGTH):
            raise tenant_not_found()
        is_live = (Tenant.name == name) & Tenant.deleted_at.is_(None)
        query = select(Tenant.id).where(or_(is_live, Tenant.id == name)).order_by((Tenant.id == name).asc())
        async with self._database.read() as session:
            found = (await session.scalars(query.limit(1))).first()
        if found is None:
            raise tenant_not_found()
        return TenantId(found)

    async def _flush(self) -> None:
        try:
            await self._meter.flush()
        except StorageFull as error:
            # it stays in the journal; what is stored can be read all the same
            logger.warning("a report of usage lacks what isn't stored yet: %s", error)

    async def page(self, query: UsageQuery, *, limit: int = 50, cursor: str | None = None) -> Page[UsageSum]:
        """Sum a page of usage by group.

        A group with several currencies has a sum for each, on the same page.

        Raises:
            InvalidRequest: the limit or the cursor is invalid.
        """
        check_limit(limit)
        position = _read_cursor(cursor, query)
        await self._flush()
        return await self._page(query, limit, position)

    async def all(self, query: UsageQuery) -> list[UsageSum]:
        """Sum all usage by group.

        Raises:
            InvalidRequest: there are more than `LIMITS.max_usage_rows`.
        """
        await self._flush()
        page = await self._page(query, LIMITS.max_usage_rows, None)
        if page.next_cursor is not None:
            raise InvalidRequest(
                f"The report has more than {LIMITS.max_usage_rows} rows.",
                hint="Narrow it with from and to, or group by less.",
            )
        return list(page.items)

    async def _page(self, query: UsageQuery, limit: int, after: tuple[str | int, ...] | None) -> Page[UsageSum]:
        columns = _columns(query.group_by)
        async with self._database.read() as session:
            rows, last = await _rows(session, query, limit, after)
            names = await _tenant_names(session, rows, columns)
        # on a thread, so that thousands of sums don't delay streams
        sums = await asyncio.to_thread(_sums, rows, columns, names)
        return Page(tuple(sums), None if last is None else _write_cursor(last))


async def _rows(
    session: AsyncSession, query: UsageQuery, limit: int, after: tuple[str | int, ...] | None
) -> tuple[Sequence[Row[Any]], tuple[str | int, ...] | None]:
    """Query the rows of a page (group columns, price, amounts).

    Return the last group too if more follow.
    """
    keys = _keys(session, query.group_by)
    amounts = [func.sum(getattr(UsageHour, name)) for name in Amounts.__struct_fields__]
    last = None
    statement = _where(session, select(*keys, UsageHour.price, *amounts), query)
    if keys:
        # first the groups of the page, then all prices of each
        groups = _where(session, select(*keys), query).group_by(*keys).order_by(*keys).limit(limit + 1)
        if after is not None:
            groups = groups.where(tuple_(*keys) > tuple_(*after))
        found = [tuple(row) for row in await session.execute(groups)]
        if not found:
            return [], None
        shown = found[:limit]
        last = shown[-1] if len(found) > limit else None
        statement = statement.where(tuple_(*keys) >= tuple_(*shown[0]), tuple_(*keys) <= tuple_(*shown[-1]))
    statement = statement.group_by(*keys, UsageHour.price).order_by(*keys, UsageHour.price)
    return (await session.execute(statement)).all(), last


def _columns(group_by: Sequence[str]) -> tuple[str, ...]:
    """List the columns of the groups; an adapter has two, its owner and its name."""
    return tuple(column for name in group_by for column in (("owner", "adapter") if name == "adapter" else (name,)))


def _keys(session: AsyncSession, group_by: Sequence[str]) -> list[Any]:
    is_sqlite = session.get_bind().dialect.name == "sqlite"

    def written(name: str) -> Any:
        ours, theirs = _FORMATS[name]
        if is_sqlite:
            return func.strftime(ours, UsageHour.hour)
        return func.to_char(func.timezone("UTC", UsageHour.hour), theirs)

    columns = {
        "tenant": UsageHour.tenant_id,
        "owner": UsageHour.owner,
        "adapter": UsageHour.adapter,
        "version": UsageHour.version,
    }
    return [columns[name] if name in columns else written(name) for name in _columns(group_by)]


def _where(session: AsyncSession, statement: Select[Any], query: UsageQuery) -> Select[Any]:
    if query.tenant is not None:
        statement = statement.where(UsageHour.tenant_id == query.tenant)
    if query.adapter is not None:
        statement = statement.where(_is_adapter(session, query.adapter))
    if query.start is not None:
        statement = statement.where(UsageHour.hour > query.start.astimezone(UTC) - _HOUR)
    if query.end is not None:
        statement = statement.where(UsageHour.hour < query.end.astimezone(UTC))
    return statement


def _is_adapter(session: AsyncSession, name: str) -> ColumnElement[bool]:
    # the lower case of some locales isn't ASCII's
    column = UsageHour.adapter if session.get_bind().dialect.name == "sqlite" else UsageHour.adapter.collate("C")
    key = func.lower(column)
    itself = (key == name_key(name)) & (UsageHour.owner == "")
    granted = split_owner(name)
    if granted is None:
        return itself
    owners = select(Tenant.id).where(Tenant.name == granted[0])
    return itself | ((key == name_key(granted[1])) & UsageHour.owner.in_(owners))


async def _tenant_names(session: AsyncSession, rows: Sequence[Row[Any]], columns: Sequence[str]) -> dict[str, str]:
    """Look up the names of the tenants and owners in the rows, deleted ones included."""
    places = [place for place, name in enumerate(columns) if name in ("tenant", "owner")]
    ids = sorted({row[place] for row in rows for place in places} - {""})
    names: dict[str, str] = {}
    for start in range(0, len(ids), 500):
        found = await session.execute(select(Tenant.id, Tenant.name).where(Tenant.id.in_(ids[start : start + 500])))
        names.update((ident, name) for ident, name in found)
    return names


def _sums(rows: Sequence[Row[Any]], columns: Sequence[str], names: Mapping[str, str]) -> list[UsageSum]:
    """Sum the rows by group and currency."""
    sums: dict[tuple[Any, ...], UsageSum] = {}
    for row in rows:
        key, tag, amounts = row[: len(columns)], row[len(columns)], Amounts(*map(int, row[len(columns) + 1 :]))
        currency, cost = None, None
        if tag:
            currency, price = read_price_tag(tag)
            cost = price.cost(
                prompt_tokens=amounts.prompt_tokens,
                cached_tokens=amounts.cached_tokens,
                completion_tokens=amounts.completion_tokens,
            )
        known = sums.get((key, currency))
        if known is not None:
            amounts += known.amounts
            cost = None if cost is None or known.cost is None else cost + known.cost
        sums[key, currency] = UsageSum(_group(dict(zip(columns, key, strict=True)), names), amounts, currency, cost)
    return list(sums.values())


def _group(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str | int | None]:
    group: dict[str, str | int | None] = {}
    for name, value in values.items():
        if name == "tenant":
            group |= {"tenant": names.get(value, value), "tenant_id": value}
        elif name == "adapter":
            owner = values["owner"]
            group["adapter"] = (f"{names.get(owner, owner)}/{value}" if owner else value) or None
        elif name == "version":
            group["version"] = value or None
        elif name != "owner":
            group[name] = value
    return group


def _write_cursor(position: Sequence[str | int]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(position)).decode().rstrip("=")


def _read_cursor(cursor: str | None, query: UsageQuery) -> tuple[str | int, ...] | None:
    """Decode the group that the cursor names; None without one.

    Raises:
        InvalidRequest: the cursor isn't one of ours for these groups.
    """
    if cursor is None:
        return None
    wanted = [int if name == "version" else str for name in _columns(query.group_by)]
    try:
        if len(cursor) > _MAX_CURSOR_BYTES:
            raise ValueError
        data = base64.b64decode(cursor.encode() + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        position = msgspec.json.decode(data, type=tuple[str | int, ...])
        is_ours = [type(part) for part in position] == wanted and all(map(_can_be, position))
    except (ValueError, binascii.Error, msgspec.DecodeError):
        is_ours = False
    if not is_ours or not wanted:
        raise InvalidRequest(
            "cursor is invalid: it isn't a next_cursor for this group_by.",
            param="cursor",
            hint="Pass next_cursor of the page before, with the same group_by.",
        )
    return position


def _can_be(part: str | int) -> bool:
    """Check whether a database accepts this part of a position."""
    return part.isprintable() if isinstance(part, str) else 0 <= part < 1 << 31
