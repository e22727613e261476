"""Keys of operators, which belong to no tenant: made, rotated, revoked, each with a role."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db import audit
from loraserve.db.idempotency import Once
from loraserve.db.models import ApiKey, ServerSecret
from loraserve.db.paging import Page, check_limit, decode_cursor, make_page
from loraserve.db.session import Clock, Database
from loraserve.errors import Conflict, InvalidRequest, KeyNotFound, QuotaExceeded
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.keys import (
    ADMIN_ROLE,
    ROLES,
    IssuedKey,
    KeyRecord,
    check_expiry,
    check_name,
    check_overlap,
    insert_key,
    is_usable,
    replace_key,
    to_record,
    works,
)


class AdminKeys:
    """Keys of operators.

    Args:
        on_revoke: called with the hash of a key that was revoked or got another end, after that is
            durable.
        has_other_admin: returns whether an admin key works that is no row: LORASERVE_ADMIN_KEY.
    """

    def __init__(
        self,
        database: Database,
        pepper: Callable[[], bytes],
        on_revoke: Callable[[str], None],
        *,
        has_other_admin: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._on_revoke = on_revoke
        self._has_other_admin = has_other_admin
        self._clock = clock

    async def create(
        self,
        *,
        name: str,
        role: str,
        actor: str,
        expires_at: datetime | None = None,
        once: Once[IssuedKey] | None = None,
    ) -> IssuedKey:
        """Create a key; only the result has its secret.

        Raises:
            InvalidRequest: the role, the name or the expiry is invalid.
            QuotaExceeded: there are `LIMITS.max_admin_keys` working keys.
            Replay: `once` was used before.
        """
        now = self._clock()
        if role not in ROLES:
            raise InvalidRequest(f"role should be one of {', '.join(ROLES)}.", param="role")
        check_name(name)
        if expires_at is not None:
            expires_at = check_expiry(expires_at, now)
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            await self._lock(session)
            await self._check_room(session, now)
            made = insert_key(
                session,
                tenant=None,
                name=name,
                scopes=ROLES[role],
                role=role,
                pepper=self._pepper(),
                now=now,
                expires_at=expires_at,
            )
            detail = {"name": name, "role": role}
            audit.record(session, "admin_key.create", made.record.id, actor=actor, tenant=None, at=now, detail=detail)
            await session.flush()
            if once is not None:
                await once.finish(session, made)
        return made

    async def list(self, *, limit: int = 50, cursor: str | None = None) -> Page[KeyRecord]:
        """List a page of the keys in order of creation, revoked ones included."""
        after = decode_cursor(cursor)
        query = select(ApiKey).where(ApiKey.tenant_id.is_(None)).order_by(ApiKey.id).limit(check_limit(limit) + 1)
        if after is not None:
            query = query.where(ApiKey.id > after)
        async with self._database.read() as session:
            rows = (await session.scalars(query)).all()
        return make_page(rows, limit, lambda row: row.id, to_record)

    async def rotate(
        self, key_id: str, *, overlap: timedelta, actor: str, once: Once[IssuedKey] | None = None
    ) -> IssuedKey:
        """Create a key of the same name, role and end in the place of this one.

        Args:
            overlap: time for which the old one works on, so that its users can change over; zero:
                it is revoked.

        Raises:
            KeyNotFound: there is no such key.
            Conflict: it doesn't work any more.
            InvalidRequest: the overlap is out of bounds.
            QuotaExceeded: both would work, and there are `LIMITS.max_admin_keys`.
            Replay: `once` was used before.
        """
        check_overlap(overlap)
        now = self._clock()
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            await self._lock(session)
            old = await self._find(session, key_id)
            if not works(old, now):
                raise Conflict(f"The key {old.id} is revoked or expired.", hint="Create another one.")
            if overlap:
                await self._check_room(session, now)
            made = replace_key(session, old, overlap=overlap, pepper=self._pepper(), now=now)
            detail = {"name": old.name, "role": old.role, "by": made.record.id, "overlap_s": overlap.total_seconds()}
            audit.record(session, "admin_key.rotate", old.id, actor=actor, tenant=None, at=now, detail=detail)
            await session.flush()
            if once is not None:
                await once.finish(session, made)
        self._on_revoke(old.secret_hash)
        return made

    async def revoke(self, key_id: str, *, actor: str) -> None:
        """Revoke the key; no-op if it is revoked.

        It is revoked at once in this process, within `LIMITS.auth_cache_s` in others.

        Raises:
            KeyNotFound: there is no such key.
            Conflict: it is the last admin key that works.
        """
        now = self._clock()
        async with self._database.write() as session:
            await self._lock(session)
            row = await self._find(session, key_id)
            if row.revoked_at is None:
                if row.role == ADMIN_ROLE and works(row, now) and not self._has_other_admin():
                    await self._check_other(session, row, now)
                row.revoked_at = now
                detail = {"name": row.name, "role": row.role}
                audit.record(session, "admin_key.revoke", row.id, actor=actor, tenant=None, at=now, detail=detail)
        self._on_revoke(row.secret_hash)

    async def _lock(self, session: AsyncSession) -> None:
        """Let the counts below hold until the commit. SQLite has one writer anyway."""
        await session.scalar(select(ServerSecret.name).order_by(ServerSecret.name).limit(1).with_for_update())

    async def _check_room(self, session: AsyncSession, now: datetime) -> None:
        all_of_them = select(func.count()).select_from(ApiKey).where(ApiKey.tenant_id.is_(None), *is_usable(now))
        if (await session.scalar(all_of_them) or 0) >= LIMITS.max_admin_keys:
            raise QuotaExceeded(
                f"There are {LIMITS.max_admin_keys} operators' keys, the maximum.", hint="Revoke one first."
            )

    async def _check_other(self, session: AsyncSession, row: ApiKey, now: datetime) -> None:
        others = select(ApiKey.id).where(
            ApiKey.tenant_id.is_(None), ApiKey.role == ADMIN_ROLE, ApiKey.id != row.id, *is_usable(now)
        )
        if await session.scalar(others.limit(1)) is None:
            raise Conflict(
                "It is the last admin key that works.",
                hint=f"Put another in its place with: loraserve admin-key rotate {row.id}",
            )

    async def _find(self, session: AsyncSession, key_id: str) -> ApiKey:
        row = None
        if key_id.isascii() and key_id.isalnum():
            query = select(ApiKey).where(ApiKey.tenant_id.is_(None), ApiKey.id == key_id).with_for_update()
            row = (await session.scalars(query)).one_or_none()
        if row is None:
            raise KeyNotFound("There is no such key.", hint="See: loraserve admin-key list")
        return row
