"""Steps common to all changes of an adapter, in the transaction of the change.

They are a new revision and an audit row.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db import audit
from loraserve.db.models import Adapter, Alias
from loraserve.registry.records import AliasTarget, ShadowPart
from loraserve.registry.repository import AdapterRepository, shadow_of, target_of


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
    """Point the alias to `version` alone as `move_alias` does.

    Keep its shadow unless that is the same version.
    """
    row = await repository.alias(adapter, alias)
    shadow = None if row is None else shadow_of(row)
    return await move_alias(session, repository, adapter, alias, AliasTarget(version), shadow, actor=actor, now=now)


async def move_alias(
    session: AsyncSession,
    repository: AdapterRepository,
    adapter: Adapter,
    alias: str,
    target: AliasTarget,
    shadow: ShadowPart | None,
    *,
    actor: str,
    now: datetime,
    action: str = "alias.move",
) -> Alias:
    """Point the alias to `target` with that shadow; no-op if it is there already.

    The adapter's row must be locked.

    A shadow that equals the only version that answers is dropped.
    """
    if shadow is not None and target.versions == (shadow.version,):
        shadow = None
    row = await repository.alias(adapter, alias)
    before = None if row is None else target_of(row)
    old_shadow = None if row is None else shadow_of(row)
    if row is not None and (before, old_shadow) == (target, shadow):
        return row
    row = await repository.set_alias(adapter, alias, target, shadow, now)
    detail = {"before": _shown(before), "after": _shown(target)}
    if old_shadow != shadow:
        detail["shadow"] = None if shadow is None else f"{shadow.version}={shadow.share:g}"
    record_change(session, repository, action, f"{adapter.name}@{alias}", actor=actor, now=now, **detail)
    return row


def _shown(target: AliasTarget | None) -> int | str | None:
    """Format a version number, or a split in the command line's notation."""
    if target is None:
        return None
    return str(target) if target.split else target.version


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
    """Write an audit row for the repository's tenant."""
    audit.record(session, action, target, actor=actor, tenant=repository.tenant, at=now, detail=dict(detail))
