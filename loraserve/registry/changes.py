"""What every change of an adapter does: a new revision, an audit row. In the change's own transaction."""

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
    """All of the alias's traffic goes to `version`; its shadow stays, but where that is the same version. As `move_alias`."""
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
    """The alias leads to `target`, with that shadow; a new revision and an audit row only if it didn't before. The adapter's row must be locked.

    A shadow of the only version that answers would be its copy: there is none then.
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
    """A version's number; a split as the command line writes it."""
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
    """An audit row for a thing of the repository's tenant; `detail` is kept as it is."""
    audit.record(session, action, target, actor=actor, tenant=repository.tenant, at=now, detail=dict(detail))
