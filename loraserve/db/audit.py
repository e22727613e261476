"""Audit log: one row per change, written in its transaction; and the list of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import AuditRow, Tenant
from loraserve.db.paging import Page, check_limit, decode_number_cursor, make_page
from loraserve.db.session import Database
from loraserve.types import TenantId

SERVER = "server"
"""Actor of the server's own actions, such as the first start."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An audit row as readers see it."""

    id: int
    at: datetime
    tenant: str | None
    """Name of the tenant; None for the server's own entries."""
    actor: str
    action: str
    target: str
    detail: Mapping[str, Any]


def record(
    session: AsyncSession,
    action: str,
    target: str,
    *,
    actor: str,
    tenant: str | None,
    at: datetime,
    detail: dict[str, Any] | None = None,
) -> None:
    """Add an audit row to the session's transaction.

    Args:
        action: action as ``noun.verb``: ``alias.move``.
        target: target in the command line's notation: ``sql@live``, ``acme``.
        actor: id of the key that acted.
        tenant: tenant of the target; None for the server's own actions.
    """
    session.add(AuditRow(at=at, tenant_id=tenant, actor=actor, action=action, target=target, detail=detail or {}))


async def list_entries(
    database: Database, tenant: TenantId | None, *, limit: int = 50, cursor: str | None = None
) -> Page[AuditEntry]:
    """List the audit entries of `tenant`, or with None of all tenants, newest first."""
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
