"""Keys of tenants: made, listed, rotated, revoked, by operators or by a key of the tenant itself.

A key with the scope `KEYS_WRITE` manages keys within its own bounds: it neither makes nor rotates
one that has a scope which it lacks, or that outlasts it, and revokes none that has such a scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db import audit
from loraserve.db.idempotency import Once
from loraserve.db.models import ApiKey, Tenant
from loraserve.db.paging import Page, check_limit, decode_cursor, make_page
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import Conflict, InvalidRequest, KeyNotFound, PermissionDenied, QuotaExceeded
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.keys import (
    DEFAULT_SCOPES,
    KEYS_WRITE,
    IssuedKey,
    KeyRecord,
    bad_key,
    check_expiry,
    check_name,
    check_overlap,
    check_scopes,
    insert_key,
    is_usable,
    replace_key,
    to_record,
    works,
)
from loraserve.types import TenantId


@dataclass(frozen=True, slots=True)
class _Maker:
    """The tenant's key that asks, as its row says now: no cached state may widen it."""

    scopes: frozenset[str]
    expires_at: datetime | None

    def check_scopes(self, scopes: Iterable[str]) -> None:
        """Check that the key itself has all of these.

        Raises:
            PermissionDenied: it lacks one.
        """
        beyond = sorted(set(scopes) - self.scopes)
        if beyond:
            raise PermissionDenied(
                f"This key has no power over keys with {', '.join(beyond)}: it lacks that scope itself.",
                hint=f"It has: {', '.join(sorted(self.scopes))}. An admin has power over all keys.",
            )

    def end_of(self, expires_at: datetime | None) -> datetime | None:
        """Return the end of a key that is to end at `expires_at`, or with this one for None.

        Raises:
            PermissionDenied: it would outlast this one.
        """
        if self.expires_at is None or expires_at is None:
            return expires_at or self.expires_at
        if expires_at > self.expires_at:
            raise self._outlasted()
        return expires_at

    def check_end(self, expires_at: datetime | None) -> None:
        """Check that a key with this end doesn't outlast this one.

        Raises:
            PermissionDenied: it would.
        """
        if self.expires_at is not None and (expires_at is None or expires_at > self.expires_at):
            raise self._outlasted()

    def _outlasted(self) -> PermissionDenied:
        return PermissionDenied(
            f"A key can make none that outlasts it, and this one ends at {self.expires_at:%Y-%m-%d %H:%M} UTC.",
            hint="Name an earlier end, or use a key that works longer.",
        )


class TenantKeys:
    """Keys of tenants.

    Args:
        on_revoke: called with the hash of a key that was revoked or got another end, after that is
            durable, to invalidate this process's cache.
    """

    def __init__(
        self,
        database: Database,
        pepper: Callable[[], bytes],
        on_revoke: Callable[[str], None],
        *,
        clock: Clock = utc_now,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._on_revoke = on_revoke
        self._clock = clock

    async def create(
        self,
        tenant: TenantId,
        *,
        name: str,
        actor: str,
        scopes: Iterable[str] | None = None,
        expires_at: datetime | None = None,
        maker: str | None = None,
        once: Once[IssuedKey] | None = None,
    ) -> IssuedKey:
        """Create a key of `tenant`; only the result has its secret.

        Args:
            scopes: None: `DEFAULT_SCOPES`, or those of them that the maker has.
            expires_at: None: no end, or the maker's.
            maker: id of the tenant's key that makes it, within whose bounds it stays; None: an
                operator does.

        Raises:
            InvalidRequest: a scope, the name or the expiry is invalid.
            PermissionDenied: it would exceed its maker.
            AuthenticationError: the maker works no more.
            QuotaExceeded: the tenant has `LIMITS.max_keys_per_tenant` working keys.
            Replay: `once` was used before.
        """
        given = None if scopes is None else check_scopes(scopes)
        now = self._clock()
        check_name(name)
        if expires_at is not None:
            expires_at = check_expiry(expires_at, now)
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            await self._lock(session, tenant)
            wanted: Iterable[str] = DEFAULT_SCOPES if given is None else given
            if maker is not None:
                made_by = await _find_maker(session, tenant, maker, now)
                if given is None:
                    wanted = DEFAULT_SCOPES & made_by.scopes
                    if not wanted:
                        raise InvalidRequest(
                            f"scopes should name some: this key has only {KEYS_WRITE}.", param="scopes"
                        )
                made_by.check_scopes(wanted)
                expires_at = made_by.end_of(expires_at)
            await self._check_room(session, tenant, now)
            made = insert_key(
                session, tenant=tenant, name=name, scopes=wanted, pepper=self._pepper(), now=now, expires_at=expires_at
            )
            detail = {"name": name, "scopes": list(made.record.scopes)}
            audit.record(session, "key.create", made.record.id, actor=actor, tenant=tenant, at=now, detail=detail)
            await session.flush()
            await _remove_ended(session, tenant, now)
            if once is not None:
                await once.finish(session, made)
        return made

    async def list(self, tenant: TenantId, *, limit: int = 50, cursor: str | None = None) -> Page[KeyRecord]:
        """List a page of the tenant's keys in order of creation, revoked ones included."""
        after = decode_cursor(cursor)
        query = select(ApiKey).where(ApiKey.tenant_id == tenant).order_by(ApiKey.id).limit(check_limit(limit) + 1)
        if after is not None:
            query = query.where(ApiKey.id > after)
        async with self._database.read() as session:
            rows = (await session.scalars(query)).all()
        return make_page(rows, limit, lambda row: row.id, to_record)

    async def rotate(
        self,
        tenant: TenantId,
        key_id: str,
        *,
        overlap: timedelta,
        actor: str,
        maker: str | None = None,
        once: Once[IssuedKey] | None = None,
    ) -> IssuedKey:
        """Create a key of the same name, scopes and end in the place of this one.

        Args:
            overlap: time for which the old one works on, so that its users can change over; zero:
                it is revoked.
            maker: as for `create`; it may be the key itself.

        Raises:
            KeyNotFound: `tenant` has no such key.
            Conflict: it doesn't work any more.
            InvalidRequest: the overlap is out of bounds.
            PermissionDenied: the key has a scope that its maker lacks, or outlasts it.
            AuthenticationError: the maker works no more.
            QuotaExceeded: both would work, and there are `LIMITS.max_keys_per_tenant`.
            Replay: `once` was used before.
        """
        check_overlap(overlap)
        now = self._clock()
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            await self._lock(session, tenant)
            made_by = None if maker is None else await _find_maker(session, tenant, maker, now)
            old = await _find(session, tenant, key_id, maker)
            if made_by is not None:
                made_by.check_scopes(old.scopes)
                made_by.check_end(old.expires_at)
            if not works(old, now):
                raise Conflict(f"The key {old.id} is revoked or expired.", hint="Create another one.")
            if overlap:
                await self._check_room(session, tenant, now)
            made = replace_key(session, old, overlap=overlap, pepper=self._pepper(), now=now)
            detail = {"name": old.name, "by": made.record.id, "overlap_s": overlap.total_seconds()}
            audit.record(session, "key.rotate", old.id, actor=actor, tenant=tenant, at=now, detail=detail)
            await session.flush()
            await _remove_ended(session, tenant, now)
            if once is not None:
                await once.finish(session, made)
        self._on_revoke(old.secret_hash)
        return made

    async def revoke(self, tenant: TenantId, key_id: str, *, actor: str, maker: str | None = None) -> None:
        """Revoke the key; no-op if it is revoked.

        It is revoked at once in this process, within `LIMITS.auth_cache_s` in others.

        Args:
            maker: as for `create`; it may be the key itself.

        Raises:
            KeyNotFound: `tenant` has no such key.
            PermissionDenied: the key has a scope that its maker lacks.
            AuthenticationError: the maker works no more.
        """
        now = self._clock()
        async with self._database.write(frees_space=True) as session:
            if maker is not None:
                await self._lock(session, tenant)
                made_by = await _find_maker(session, tenant, maker, now)
            row = await _find(session, tenant, key_id, maker)
            if maker is not None:
                made_by.check_scopes(row.scopes)
            if row.revoked_at is None:
                row.revoked_at = now
                audit.record(
                    session, "key.revoke", row.id, actor=actor, tenant=tenant, at=now, detail={"name": row.name}
                )
        self._on_revoke(row.secret_hash)

    async def _lock(self, session: AsyncSession, tenant: TenantId) -> None:
        """Let the tenant's keys, counted or read below, be as they are until the commit."""
        await session.scalar(select(Tenant.id).where(Tenant.id == tenant).with_for_update(key_share=True))

    async def _check_room(self, session: AsyncSession, tenant: TenantId, now: datetime) -> None:
        mine = select(func.count()).select_from(ApiKey).where(ApiKey.tenant_id == tenant, *is_usable(now))
        if (await session.scalar(mine) or 0) >= LIMITS.max_keys_per_tenant:
            raise QuotaExceeded(
                f"The tenant has {LIMITS.max_keys_per_tenant} keys, the maximum.", hint="Revoke one first."
            )


async def _find_maker(session: AsyncSession, tenant: TenantId, key_id: str, now: datetime) -> _Maker:
    """Read the key that asks, locked against being revoked meanwhile.

    Raises:
        AuthenticationError: it was revoked or has expired since it was authenticated.
    """
    query = select(ApiKey).where(ApiKey.tenant_id == tenant, ApiKey.id == key_id, *is_usable(now)).with_for_update()
    row = (await session.scalars(query)).one_or_none()
    if row is None or KEYS_WRITE not in row.scopes:
        raise bad_key()
    return _Maker(frozenset(row.scopes), row.expires_at)


async def _find(session: AsyncSession, tenant: TenantId, key_id: str, maker: str | None) -> ApiKey:
    row = None
    if key_id.isascii() and key_id.isalnum():
        query = select(ApiKey).where(ApiKey.tenant_id == tenant, ApiKey.id == key_id).with_for_update()
        row = (await session.scalars(query)).one_or_none()
    if row is None:
        of = " --tenant NAME" if maker is None else ""
        raise KeyNotFound("There is no such key.", hint=f"See: loraserve key list{of}")
    return row


async def _remove_ended(session: AsyncSession, tenant: TenantId, now: datetime) -> None:
    """Remove the oldest of the keys that work no more: a tenant's loop of new keys fills no disk.

    The audit log keeps what was done with them.
    """
    working = select(ApiKey.id).where(ApiKey.tenant_id == tenant, *is_usable(now))
    ended = select(ApiKey.id).where(ApiKey.tenant_id == tenant, ApiKey.id.not_in(working))
    end = func.coalesce(ApiKey.revoked_at, ApiKey.expires_at)
    oldest = ended.order_by(end.desc(), ApiKey.id.desc()).offset(LIMITS.max_ended_keys_per_tenant)
    await session.execute(delete(ApiKey).where(ApiKey.id.in_(oldest)).execution_options(synchronize_session=False))
