"""Report usage and its cost."""

from __future__ import annotations

import asyncio
import csv
import io
from datetime import UTC, date, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.management.payloads.responses import answer, content_etag, header_list
from loraserve.api.services import Services, services_of
from loraserve.contract import usage
from loraserve.contract.result import Page
from loraserve.errors import InvalidRequest, NotFound
from loraserve.tenancy.billing.journal import Amounts
from loraserve.tenancy.billing.meter import plain
from loraserve.tenancy.billing.usage_report import UsageQuery, UsageReports, UsageSum
from loraserve.tenancy.identity.auth import Caller
from loraserve.tenancy.identity.tenants import tenant_not_found
from loraserve.types import TenantId

router = APIRouter()

_AMOUNTS = Amounts.__struct_fields__
_FORMATS = ("json", "csv")
_CSV = "text/csv"


@router.get("/usage", response_model=Page[usage.UsageSum], response_model_exclude_unset=True)
async def get_usage(
    request: Request,
    tenant: str | None = None,
    adapter: str | None = None,
    start: Annotated[str | None, Query(alias="from")] = None,
    end: Annotated[str | None, Query(alias="to")] = None,
    group_by: str = "",
    format: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
    caller: Caller = Depends(scopes.require(scopes.ADAPTERS_READ)),
) -> Response:
    """Sum the usage of the key's tenant, or for an admin of all tenants.

    `group_by` lists the columns to sum by (tenant, adapter, version, hour, day).

    `from` and `to` are dates or instants with an offset, taken to whole hours. ``format=csv``, or
    ``Accept: text/csv``, gives every sum in one file.
    """
    services = services_of(request)
    reports = _reports(services)
    query = UsageQuery(
        tenant=await _visible_tenant(reports, caller, tenant),
        adapter=None if adapter is None else "" if adapter == services.engine.base.id else adapter,
        start=_read_instant(start, "from"),
        end=_read_instant(end, "to"),
        group_by=tuple(filter(None, group_by.split(","))),
    )
    if _wants_csv(request, format):
        content = await asyncio.to_thread(_csv, await reports.all(query), query.group_by)
        headers = {"ETag": content_etag(content), "Content-Disposition": 'attachment; filename="usage.csv"'}
        return Response(content, headers=headers, media_type=_CSV)
    page = await reports.page(query, limit=limit, cursor=cursor)
    return answer(
        request,
        Page(data=[usage.UsageSum(**_fields(item)) for item in page.items], next_cursor=page.next_cursor),
    )


def _reports(services: Services) -> UsageReports:
    """Return the reports of usage.

    Raises:
        NotFound: this server meters nothing.
    """
    if services.usage is None:
        raise NotFound("This server doesn't meter usage.")
    return UsageReports(services.usage)


async def _visible_tenant(reports: UsageReports, caller: Caller, tenant: str | None) -> TenantId | None:
    """Return the tenant to report on; None: all of them.

    Raises:
        TenantNotFound: there is no such tenant, or the caller isn't told of it: the two read the
            same.
    """
    if caller.sees_all:
        return None if tenant is None else await reports.find_tenant(tenant)
    if tenant is not None and tenant not in (caller.tenant_name, caller.tenant):
        raise tenant_not_found()
    return caller.tenant


def _read_instant(text: str | None, param: str) -> datetime | None:
    """Return the instant that the text says; None without a text.

    Raises:
        InvalidRequest: it is neither a date nor an instant that we can tell.
    """
    if text is None:
        return None
    try:
        if len(text) == len("2026-11-21"):
            instant = datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC)
        else:
            instant = datetime.fromisoformat(text)
    except ValueError:
        instant = None
    if instant is None or instant.tzinfo is None or not 1970 < instant.year < 9999:
        raise InvalidRequest(
            f"{param} should be a date, or an instant with a UTC offset, after 1970.",
            param=param,
            hint="Use a form such as 2026-11-21 or 2026-11-21T17:00:00Z.",
        )
    return instant.astimezone(UTC)


def _wants_csv(request: Request, format: str | None) -> bool:
    """Return whether the answer should be CSV.

    Raises:
        InvalidRequest: `format` is none of ours.
    """
    if format is not None and format not in _FORMATS:
        raise InvalidRequest(f"format should be one of {', '.join(_FORMATS)}.", param="format")
    if format is not None:
        return format == "csv"
    accepted = (part.partition(";")[0].strip().lower() for part in (header_list(request, "accept") or "").split(","))
    return _CSV in accepted


def _fields(item: UsageSum) -> dict[str, Any]:
    amounts = {name: getattr(item.amounts, name) for name in _AMOUNTS}
    cost = None if item.cost is None else plain(item.cost)
    return {**item.group, **amounts, "cost": cost, "currency": item.currency}


def _csv(items: list[UsageSum], group_by: tuple[str, ...]) -> bytes:
    """Render every sum as a line, below the names of the columns; null is empty."""
    groups = [column for name in group_by for column in (("tenant", "tenant_id") if name == "tenant" else (name,))]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*groups, *_AMOUNTS, "cost", "currency"], lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(_fields(item) for item in items)
    return text.getvalue().encode()
