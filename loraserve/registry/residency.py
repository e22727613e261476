"""Owners of versions, to translate the engine's digests to names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import BLOB_COLUMNS, Adapter, AdapterVersion, OperatorPin, Tenant
from loraserve.db.paging import Page, check_limit, decode_cursor, make_page
from loraserve.db.session import Database
from loraserve.types import Digest, TenantId

MAX_DIGESTS_PER_QUERY = 1000
"""Digests in one statement; databases bound the number of parameters."""


@dataclass(frozen=True, slots=True)
class OwnedVersion:
    id: str
    tenant: TenantId
    tenant_name: str
    name: str
    version: int
    digest: Digest
    size_bytes: int
    state: str
    base_digest: Digest
    is_pinned: bool
    """Whether an operator has pinned this version, rather than another one of the same bytes."""


async def list_owned(
    database: Database,
    tenant: TenantId | None,
    *,
    limit: int,
    cursor: str | None,
    digests: Sequence[Digest] | None,
) -> Page[OwnedVersion]:
    """Return a page of live versions by id: those of `tenant`, or with None of all tenants.

    With `digests`, only those.
    """
    after = decode_cursor(cursor)
    query = (
        select(
            AdapterVersion.id,
            Tenant.id,
            Tenant.name,
            Adapter.name,
            AdapterVersion.number,
            AdapterVersion.digest,
            AdapterVersion.size_bytes,
            AdapterVersion.state,
            AdapterVersion.base_digest,
            OperatorPin.version.is_not(None),
        )
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .outerjoin(
            OperatorPin,
            (OperatorPin.adapter_id == AdapterVersion.adapter_id) & (OperatorPin.version == AdapterVersion.number),
        )
        .where(AdapterVersion.deleted_at.is_(None), Adapter.deleted_at.is_(None), Tenant.deleted_at.is_(None))
        .order_by(AdapterVersion.id)
        .limit(check_limit(limit) + 1)
    )
    if tenant is not None:
        query = query.where(Adapter.tenant_id == tenant)
    if after is not None:
        query = query.where(AdapterVersion.id > after)
    async with database.read() as session:
        if digests is None:
            rows = [_to_owned(row) for row in (await session.execute(query)).all()]
        else:
            rows = []
            for start in range(0, len(digests), MAX_DIGESTS_PER_QUERY):
                some = AdapterVersion.digest.in_(digests[start : start + MAX_DIGESTS_PER_QUERY])
                rows.extend(_to_owned(row) for row in (await session.execute(query.where(some))).all())
            rows.sort(key=lambda row: row.id)
    return make_page(rows, limit, lambda row: row.id, lambda row: row)


async def versions_stored_in(session: AsyncSession, digest: Digest, blob: Digest) -> list[tuple[TenantId, str, int]]:
    """Return tenant, name and number of the live versions with that digest and blob, by id."""
    query = (
        select(Adapter.tenant_id, Adapter.name, AdapterVersion.number)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .where(AdapterVersion.deleted_at.is_(None), Adapter.deleted_at.is_(None), Tenant.deleted_at.is_(None))
        .where(AdapterVersion.digest == digest)
        .where(or_(*(column == blob for column in BLOB_COLUMNS)))
        .order_by(AdapterVersion.id)
    )
    return [(TenantId(tenant), name, number) for tenant, name, number in (await session.execute(query)).all()]


def _to_owned(row: Sequence[Any]) -> OwnedVersion:
    ident, tenant, tenant_name, name, version, digest, size_bytes, state, base_digest, is_pinned = row
    return OwnedVersion(
        ident,
        TenantId(tenant),
        tenant_name,
        name,
        version,
        Digest(digest),
        size_bytes,
        state,
        Digest(base_digest),
        is_pinned,
    )
