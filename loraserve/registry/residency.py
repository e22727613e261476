"""Owners of versions, to translate the engine's digests to names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import case, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import BLOB_COLUMNS, Adapter, AdapterVersion, OperatorPin, Tenant
from loraserve.db.names import is_adapter_name, name_key
from loraserve.db.paging import Page, check_limit, decode_cursor, make_page, wrong_cursor
from loraserve.db.session import Database
from loraserve.registry.model_name import MAX_VERSION
from loraserve.types import Digest, TenantId

MAX_DIGESTS_PER_QUERY = 1000
"""Digests in one statement; databases bound the number of parameters."""

_IS_PINNED = (
    select(OperatorPin.version)
    .where(OperatorPin.adapter_id == AdapterVersion.adapter_id, OperatorPin.version == AdapterVersion.number)
    .exists()
)
"""Looked up for each row of a page: a join could change the order in which versions are read."""
_OF_VERSION = (
    AdapterVersion.number,
    AdapterVersion.id,
    AdapterVersion.digest,
    AdapterVersion.size_bytes,
    AdapterVersion.state,
    AdapterVersion.base_digest,
    _IS_PINNED,
)


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
    """List a page of live versions: those of `tenant`, or with None of all tenants.

    All tenants' are ordered by id, and so are those with one of `digests`, if these are given; all
    of one tenant's by name and number. Each of the lists has its own cursors.

    Raises:
        InvalidRequest: the limit or the cursor is invalid.
    """
    if tenant is not None and digests is None:
        return await _list_of_tenant(database, tenant, limit=limit, cursor=cursor)
    after = decode_cursor(cursor)
    query = (
        select(Tenant.id, Tenant.name, Adapter.name, *_OF_VERSION)
        .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
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
    """List tenant, name and number of the live versions with that digest and blob, by id."""
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
    tenant, tenant_name, name, number, ident, digest, size_bytes, state, base_digest, is_pinned = row
    return OwnedVersion(
        ident,
        TenantId(tenant),
        tenant_name,
        name,
        number,
        Digest(digest),
        size_bytes,
        state,
        Digest(base_digest),
        is_pinned,
    )


# --- the list of one tenant ---

# One statement that joins a tenant's adapters and their versions is a guess for PostgreSQL: by id,
# it may go through the versions of all tenants; by name and number, it may sort all the versions of
# an adapter, of which a trainer has a hundred thousand. So the adapters are read first, in the
# order of their index, and then the versions of as many as a page needs. No number is used twice:
# an adapter has no more versions than its last one's number, deleted ones included. Hence the
# rows that a statement reads are bounded whatever the planner believes; only rows that the tenant
# has deleted, between those of the page, come on top.

_IS_LIVE = case((AdapterVersion.deleted_at.is_(None), 1), else_=0) == 1
"""Written so that no index of live versions alone fits: none of them is by number, and where few
are live, PostgreSQL would rather sort all of an adapter's than walk the index that is.
"""


class _Position(NamedTuple):
    """Place in a tenant's list: behind this version of the adapter of this name's key."""

    key: str
    number: int


class _Left(NamedTuple):
    """Adapter whose versions above a number are still to be listed."""

    adapter_id: str
    name: str
    above: int
    last: int

    @property
    def most(self) -> int:
        """Maximum number of versions that are left."""
        return self.last - self.above


async def _list_of_tenant(
    database: Database, tenant: TenantId, *, limit: int, cursor: str | None
) -> Page[OwnedVersion]:
    """List a page of all live versions of the tenant, by name and number."""
    after = _read_position(decode_cursor(cursor))
    # one more shows whether there is a next page
    wanted = check_limit(limit) + 1
    rows: list[OwnedVersion] = []
    async with database.read() as session:
        live = select(Tenant.name).where(Tenant.id == tenant, Tenant.deleted_at.is_(None))
        tenant_name = await session.scalar(live)
        if tenant_name is None:
            return Page((), None)
        while len(rows) < wanted:
            adapters = await _adapters_after(session, tenant, after, wanted)
            for some in _parts(adapters, wanted):
                found = await _versions_of(session, some, wanted)
                rows += [_to_owned((tenant, tenant_name, *row)) for row in found]
                if len(rows) >= wanted:
                    break
            if len(adapters) < wanted:
                break
            # adapters with nothing but deleted versions may leave room
            after = _Position(name_key(adapters[-1].name), adapters[-1].last)
    return make_page(rows, limit, lambda row: f"{name_key(row.name)} {row.version}", lambda row: row)


async def _adapters_after(session: AsyncSession, tenant: TenantId, after: _Position, limit: int) -> list[_Left]:
    """List the tenant's next live adapters by name, of that of `after` what is left."""
    query = (
        select(Adapter.id, Adapter.name, Adapter.last_version)
        .where(Adapter.tenant_id == tenant, Adapter.deleted_at.is_(None))
        .where(Adapter.name_key >= after.key, or_(Adapter.name_key != after.key, Adapter.last_version > after.number))
        .order_by(Adapter.name_key)
        .limit(limit)
    )
    return [
        _Left(ident, name, after.number if name_key(name) == after.key else 0, last)
        for ident, name, last in (await session.execute(query)).all()
    ]


def _parts(adapters: Sequence[_Left], size: int) -> Iterator[Sequence[_Left]]:
    """Split the adapters for one statement each: those with many versions or a rest of them alone.

    The others are put together until they have `size` versions, if none is deleted: so they have
    fewer than twice as many.
    """
    part: list[_Left] = []
    num_versions = 0
    for one in adapters:
        is_alone = one.above > 0 or one.most >= size
        if part and (is_alone or num_versions >= size):
            yield part
            part, num_versions = [], 0
        if is_alone:
            yield [one]
        else:
            part.append(one)
            num_versions += one.most
    if part:
        yield part


async def _versions_of(session: AsyncSession, adapters: Sequence[_Left], limit: int) -> list[tuple[Any, ...]]:
    """List live versions with their adapters' names, as the adapters are ordered and by number.

    They are all that are left of several adapters, or the first `limit` that are left of one.
    """
    query = select(AdapterVersion.adapter_id, *_OF_VERSION).where(_IS_LIVE).order_by(AdapterVersion.number)
    if len(adapters) == 1:
        (one,) = adapters
        query = query.where(AdapterVersion.adapter_id == one.adapter_id, AdapterVersion.number > one.above).limit(limit)
    else:
        query = query.where(AdapterVersion.adapter_id.in_([one.adapter_id for one in adapters]))
    found: dict[str, list[tuple[Any, ...]]] = {one.adapter_id: [] for one in adapters}
    names = {one.adapter_id: one.name for one in adapters}
    for adapter_id, *row in (await session.execute(query)).all():
        found[adapter_id].append((names[adapter_id], *row))
    # by the database's order of names, which isn't Python's everywhere
    return [row for one in adapters for row in found[one.adapter_id]]


def _read_position(text: str | None) -> _Position:
    if text is None:
        return _Position("", 0)
    key, _, number = text.partition(" ")
    is_number = number.isascii() and number.isdigit() and len(number) <= 10
    if not is_adapter_name(key) or key != name_key(key) or not is_number or int(number) > MAX_VERSION:
        raise wrong_cursor()
    return _Position(key, int(number))
