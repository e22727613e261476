"""Tenants. A tenant is identified by its id; its name is free again after a delete."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from loraserve.db import audit
from loraserve.db.idempotency import Once
from loraserve.db.models import AuditRow, Grant, StoredResponseRow, Tenant
from loraserve.db.names import is_name
from loraserve.db.paging import Page, check_limit, decode_cursor, make_page
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import AlreadyExists, Conflict, InvalidRequest, QuotaExceeded, TenantNotFound
from loraserve.limits import LIMITS, NAME_PATTERN
from loraserve.tenancy.identity.policy import NO_POLICY, TenantLimits, TenantPolicy, policy_of_row, read_weight
from loraserve.tenancy.prices import read_prices
from loraserve.types import TenantId

DEFAULT_TENANT = "default"
"""Name of the tenant that is created at the first start and that admin keys act for by default."""


@dataclass(frozen=True, slots=True)
class TenantRecord:
    id: TenantId
    name: str
    policy: TenantPolicy
    created_at: datetime

    @property
    def limits(self) -> TenantLimits:
        return self.policy.limits


@dataclass(frozen=True, slots=True)
class TenantChange:
    """Changes to a tenant; fields that aren't given stay as they are."""

    limits: Mapping[str, int | float | None] = field(default_factory=dict)
    """Limits by their names in `TenantLimits`; None removes a limit."""
    weight: float | None = None
    prices: Mapping[str, Any] | None = None
    """Complete price table (`read_prices`); an empty one removes all prices."""

    def apply(self, policy: TenantPolicy) -> TenantPolicy:
        """Apply the change to `policy`.

        Raises:
            InvalidRequest: a value is invalid; `param` names it.
        """
        return TenantPolicy(
            limits=replace(policy.limits, **dict(self.limits)),  # type: ignore[arg-type]
            weight=policy.weight if self.weight is None else read_weight(self.weight),
            prices=policy.prices if self.prices is None else read_prices(self.prices),
        )


_IS_PLACEHOLDER = Tenant.deleted_at == Tenant.created_at
"""Condition for placeholders: rows of tenants that don't exist yet but have grants."""


def tenant_not_found() -> TenantNotFound:
    """Build the same error for absent, deleted and other tenants."""
    return TenantNotFound("There is no such tenant.", hint="See: loraserve tenant list")


async def insert_tenant(
    session: AsyncSession, name: str, policy: TenantPolicy, *, actor: str, now: datetime
) -> TenantRecord:
    """Insert a tenant in the session's transaction, with the grants that its name had before."""
    await _lock_name(session, name)
    row = Tenant(id=str(ULID.from_datetime(now)), name=name, created_at=now, deleted_at=None, **_columns(policy))
    session.add(row)
    # The audit row refers to the tenant's row, so flush that first.
    await session.flush()
    # move the grants of the placeholder to the tenant
    absent = select(Tenant.id).where(Tenant.name == name, _IS_PLACEHOLDER)
    await session.execute(update(Grant).where(Grant.tenant_id.in_(absent)).values(tenant_id=row.id))
    await remove_tenant_placeholder(session, name)
    audit.record(session, "tenant.create", name, actor=actor, tenant=row.id, at=now, detail=_columns(policy))
    return _to_record(row)


def _columns(policy: TenantPolicy) -> dict[str, Any]:
    prices = {} if policy.prices is None else policy.prices.as_json()
    return {"limits": asdict(policy.limits), "weight": policy.weight, "prices": prices}


async def find_tenant_or_placeholder(session: AsyncSession, name: str, *, now: datetime) -> Tenant:
    """Find the live tenant's row, or a placeholder for this name.

    Owners mustn't learn which it is.

    Raises:
        TenantNotFound: no tenant can have this name.
    """
    if not is_name(name):
        raise tenant_not_found()
    await _lock_name(session, name)
    named = select(Tenant).where(Tenant.name == name)
    live = (await session.scalars(named.where(Tenant.deleted_at.is_(None)))).one_or_none()
    # unconditional, so that both cases take the same time
    absent = (await session.scalars(named.where(_IS_PLACEHOLDER).limit(1))).one_or_none()
    row = live or absent
    if row is None:
        row = Tenant(id=str(ULID.from_datetime(now)), name=name, created_at=now, deleted_at=now, **_columns(NO_POLICY))
        session.add(row)
        await session.flush()
    return row


async def remove_tenant_placeholder(session: AsyncSession, name: str) -> None:
    """Remove the placeholder for this name if it has no grants left; no-op if there is none."""
    await _lock_name(session, name)
    is_granted = select(Grant.adapter_id).where(Grant.tenant_id == Tenant.id).exists()
    # a tenant that lived for less than the clock's resolution is no placeholder: its creation was
    # audited
    has_lived = select(AuditRow.id).where(AuditRow.tenant_id == Tenant.id).exists()
    awaited = Tenant.name == name, _IS_PLACEHOLDER, ~is_granted, ~has_lived
    await session.execute(delete(Tenant).where(*awaited).execution_options(synchronize_session=False))


async def _lock_name(session: AsyncSession, name: str) -> None:
    """Lock the name, so that no other transaction creates such a tenant or grants to it.

    SQLite has one writer anyway.
    """
    if session.get_bind().dialect.name == "postgresql":
        await session.execute(select(func.pg_advisory_xact_lock(func.hashtext(f"tenant:{name}"))))


async def find_tenant(session: AsyncSession, name: str, *, is_locking: bool = False) -> Tenant:
    """Find the live tenant's row.

    Raises:
        TenantNotFound: there is none of this name.
    """
    query = select(Tenant).where(Tenant.name == name, Tenant.deleted_at.is_(None))
    row = None
    if is_name(name):
        row = (await session.scalars(query.with_for_update(key_share=True) if is_locking else query)).one_or_none()
    if row is None:
        raise tenant_not_found()
    return row


class Tenants:
    """Tenants of this server; for admins.

    Args:
        on_change: called with the id after a change or delete is durable, to invalidate this
            process's caches.
    """

    def __init__(self, database: Database, on_change: Callable[[TenantId], None], *, clock: Clock = utc_now) -> None:
        self.on_delete: Callable[[TenantId], None] = lambda _: None
        """Callback with the id after a delete is durable, called after `on_change`;
        invalidates cached routes.
        """
        self._database = database
        self._on_change = on_change
        self._clock = clock

    async def create(
        self,
        name: str,
        *,
        actor: str,
        limits: TenantLimits | None = None,
        policy: TenantPolicy | None = None,
        once: Once[TenantRecord] | None = None,
    ) -> TenantRecord:
        """Create a tenant without keys or adapters.

        Args:
            limits: limits of the new tenant, as a shorthand for a `policy` that has only these.

        Raises:
            InvalidRequest: the name doesn't match.
            AlreadyExists: a live tenant has it.
            Replay: `once` was used before.
        """
        if not is_name(name):
            raise InvalidRequest(f"name should match {NAME_PATTERN}.", param="name")
        policy = policy or TenantPolicy(limits=limits or TenantLimits())
        taken = AlreadyExists(f'The tenant "{name}" exists already.', hint=f"See: loraserve tenant show {name}")
        try:
            async with self._database.write() as session:
                if once is not None:
                    await once.begin(session)
                live = Tenant.deleted_at.is_(None)
                if await session.scalar(select(Tenant.id).where(Tenant.name == name, live)) is not None:
                    raise taken
                if (
                    await session.scalar(select(func.count()).select_from(Tenant).where(live)) or 0
                ) >= LIMITS.max_tenants:
                    raise QuotaExceeded(
                        f"There are {LIMITS.max_tenants} tenants, the maximum.", hint="Delete one first."
                    )
                made = await insert_tenant(session, name, policy, actor=actor, now=self._clock())
                await session.flush()
                if once is not None:
                    await once.finish(session, made)
        except IntegrityError as error:
            # another replica created it first
            raise taken from error
        return made

    async def get(self, name: str) -> TenantRecord:
        """Read the live tenant of this name.

        Raises:
            TenantNotFound: there is none.
        """
        async with self._database.read() as session:
            return _to_record(await find_tenant(session, name))

    async def list(self, *, limit: int = 50, cursor: str | None = None) -> Page[TenantRecord]:
        """List a page of the live tenants by name."""
        after = decode_cursor(cursor)
        query = select(Tenant).where(Tenant.deleted_at.is_(None)).order_by(Tenant.name).limit(check_limit(limit) + 1)
        if after is not None:
            query = query.where(Tenant.name > after)
        async with self._database.read() as session:
            rows = (await session.scalars(query)).all()
        return make_page(rows, limit, lambda row: row.name, _to_record)

    async def names(self, ids: set[TenantId]) -> dict[TenantId, str]:
        """Look up the names of these tenants, deleted ones included."""
        async with self._database.read() as session:
            rows = (await session.execute(select(Tenant.id, Tenant.name).where(Tenant.id.in_(ids)))).all()
        return {TenantId(ident): name for ident, name in rows}

    async def update(
        self,
        name: str,
        change: TenantChange,
        *,
        actor: str,
        check: Callable[[TenantRecord], None] = lambda _: None,
    ) -> TenantRecord:
        """Change the tenant: at once in this process, within `LIMITS.auth_cache_s` in others.

        Args:
            check: called with the locked tenant before the change; its exception cancels the
                change.

        Raises:
            TenantNotFound: there is none.
            InvalidRequest: a value is invalid; `param` names it.
        """
        now = self._clock()
        async with self._database.write() as session:
            row = await find_tenant(session, name, is_locking=True)
            before = _to_record(row)
            check(before)
            policy = change.apply(before.policy)
            old, new = _columns(before.policy), _columns(policy)
            changed = {column: value for column, value in new.items() if value != old[column]}
            for column, value in changed.items():
                setattr(row, column, value)
            if changed:
                audit.record(session, "tenant.update", name, actor=actor, tenant=row.id, at=now, detail=changed)
            record = _to_record(row)
        self._on_change(record.id)
        return record

    async def delete(self, name: str, *, actor: str) -> None:
        """Delete the tenant: at once in this process, within seconds in others.

        Its rows stay, but its stored responses, which have its texts, go.

        Raises:
            TenantNotFound: there is none.
            Conflict: it is the default tenant.
        """
        if name == DEFAULT_TENANT:
            raise Conflict(f'The tenant "{DEFAULT_TENANT}" can\'t be deleted: admin keys act for it by default.')
        now = self._clock()
        async with self._database.write(frees_space=True) as session:
            row = await find_tenant(session, name, is_locking=True)
            row.deleted_at = now
            audit.record(session, "tenant.delete", name, actor=actor, tenant=row.id, at=now)
            await session.execute(delete(StoredResponseRow).where(StoredResponseRow.tenant_id == row.id))
        self._on_change(TenantId(row.id))
        self.on_delete(TenantId(row.id))


def _to_record(row: Tenant) -> TenantRecord:
    policy = policy_of_row(row.limits, row.weight, row.prices)
    return TenantRecord(TenantId(row.id), row.name, policy, row.created_at)
