"""Who did what: one row per change, written in the transaction of the change."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import AuditRow

SERVER = "server"
"""The actor of what the server does by itself, such as the first start."""


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
    """The row is durable exactly if the session's transaction is.

    Args:
        action: what was done, as ``noun.verb``: ``alias.move``.
        target: on what, as people write it: ``sql@live``, ``acme``.
        actor: the id of the key that did it.
        tenant: whose thing it is; None for the server's own.
    """
    session.add(AuditRow(at=at, tenant_id=tenant, actor=actor, action=action, target=target, detail=detail or {}))
