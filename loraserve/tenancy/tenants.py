"""Tenants: made, listed, deleted. A tenant is its id; its name is free again after a delete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from loraserve.db import audit
from loraserve.db.idempotency import Once
from loraserve.db.models import Tenant
from loraserve.db.names import is_name
from loraserve.db.paging import Page, check_limit, decode_cursor, make_page
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import AlreadyExists, Conflict, InvalidRequest, QuotaExceeded, TenantNotFound
from loraserve.limits import LIMITS, NAME_PATTERN
from loraserve.types import TenantId

DEFAULT_TENANT = "default"
"""Made at the first start; the one that an admin key acts for when it names none."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may hold. None: only the server's own bounds."""

    max_adapters: int | None = None
    max_stored_bytes: int | None = None
    """Sum over its versions, charged in full also when another tenant has the same bytes."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not 0 <= value < 1 << 62:
                raise InvalidRequest(f"limits.{name} should be a number from 0 on.", param=f"limits.{name}")


@dataclass(frozen=True, slots=True)
class TenantRecord:
    id: TenantId
    name: str
    limits: TenantLimits
    created_at: datetime


def tenant_not_found() -> TenantNotFound:
    """One text for absent, deleted and somebody else's."""
    return TenantNotFound("There is no such tenant.", hint="See: loraserve tenant list")


async def insert_tenant(
    session: AsyncSession, name: str, limits: TenantLimits, *, actor: str, now: datetime
) -> TenantRecord:
    """A new tenant in the session's transaction."""
    row = Tenant(id=str(ULID.from_datetime(now)), name=name, limits=asdict(limits), created_at=now, deleted_at=None)
    session.add(row)
    # The audit row refers to the tenant's: that one goes first.
    await session.flush()
    audit.record(session, "tenant.create", name, actor=actor, tenant=row.id, at=now, detail={"limits": row.limits})
    return _to_record(row)


async def find_tenant(session: AsyncSession, name: str, *, is_locking: bool = False) -> Tenant:
    """The live tenant's row.

    Raises:
        TenantNotFound: there is none of this name.
    """
    query = select(Tenant).where(Tenant.name == name, Tenant.deleted_at.is_(None))
    row = None
    if is_name(name):
        row = (await session.scalars(query.with_for_update() if is_locking else query)).one_or_none()
    if row is None:
        raise tenant_not_found()
    return row


class Tenants:
    """Every tenant of this server; for admins.

    Args:
        on_delete: told the id after the delete is durable, so that this process forgets the tenant's keys at once.
    """

    def __init__(self, database: Database, on_delete: Callable[[TenantId], None], *, clock: Clock = utc_now) -> None:
        self._database = database
        self._on_delete = on_delete
        self._clock = clock

    async def create(
        self, name: str, *, actor: str, limits: TenantLimits | None = None, once: Once[TenantRecord] | None = None
    ) -> TenantRecord:
        """A new tenant without keys or adapters.

        Raises:
            InvalidRequest: the name doesn't match.
            AlreadyExists: a live tenant has it.
            Replay: `once` was used before.
        """
        if not is_name(name):
            raise InvalidRequest(f"name should match {NAME_PATTERN}.", param="name")
        taken = AlreadyExists(f'A tenant "{name}" exists.', hint=f"See: loraserve tenant show {name}")
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
                    raise QuotaExceeded(f"There are {LIMITS.max_tenants} tenants, the most this server takes.")
                made = await insert_tenant(session, name, limits or TenantLimits(), actor=actor, now=self._clock())
                await session.flush()
                if once is not None:
                    await once.finish(session, made)
        except IntegrityError as error:
            # Another replica was quicker.
            raise taken from error
        return made

    async def get(self, name: str) -> TenantRecord:
        """The live tenant of this name.

        Raises:
            TenantNotFound: there is none.
        """
        async with self._database.read() as session:
            return _to_record(await find_tenant(session, name))

    async def list(self, *, limit: int = 50, cursor: str | None = None) -> Page[TenantRecord]:
        """The live tenants by name."""
        after = decode_cursor(cursor)
        query = select(Tenant).where(Tenant.deleted_at.is_(None)).order_by(Tenant.name).limit(check_limit(limit) + 1)
        if after is not None:
            query = query.where(Tenant.name > after)
        async with self._database.read() as session:
            rows = (await session.scalars(query)).all()
        return make_page(rows, limit, lambda row: row.name, _to_record)

    async def names(self, ids: set[TenantId]) -> dict[TenantId, str]:
        """The names of these tenants, the deleted too."""
        async with self._database.read() as session:
            rows = (await session.execute(select(Tenant.id, Tenant.name).where(Tenant.id.in_(ids)))).all()
        return {TenantId(ident): name for ident, name in rows}

    async def delete(self, name: str, *, actor: str) -> None:
        """The tenant's keys and model names work no more: at once here, within seconds in other processes. Its rows stay.

        Raises:
            TenantNotFound: there is none.
            Conflict: it is the default tenant.
        """
        if name == DEFAULT_TENANT:
            raise Conflict(f'The tenant "{DEFAULT_TENANT}" can\'t be deleted: admin keys act for it.')
        now = self._clock()
        async with self._database.write() as session:
            row = await find_tenant(session, name, is_locking=True)
            row.deleted_at = now
            audit.record(session, "tenant.delete", name, actor=actor, tenant=row.id, at=now)
        self._on_delete(TenantId(row.id))


def _to_record(row: Tenant) -> TenantRecord:
    return TenantRecord(TenantId(row.id), row.name, TenantLimits(**row.limits), row.created_at)
