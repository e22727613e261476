"""Grants: permissions for other tenants to use an adapter, as ``OWNER/NAME``, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Select, delete, distinct, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from loraserve.db import audit
from loraserve.db.models import Adapter, Grant, Tenant
from loraserve.db.names import is_name
from loraserve.db.paging import Page, check_limit, decode_cursor, make_page
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import GrantNotFound, InvalidRequest
from loraserve.limits import LIMITS
from loraserve.registry.repository import AdapterRepository
from loraserve.tenancy.identity.tenants import find_tenant_or_placeholder, remove_tenant_placeholder
from loraserve.types import TenantId


@dataclass(frozen=True, slots=True)
class GrantRecord:
    adapter: str
    tenant: str
    """Name of the tenant that may use the adapter."""
    created_at: datetime


class Grants:
    """Grants on tenants' adapters. A change is durable when the call returns.

    A grant ends with its adapter: a deleted adapter that is pushed again has none, a restored one
    has its old grants. An owner doesn't learn which tenants exist: it can grant to an unused name,
    and a tenant created later under that name has the grant. A grant to a deleted tenant stays in
    the list, but the next tenant of that name doesn't have it.

    Args:
        on_change: called with owner and adapter name after a change is durable, to invalidate this
            process's caches.
    """

    def __init__(
        self, database: Database, on_change: Callable[[TenantId, str], None], *, clock: Clock = utc_now
    ) -> None:
        self._database = database
        self._on_change = on_change
        self._clock = clock

    async def create(self, owner: TenantId, name: str, tenant: str, *, actor: str) -> tuple[GrantRecord, bool]:
        """Let the tenant of this name use the adapter; return the grant, and whether it is new.

        It takes effect at once on this server, within seconds on others, and as soon as such a
        tenant exists.

        Raises:
            AdapterNotFound: `owner` has no such adapter.
            TenantNotFound: no tenant can have this name.
            InvalidRequest: the tenant is the owner, the adapter has
                `LIMITS.max_grants_per_adapter`, or the tenant has `LIMITS.max_grants_per_tenant` of
                this owner.
        """
        now = self._clock()
        async with self._database.write() as session:
            adapter = await AdapterRepository(session, owner).adapter(name, is_locking=True)
            name = adapter.name
            grantee = await find_tenant_or_placeholder(session, tenant, now=now)
            if grantee.id == owner:
                raise InvalidRequest("The adapter is this tenant's own; it needs no grant.", param="tenant")
            row = await self._find(session, adapter, tenant)
            if row is not None and row.tenant_id == grantee.id:
                return GrantRecord(name, tenant, row.created_at), False
            # a grant to an earlier tenant of this name becomes this tenant's, and looks unchanged
            record = GrantRecord(name, tenant, now if row is None else row.created_at)
            if row is None:
                await self._check_room(session, owner, adapter, tenant)
            else:
                await self._delete(session, adapter, tenant)
            session.add(
                Grant(adapter_id=adapter.id, tenant_id=grantee.id, created_at=record.created_at, created_by=actor)
            )
            self._audit(session, "grant.create", owner, name, tenant, actor, now)
        self._on_change(owner, name)
        return record, row is None

    async def _check_room(self, session: AsyncSession, owner: TenantId, adapter: Adapter, tenant: str) -> None:
        """Check that there is room for one more grant.

        Raises:
            InvalidRequest: the adapter, or the tenant from this owner, has the maximum number of
                grants.
        """
        mine = select(func.count()).select_from(_grants_of(adapter).subquery())
        if (await session.scalar(mine) or 0) >= LIMITS.max_grants_per_adapter:
            raise InvalidRequest(
                f"The adapter has {LIMITS.max_grants_per_adapter} grants, the maximum.",
                param="tenant",
                hint="Remove one first.",
            )
        theirs = (
            select(func.count(distinct(Grant.adapter_id)))
            .join(Adapter, Adapter.id == Grant.adapter_id)
            .join(Tenant, Tenant.id == Grant.tenant_id)
            .where(Tenant.name == tenant, Adapter.tenant_id == owner, Adapter.deleted_at.is_(None))
        )
        if (await session.scalar(theirs) or 0) >= LIMITS.max_grants_per_tenant:
            raise InvalidRequest(
                f"{LIMITS.max_grants_per_tenant} of this owner's adapters are granted to that tenant, the maximum.",
                param="tenant",
            )

    async def get(self, owner: TenantId, name: str, tenant: str) -> GrantRecord:
        """Read the tenant's grant.

        Raises:
            AdapterNotFound: `owner` has no such adapter.
            GrantNotFound: the tenant has no grant, or there is no such tenant; the text is the
                same.
        """
        async with self._database.read() as session:
            adapter = await AdapterRepository(session, owner).adapter(name)
            name = adapter.name
            return _record(name, await self._find(session, adapter, tenant), tenant)

    async def list(
        self, owner: TenantId, name: str, *, limit: int = 50, cursor: str | None = None
    ) -> Page[GrantRecord]:
        """List a page of the adapter's grants by tenant name.

        Raises:
            AdapterNotFound: `owner` has no such adapter.
        """
        after = decode_cursor(cursor)
        check_limit(limit)
        async with self._database.read() as session:
            adapter = await AdapterRepository(session, owner).adapter(name)
            name = adapter.name
            query = _grants_of(adapter).order_by(Tenant.name).limit(limit + 1)
            if after is not None:
                query = query.where(Tenant.name > after)
            rows = (await session.execute(query)).all()
        return make_page(rows, limit, lambda row: row[1], lambda row: GrantRecord(name, row[1], row[0].created_at))

    async def delete(self, owner: TenantId, name: str, tenant: str, *, actor: str) -> None:
        """Revoke the tenant's grant: at once here, within seconds on other servers.

        Running requests complete.

        Raises:
            AdapterNotFound, GrantNotFound: as `get`.
        """
        now = self._clock()
        async with self._database.write() as session:
            adapter = await AdapterRepository(session, owner).adapter(name, is_locking=True)
            name = adapter.name
            _record(name, await self._find(session, adapter, tenant), tenant)
            await self._delete(session, adapter, tenant)
            # unconditional, so that the time taken doesn't reveal whether the tenant exists
            await remove_tenant_placeholder(session, tenant)
            self._audit(session, "grant.delete", owner, name, tenant, actor, now)
        self._on_change(owner, name)

    async def _find(self, session: AsyncSession, adapter: Adapter, tenant: str) -> Grant | None:
        if not is_name(tenant):
            return None
        row = (await session.execute(_grants_of(adapter).where(Tenant.name == tenant))).first()
        return None if row is None else row[0]

    @staticmethod
    async def _delete(session: AsyncSession, adapter: Adapter, tenant: str) -> None:
        """Delete the adapter's grants to all tenants that have or had this name."""
        named = select(Tenant.id).where(Tenant.name == tenant)
        await session.execute(delete(Grant).where(Grant.adapter_id == adapter.id, Grant.tenant_id.in_(named)))

    @staticmethod
    def _audit(
        session: AsyncSession, action: str, owner: TenantId, name: str, tenant: str, actor: str, now: datetime
    ) -> None:
        audit.record(session, action, name, actor=actor, tenant=owner, at=now, detail={"tenant": tenant})


def _grants_of(adapter: Adapter) -> Select[Grant, str]:
    """Select the adapter's grants with tenant names, one per name.

    It is that of the live tenant if there is one.
    """
    query = select(Grant, Tenant.name).join(Tenant, Tenant.id == Grant.tenant_id).where(Grant.adapter_id == adapter.id)
    other, namesake = aliased(Grant), aliased(Tenant)
    better = (
        select(other.adapter_id)
        .join(namesake, namesake.id == other.tenant_id)
        .where(other.adapter_id == adapter.id, namesake.name == Tenant.name, namesake.id != Tenant.id)
        .where(or_(namesake.deleted_at.is_(None), Tenant.deleted_at.is_not(None) & (namesake.id > Tenant.id)))
    )
    return query.where(~better.exists())


def _record(name: str, row: Grant | None, tenant: str) -> GrantRecord:
    if row is None:
        # an invalid name isn't repeated in the message
        shown = f'the tenant "{tenant}"' if is_name(tenant) else "a tenant of that name"
        raise GrantNotFound(
            f'The adapter "{name}" is not granted to {shown}.', hint=f"See: loraserve grant list {name}"
        )
    return GrantRecord(name, tenant, row.created_at)
