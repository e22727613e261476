"""The SQL of the token path: where a name leads, and which names a tenant may use. For one tenant; nothing of another's but what was granted to it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import Adapter, AdapterVersion, Alias, Grant, Tenant
from loraserve.registry.binding import Route, Target, Way
from loraserve.registry.model_name import BASE_FALLBACK, LIVE, ParsedModel
from loraserve.registry.records import QUARANTINED, ServableAdapter
from loraserve.types import AdapterRef, Digest, TenantId


class RouteRepository:
    """What the names that `tenant` may say mean, in one session. What isn't granted to it is absent."""

    def __init__(self, session: AsyncSession, tenant: TenantId) -> None:
        self._session = session
        self._tenant = tenant

    async def route(self, model: ParsedModel) -> Route | None:
        """Where `model`, which isn't the base, leads now; None: it is absent, deleted, or another tenant's who didn't grant it."""
        # most adapters have nothing but this one version, so that one question is all
        number_meant = func.coalesce(Alias.version, model.version)
        query = (
            select(Adapter, Alias, *_TARGET_COLUMNS)
            .outerjoin(Alias, (Alias.adapter_id == Adapter.id) & (Alias.name == (model.alias or "")))
            .outerjoin(
                AdapterVersion,
                (AdapterVersion.adapter_id == Adapter.id)
                & (AdapterVersion.number == number_meant)
                & AdapterVersion.deleted_at.is_(None),
            )
            .where(Adapter.name == model.name, Adapter.deleted_at.is_(None), self._may_use(model.owner))
        )
        row = (await self._session.execute(query)).one_or_none()
        if row is None:
            return None
        adapter: Adapter = row[0]
        alias: Alias | None = row[1]
        number: int | None = row.number
        if number is None:
            return None
        split = {} if alias is None else {part["version"]: part["weight"] for part in alias.split or ()}
        shadow = None if alias is None else alias.shadow
        spare = await self._fallback_number(adapter)
        others = {*split, *((shadow["version"],) if shadow else ()), *((spare,) if spare else ())} - {number}
        targets = {number: _target(adapter, row)}
        if others:
            targets |= await self._targets(adapter, others)
        return Route(
            adapter_id=adapter.id,
            alias=model.alias or "",
            main=targets[number],
            ways=tuple(Way(targets[one], split[one]) for one in sorted(split) if one in targets),
            fallback=None if spare is None else targets.get(spare),
            is_base_fallback=adapter.fallback == BASE_FALLBACK,
            shadow=targets.get(shadow["version"]) if shadow else None,
            shadow_share=float(shadow["share"]) if shadow else 0.0,
        )

    async def servable(self, limit: int) -> list[ServableAdapter]:
        """The tenant's adapters that a bare name reaches, by name, then those granted to it; not those that nothing answers for, being in quarantine."""
        own = _live().where(Adapter.tenant_id == self._tenant).order_by(Adapter.name)
        granted = (
            _live()
            .join(Grant, Grant.adapter_id == Adapter.id)
            .where(Grant.tenant_id == self._tenant, Adapter.tenant_id != self._tenant)
            .order_by(Tenant.name, Adapter.name)
        )
        found = [(row, True) for row in await self._session.execute(own.limit(limit))]
        if left := limit - len(found):
            found += [(row, False) for row in await self._session.execute(granted.limit(left))]
        return [
            ServableAdapter(
                name=row.adapter,
                owner=None if is_own else row.tenant,
                owned_by=row.tenant,
                created_at=row.created_at,
                version=row.number,
                digest=Digest(row.digest),
            )
            for row, is_own in found
        ]

    async def _fallback_number(self, adapter: Adapter) -> int | None:
        """The version that the adapter's fallback means; None: there is none, or it's the base."""
        if adapter.fallback is None or adapter.fallback == BASE_FALLBACK:
            return None
        if adapter.fallback.isdigit():
            return int(adapter.fallback)
        query = select(Alias.version).where(Alias.adapter_id == adapter.id, Alias.name == adapter.fallback)
        return await self._session.scalar(query)

    async def _targets(self, adapter: Adapter, numbers: set[int]) -> dict[int, Target]:
        """Those of the versions that aren't deleted."""
        query = select(*_TARGET_COLUMNS).where(
            AdapterVersion.adapter_id == adapter.id,
            AdapterVersion.number.in_(numbers),
            AdapterVersion.deleted_at.is_(None),
        )
        return {row.number: _target(adapter, row) for row in await self._session.execute(query)}

    def _may_use(self, owner: str | None) -> ColumnElement[bool]:
        mine = Adapter.tenant_id == self._tenant
        if owner is None:
            return mine
        granted = select(Grant.adapter_id).where(Grant.adapter_id == Adapter.id, Grant.tenant_id == self._tenant)
        tenants = select(Tenant.id).where(Tenant.name == owner, Tenant.deleted_at.is_(None))
        return Adapter.tenant_id.in_(tenants) & or_(mine, granted.exists())


_TARGET_COLUMNS = (
    AdapterVersion.number,
    AdapterVersion.digest,
    AdapterVersion.config_blob,
    AdapterVersion.weights_blob,
    AdapterVersion.created_at,
    AdapterVersion.state,
    AdapterVersion.checks,
)


def _target(adapter: Adapter, row: Row[Any]) -> Target:
    """Of a row with these columns."""
    ref = AdapterRef(
        tenant=TenantId(adapter.tenant_id),
        name=adapter.name,
        version=row.number,
        digest=Digest(row.digest),
        config_blob=Digest(row.config_blob),
        weights_blob=Digest(row.weights_blob),
    )
    return Target(ref, row.created_at, row.state, tuple(row.checks))


def _live() -> Select[str, str, datetime, int, str]:
    """Every adapter that a bare name reaches."""
    columns = select(
        Tenant.name.label("tenant"),
        Adapter.name.label("adapter"),
        Adapter.created_at,
        AdapterVersion.number,
        AdapterVersion.digest,
    )
    return (
        columns.select_from(Adapter)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .join(Alias, Alias.adapter_id == Adapter.id)
        .join(AdapterVersion, (AdapterVersion.adapter_id == Adapter.id) & (AdapterVersion.number == Alias.version))
        .where(
            Tenant.deleted_at.is_(None),
            Adapter.deleted_at.is_(None),
            AdapterVersion.deleted_at.is_(None),
            Alias.name == LIVE,
            or_(AdapterVersion.state != QUARANTINED, Adapter.fallback.is_not(None)),
        )
    )
