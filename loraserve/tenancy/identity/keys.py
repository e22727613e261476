"""API keys: made, shown once, hashed, listed, revoked.

A secret is ``sk-lora-`` + 256 random bits in base 62 + a six-letter checksum. The checksum lets us
refuse typing errors and made-up keys without asking the database; it proves nothing. What is stored
is HMAC-SHA256 under the server's pepper.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from loraserve.db import audit
from loraserve.db.idempotency import Once
from loraserve.db.models import KEY_NAME_LENGTH, ApiKey, Tenant
from loraserve.db.paging import Page, check_limit, decode_cursor, make_page
from loraserve.db.session import Clock, Database, utc_now
from loraserve.errors import InvalidRequest, KeyNotFound, QuotaExceeded
from loraserve.limits import LIMITS
from loraserve.types import TenantId

PREFIX = "sk-lora-"
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
RANDOM_LENGTH = 43
"""Letters of base 62 that 256 bits need."""
CHECKSUM_LENGTH = 6
SHOWN_LENGTH = len(PREFIX) + 4

TENANT_SCOPES = frozenset({"inference", "adapters:read", "adapters:write"})
METRICS_SCOPE = "metrics:read"
"""Metrics show all tenants: a key with this scope is an operator's, of whichever tenant,
and opens nothing else.
"""
OPERATOR_READ = "operator:read"
ADMIN_ROLE = "admin"
ADMIN_SCOPES = TENANT_SCOPES | {ADMIN_ROLE}
ROLES: Mapping[str, frozenset[str]] = {
    ADMIN_ROLE: ADMIN_SCOPES,
    OPERATOR_READ: frozenset({OPERATOR_READ, "adapters:read", METRICS_SCOPE}),
    METRICS_SCOPE: frozenset({METRICS_SCOPE}),
}
"""Scopes of operators' keys by role; an admin has every scope."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """Key without its secret."""

    id: str
    tenant: TenantId | None
    name: str
    scopes: tuple[str, ...]
    role: str | None
    """Role of an operator's key; None: a tenant's."""
    prefix: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True)
class IssuedKey:
    record: KeyRecord
    secret: str = field(repr=False)
    """Secret; not stored anywhere."""


def make_secret(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> str:
    body = _base62(int.from_bytes(random_bytes(32), "big"), RANDOM_LENGTH)
    return f"{PREFIX}{body}{_checksum(body)}"


def is_well_formed(secret: str) -> bool:
    """Check whether `secret` has the format of `make_secret`."""
    body, checksum = secret[len(PREFIX) : -CHECKSUM_LENGTH], secret[-CHECKSUM_LENGTH:]
    return (
        secret.startswith(PREFIX)
        and len(body) == RANDOM_LENGTH
        and set(body) <= set(ALPHABET)
        and hmac.compare_digest(checksum.encode(), _checksum(body).encode())
    )


def hash_secret(secret: str, pepper: bytes) -> str:
    return hmac.new(pepper, secret.encode(), hashlib.sha256).hexdigest()


def _base62(number: int, length: int) -> str:
    letters = []
    for _ in range(length):
        number, digit = divmod(number, 62)
        letters.append(ALPHABET[digit])
    return "".join(reversed(letters))


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), CHECKSUM_LENGTH)


def check_scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    """Check the scopes; return them sorted and without duplicates.

    Raises:
        InvalidRequest: there are none, a tenant's key can't have one, or `METRICS_SCOPE` isn't
            alone.
    """
    wanted = set(scopes)
    if wanted == {METRICS_SCOPE}:
        return (METRICS_SCOPE,)
    if not wanted or not wanted <= TENANT_SCOPES:
        raise InvalidRequest(
            f"scopes should be one or more of {', '.join(sorted(TENANT_SCOPES))}, or {METRICS_SCOPE} alone.",
            param="scopes",
        )
    return tuple(sorted(wanted))


def check_expiry(expires_at: datetime, now: datetime) -> datetime:
    """Check `expires_at`; return it in UTC.

    Raises:
        InvalidRequest: the time is in the past, or after the year 9999.
    """
    if expires_at <= now:
        raise InvalidRequest("expires_at is in the past.", param="expires_at")
    try:
        return expires_at.astimezone(UTC)
    except OverflowError:
        raise InvalidRequest("expires_at is after the year 9999.", param="expires_at") from None


def check_name(name: str) -> None:
    """Check a key's name.

    Raises:
        InvalidRequest: it is empty, too long, or has control characters.
    """
    if not 1 <= len(name) <= KEY_NAME_LENGTH or not name.isprintable():
        raise InvalidRequest(f"name should be 1 to {KEY_NAME_LENGTH} printable characters.", param="name")


def insert_key(
    session: AsyncSession,
    *,
    tenant: TenantId | None,
    name: str,
    scopes: Iterable[str],
    pepper: bytes,
    now: datetime,
    expires_at: datetime | None = None,
    role: str | None = None,
) -> IssuedKey:
    """Insert a key in the session's transaction; one of no tenant has a role."""
    secret = make_secret()
    row = ApiKey(
        id=str(ULID.from_datetime(now)),
        tenant_id=tenant,
        name=name,
        scopes=sorted(scopes),
        role=role,
        prefix=secret[:SHOWN_LENGTH],
        secret_hash=hash_secret(secret, pepper),
        created_at=now,
        expires_at=expires_at,
        revoked_at=None,
    )
    session.add(row)
    return IssuedKey(to_record(row), secret)


def is_usable(now: datetime) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Build conditions that select the `ApiKey` rows that are valid now."""
    return (ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now))


class Keys:
    """Keys of tenants.

    Args:
        on_revoke: called with the hash of a revoked key after that is durable, to invalidate this
            process's cache.
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
        scopes: Iterable[str] = TENANT_SCOPES,
        expires_at: datetime | None = None,
        once: Once[IssuedKey] | None = None,
    ) -> IssuedKey:
        """Create a key of `tenant`; only the result has its secret.

        Raises:
            InvalidRequest: a scope, the name or the expiry is invalid.
            QuotaExceeded: the tenant has `LIMITS.max_keys_per_tenant` working keys.
            Replay: `once` was used before.
        """
        checked = check_scopes(scopes)
        now = self._clock()
        check_name(name)
        if expires_at is not None:
            expires_at = check_expiry(expires_at, now)
        async with self._database.write() as session:
            if once is not None:
                await once.begin(session)
            # The tenant's row lock makes the count below hold until the commit.
            await session.scalar(select(Tenant.id).where(Tenant.id == tenant).with_for_update(key_share=True))
            mine = select(func.count()).select_from(ApiKey).where(ApiKey.tenant_id == tenant, *is_usable(now))
            if (await session.scalar(mine) or 0) >= LIMITS.max_keys_per_tenant:
                raise QuotaExceeded(
                    f"The tenant has {LIMITS.max_keys_per_tenant} keys, the maximum.", hint="Revoke one first."
                )
            made = insert_key(
                session, tenant=tenant, name=name, scopes=checked, pepper=self._pepper(), now=now, expires_at=expires_at
            )
            audit.record(
                session,
                "key.create",
                made.record.id,
                actor=actor,
                tenant=tenant,
                at=now,
                detail={"name": name, "scopes": list(checked)},
            )
            await session.flush()
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

    async def revoke(self, tenant: TenantId, key_id: str, *, actor: str) -> None:
        """Revoke the key; no-op if it is revoked.

        It is revoked at once in this process, within `LIMITS.auth_cache_s` in others.

        Raises:
            KeyNotFound: `tenant` has no such key.
        """
        now = self._clock()
        absent = KeyNotFound("There is no such key.", hint="See: loraserve key list --tenant NAME")
        if not (key_id.isascii() and key_id.isalnum()):
            raise absent
        async with self._database.write(frees_space=True) as session:
            query = select(ApiKey).where(ApiKey.tenant_id == tenant, ApiKey.id == key_id).with_for_update()
            row = (await session.scalars(query)).one_or_none()
            if row is None:
                raise absent
            if row.revoked_at is None:
                row.revoked_at = now
                audit.record(
                    session, "key.revoke", row.id, actor=actor, tenant=tenant, at=now, detail={"name": row.name}
                )
        self._on_revoke(row.secret_hash)


def to_record(row: ApiKey) -> KeyRecord:
    return KeyRecord(
        id=row.id,
        tenant=None if row.tenant_id is None else TenantId(row.tenant_id),
        name=row.name,
        scopes=tuple(row.scopes),
        role=row.role,
        prefix=row.prefix,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )
