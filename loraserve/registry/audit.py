"""Queries of the audit rows, which `loraserve.db.audit` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select

from loraserve.db.models import AuditRow, Tenant
from loraserve.db.paging import Page, check_limit, decode_number_cursor, make_page
from loraserve.db.session import Database
from loraserve.types import TenantId


@dataclass(frozen=True, slots=True)
class AuditEntry:
    id: int
    at: datetime
    tenant: str | None
    """Name of the tenant; None for the server's own entries."""
    actor: str
    action: str
    target: str
    detail: Mapping[str, Any]


async def list_audit(
    database: Database, tenant: TenantId | None, *, limit: int = 50, cursor: str | None = None
) -> Page[AuditEntry]:
    """Return the audit entries of `tenant`, or with None of all tenants, newest first."""
    before = decode_number_cursor(cursor)
    query = (
        select(AuditRow, Tenant.name)
        .outerjoin(Tenant, Tenant.id == AuditRow.tenant_id)
        .order_by(AuditRow.id.desc())
        .limit(check_limit(limit) + 1)
    )
    if tenant is not None:
        query = query.where(AuditRow.tenant_id == tenant)
    if before is not None:
        query = query.where(AuditRow.id < before)
    async with database.read() as session:
        rows = [(row, name) for row, name in (await session.execute(query)).all()]
    return make_page(rows, limit, lambda pair: str(pair[0].id), lambda pair: _to_entry(*pair))


def _to_entry(row: AuditRow, tenant: str | None) -> AuditEntry:
    return AuditEntry(row.id, row.at, tenant, row.actor, row.action, row.target, row.detail)
