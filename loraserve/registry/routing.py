"""SQL of the token path: resolution of names, and the names that a tenant may use.

These are limited to its own and granted adapters.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Integer, Row, Select, bindparam, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from loraserve.adapters.ir import SCORE
from loraserve.db.models import EXTRA_COLUMNS, Adapter, AdapterVersion, Alias, Grant, Tenant
from loraserve.registry.binding import Route, SplitTarget, Target
from loraserve.registry.model_name import BASE_FALLBACK, LIVE, ParsedModel
from loraserve.registry.records import QUARANTINED, ServableAdapter, extras_of
from loraserve.types import AdapterRef, BaseSpec, Digest, TenantId


class RouteRepository:
    """Routes of the names that `tenant` may use, on one connection.

    Adapters not granted to it are absent.

    Args:
        served: base of this server; versions of another base can't be served.
    """

    def __init__(self, connection: AsyncConnection, tenant: TenantId, served: BaseSpec) -> None:
        self._connection = connection
        self._tenant = tenant
        self._served = served

    async def route(self, model: ParsedModel) -> Route | None:
        """Find the route of `model`, which isn't the base.

        None if it is absent, deleted, or another tenant's without a grant.
        """
        # most adapters have only this one version, so that a single query suffices
        row = await self._find(model)
        if row is None or row.number is None:
            return None
        number: int = row.number
        split = {part["version"]: part["weight"] for part in row.split or ()}
        shadow = row.shadow
        spare = await self._fallback_number(row)
        others = {*split, *((shadow["version"],) if shadow else ()), *((spare,) if spare else ())} - {number}
        targets = {number: self._target(row, row)}
        if others:
            targets |= await self._targets(row, others)
        return Route(
            adapter_id=row.adapter_id,
            alias=model.alias or "",
            main=targets[number],
            split=tuple(SplitTarget(targets[one], split[one]) for one in sorted(split) if one in targets),
            fallback=None if spare is None else targets.get(spare),
            is_base_fallback=row.fallback == BASE_FALLBACK,
            shadow=targets.get(shadow["version"]) if shadow else None,
            shadow_share=float(shadow["share"]) if shadow else 0.0,
        )

    async def _find(self, model: ParsedModel) -> Row[Any] | None:
        """Find the row of the first adapter that `model` may mean and that exists.

        It hides the others, whether or not it has the version.
        """
        parameters = {"tenant": self._tenant, "alias": model.alias or "", "version": model.version}
        row: Row[Any] | None = None
        for key in model.own_keys:
            row = (await self._connection.execute(_OWN, {**parameters, "key": key})).one_or_none()
            if row is not None:
                return row
        if model.granted is not None:
            owner, key = model.granted
            parameters |= {"owner": owner, "key": key}
            row = (await self._connection.execute(_GRANTED, parameters)).one_or_none()
        return row

    async def servable(self, limit: int) -> list[ServableAdapter]:
        """List the tenant's adapters that a bare name reaches, by name, then those granted to it.

        Those that nothing answers for are left out, and granted ones whose ``OWNER/NAME`` is the
        name of an own one.

        Nothing answers for a version that is in quarantine or of another base, and has no fallback.
        """
        own = _live(self._served.digest).where(Adapter.tenant_id == self._tenant).order_by(Adapter.name_key)
        own_one = aliased(Adapter)
        hiding = select(own_one.id).where(
            own_one.tenant_id == self._tenant,
            own_one.name_key == Tenant.name + "/" + Adapter.name_key,
            own_one.deleted_at.is_(None),
        )
        granted = (
            _live(self._served.digest)
            .join(Grant, Grant.adapter_id == Adapter.id)
            .where(Grant.tenant_id == self._tenant, Adapter.tenant_id != self._tenant, ~hiding.exists())
            .order_by(Tenant.name, Adapter.name_key)
        )
        found = [(row, True) for row in await self._connection.execute(own.limit(limit))]
        if left := limit - len(found):
            found += [(row, False) for row in await self._connection.execute(granted.limit(left))]
        return [
            ServableAdapter(
                name=row.adapter,
                owner=None if is_own else row.tenant,
                owned_by=row.tenant,
                created_at=row.created_at,
                version=row.number,
                digest=Digest(row.digest),
                size_bytes=row.size_bytes,
            )
            for row, is_own in found
        ]

    async def _fallback_number(self, adapter: Row[Any]) -> int | None:
        """Look up the version number of the adapter's fallback.

        None if there is none or it is the base.
        """
        if adapter.fallback is None or adapter.fallback == BASE_FALLBACK:
            return None
        if adapter.fallback.isdigit():
            return int(adapter.fallback)
        query = select(Alias.version).where(Alias.adapter_id == adapter.adapter_id, Alias.name == adapter.fallback)
        return await self._connection.scalar(query)

    async def _targets(self, adapter: Row[Any], numbers: set[int]) -> dict[int, Target]:
        """Read the versions of these numbers that aren't deleted."""
        query = select(*_TARGET_COLUMNS).where(
            AdapterVersion.adapter_id == adapter.adapter_id,
            AdapterVersion.number.in_(numbers),
            AdapterVersion.deleted_at.is_(None),
        )
        return {row.number: self._target(adapter, row) for row in await self._connection.execute(query)}

    def _target(self, adapter: Row[Any], row: Row[Any]) -> Target:
        """Build the target that rows with the adapter's columns and a version's describe."""
        ref = AdapterRef(
            tenant=TenantId(adapter.tenant_id),
            name=adapter.name,
            version=row.number,
            digest=Digest(row.digest),
            config_blob=Digest(row.config_blob),
            weights_blob=Digest(row.weights_blob),
            has_head=SCORE in row.target_modules,
            extras=extras_of(row),
        )
        return Target(ref, row.created_at, row.state, tuple(row.checks), Digest(row.base_digest), self._served)


_ADAPTER_COLUMNS = (Adapter.id.label("adapter_id"), Adapter.tenant_id, Adapter.name, Adapter.fallback)
_TARGET_COLUMNS = (
    AdapterVersion.number,
    AdapterVersion.digest,
    AdapterVersion.config_blob,
    AdapterVersion.weights_blob,
    AdapterVersion.target_modules,
    AdapterVersion.created_at,
    AdapterVersion.state,
    AdapterVersion.checks,
    AdapterVersion.base_digest,
    *EXTRA_COLUMNS,
)


def _route() -> Select[Any]:
    """Select an adapter by name with an alias and the version that is meant.

    The version is NULL if it is deleted.
    """
    number_meant = func.coalesce(Alias.version, bindparam("version", type_=Integer))
    return (
        select(*_ADAPTER_COLUMNS, Alias.split, Alias.shadow, *_TARGET_COLUMNS)
        .outerjoin(Alias, (Alias.adapter_id == Adapter.id) & (Alias.name == bindparam("alias")))
        .outerjoin(
            AdapterVersion,
            (AdapterVersion.adapter_id == Adapter.id)
            & (AdapterVersion.number == number_meant)
            & AdapterVersion.deleted_at.is_(None),
        )
        .where(Adapter.name_key == bindparam("key"), Adapter.deleted_at.is_(None))
    )


def _is_granted() -> ColumnElement[bool]:
    """Build the condition that the tenant may use the adapter of the named owner.

    It may use its own and those granted to it.
    """
    tenant: BindParameter[str] = bindparam("tenant")
    granted = select(Grant.adapter_id).where(Grant.adapter_id == Adapter.id, Grant.tenant_id == tenant)
    owners = select(Tenant.id).where(Tenant.name == bindparam("owner"), Tenant.deleted_at.is_(None))
    return Adapter.tenant_id.in_(owners) & or_(Adapter.tenant_id == tenant, granted.exists())


# built once: building a statement for each query takes half as long again
_OWN = _route().where(Adapter.tenant_id == bindparam("tenant"))
_GRANTED = _route().where(_is_granted())


def _live(base: Digest) -> Select[str, str, datetime, int, str, int]:
    """Build a query of every adapter that a bare name reaches on this base."""
    columns = select(
        Tenant.name.label("tenant"),
        Adapter.name.label("adapter"),
        Adapter.created_at,
        AdapterVersion.number,
        AdapterVersion.digest,
        AdapterVersion.size_bytes,
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
            or_(
                (AdapterVersion.state != QUARANTINED) & (AdapterVersion.base_digest == base),
                Adapter.fallback.is_not(None),
            ),
        )
    )
