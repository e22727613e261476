"""API keys: what one may be, its secret, and its row.

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
from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, or_
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from loraserve.db.models import KEY_NAME_LENGTH, ApiKey
from loraserve.errors import AuthenticationError, InvalidRequest
from loraserve.limits import LIMITS
from loraserve.types import TenantId

PREFIX = "sk-lora-"
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
RANDOM_LENGTH = 43
"""Letters of base 62 that 256 bits need."""
CHECKSUM_LENGTH = 6
SHOWN_LENGTH = len(PREFIX) + 4

DEFAULT_SCOPES = frozenset({"inference", "adapters:read", "adapters:write"})
"""Scopes of a tenant's key that was made without naming any."""
KEYS_WRITE = "keys:write"
"""Its holder manages the tenant's keys within its own scopes; given by name alone, since such a key
can leave others behind.
"""
TENANT_SCOPES = DEFAULT_SCOPES | {KEYS_WRITE}
"""Scopes that a tenant's key can have."""
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


def check_overlap(overlap: timedelta) -> None:
    """Check the time for which a replaced key works on.

    Raises:
        InvalidRequest: it is out of bounds.
    """
    if not timedelta(0) <= overlap <= timedelta(seconds=LIMITS.max_key_overlap_s):
        bound = f"{LIMITS.max_key_overlap_s:.0f}"
        raise InvalidRequest(f"overlap_s should be a number from 0 to {bound}.", param="overlap_s")


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


def replace_key(session: AsyncSession, old: ApiKey, *, overlap: timedelta, pepper: bytes, now: datetime) -> IssuedKey:
    """Insert a key of the same tenant, name, scopes, role and end; the old one ends.

    It ends now, or after `overlap`.
    """
    made = insert_key(
        session,
        tenant=None if old.tenant_id is None else TenantId(old.tenant_id),
        name=old.name,
        scopes=old.scopes,
        role=old.role,
        pepper=pepper,
        now=now,
        expires_at=old.expires_at,
    )
    if not overlap:
        old.revoked_at = now
    elif old.expires_at is None or old.expires_at > now + overlap:
        old.expires_at = now + overlap
    return made


def works(row: ApiKey, now: datetime) -> bool:
    """Return whether the key is valid now."""
    return row.revoked_at is None and (row.expires_at is None or row.expires_at > now)


def bad_key() -> AuthenticationError:
    """Build the one error of unknown, revoked and expired keys."""
    return AuthenticationError("The API key is not valid.", hint="Send a valid key as: Authorization: Bearer sk-lora-…")


def is_usable(now: datetime) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Build conditions that select the `ApiKey` rows that are valid now."""
    return (ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now))


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
