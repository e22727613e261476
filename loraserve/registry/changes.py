"""What every change of an adapter does: a new revision, an audit row. In the change's own transaction."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db import audit
from loraserve.db.models import Adapter, Alias
from loraserve.registry.repository import AdapterRepository


async def point_alias(
    session: AsyncSession,
    repository: AdapterRepository,
    adapter: Adapter,
    alias: str,
    version: int,
    *,
    actor: str,
    now: datetime,
) -> Alias:
    """The alias names `version`; a new revision and an audit row only if it didn't before. The adapter's row must be locked."""
    row = await repository.alias(adapter, alias)
    if row is not None and row.version == version:
        return row
    before = None if row is None else row.version
    row = await repository.point(adapter, alias, version, now)
    target = f"{adapter.name}@{alias}"
    record_change(session, repository, "alias.move", target, actor=actor, now=now, before=before, after=version)
    return row


def record_change(
    session: AsyncSession,
    repository: AdapterRepository,
    action: str,
    target: str,
    *,
    actor: str,
    now: datetime,
    **detail: str | int | None,
) -> None:
    """An audit row for a thing of the repository's tenant; `detail` is kept as it is."""
    audit.record(session, action, target, actor=actor, tenant=repository.tenant, at=now, detail=dict(detail))
