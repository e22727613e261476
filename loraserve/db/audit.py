"""Audit log: one row per change, written in the transaction of the change."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import AuditRow

SERVER = "server"
"""Actor of the server's own actions, such as the first start."""


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
