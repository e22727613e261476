"""Authentication: from a bearer secret to a `Caller`."""

from __future__ import annotations

import hmac
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db import audit
from loraserve.db.lookup import LookupCache
from loraserve.db.models import ApiKey, ServerSecret, Tenant
from loraserve.db.names import is_name
from loraserve.db.session import Clock, Database, utc_now
from loraserve.db.upsert import upsert
from loraserve.errors import ConfigError, DatabaseUnavailable, TenantNotFound
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.admin_keys import AdminKeys
from loraserve.tenancy.identity.keys import (
    ADMIN_ROLE,
    ADMIN_SCOPES,
    OPERATOR_READ,
    ROLES,
    bad_key,
    hash_secret,
    insert_key,
    is_usable,
    is_well_formed,
)
from loraserve.tenancy.identity.policy import NO_POLICY, TenantPolicy, policy_of_row
from loraserve.tenancy.identity.tenant_keys import TenantKeys
from loraserve.tenancy.identity.tenants import (
    DEFAULT_TENANT,
    Tenants,
    find_tenant,
    insert_tenant,
    tenant_not_found,
)
from loraserve.types import TenantId

ADMIN_KEY_ID = "admin"
"""Key id of LORASERVE_ADMIN_KEY in audit rows."""
KEYLESS_ID = "no-auth"
"""Key id of requests without a key, where the server requires none, in audit rows."""
MIN_ADMIN_KEY_LENGTH = 32
PEPPER = "api_key_pepper"


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated caller: key, tenant and scopes.

    An operator's key that names no tenant acts for `DEFAULT_TENANT`, and sees across tenants where
    a call can (`sees_all`).
    """

    tenant: TenantId
    tenant_name: str
    key_id: str
    scopes: frozenset[str]
    role: str | None = None
    """Role of an operator's key; None: it is a tenant's."""
    has_named_tenant: bool = False
    """Whether an operator named the tenant that it acts for."""
    policy: TenantPolicy = NO_POLICY
    """Policy of the tenant, at most `LIMITS.auth_cache_s` old;
    older only while the database is unreachable.
    """

    is_background: bool = False
    """Whether no client waits for its requests, as for a batch's lines: they come after all others,
    and don't count as concurrent ones.
    """

    @property
    def is_admin(self) -> bool:
        return self.role == ADMIN_ROLE

    @property
    def is_operator(self) -> bool:
        """Whether it may see what belongs to any tenant."""
        return self.role in (ADMIN_ROLE, OPERATOR_READ)

    @property
    def sees_all(self) -> bool:
        return self.is_operator and not self.has_named_tenant


@dataclass(frozen=True, slots=True)
class _Known:
    """Cached key."""

    caller: Caller
    secret_hash: str
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class _Tenant:
    """Cached tenant."""

    id: TenantId
    policy: TenantPolicy


@dataclass(frozen=True, slots=True)
class _Found:
    """Cached tenant, found by its id."""

    name: str
    policy: TenantPolicy


class Authenticator:
    """Authenticates secrets with a cache of `LIMITS.auth_cache_s`.

    A revocation takes effect at once in this process, and within that time in others. While the
    database is unreachable, cached keys stay valid for `LIMITS.outage_grace_s`. Revoke with `keys`
    and `tenants`, which invalidate the cache.
    """

    def __init__(
        self,
        database: Database,
        *,
        admin_key: str | None = None,
        clock: Clock = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the authenticator.

        Args:
            admin_key: accepted as an admin key while this process runs.

        Raises:
            ConfigError: `admin_key` is shorter than `MIN_ADMIN_KEY_LENGTH`.
        """
        self._database = database
        self.set_admin_key(admin_key)
        self._clock = clock
        self._pepper: bytes | None = None
        self._default: TenantId | None = None
        self._callers: LookupCache[str, _Known] = LookupCache(
            ttl_s=LIMITS.auth_cache_s,
            clock=monotonic,
            silence_s=database.silence_s,
            is_cancellable=database.is_cancellable,
        )
        self._tenants: LookupCache[str, _Tenant] = LookupCache(
            ttl_s=LIMITS.auth_cache_s,
            clock=monotonic,
            silence_s=database.silence_s,
            is_cancellable=database.is_cancellable,
        )
        self._by_id: LookupCache[TenantId, _Found] = LookupCache(
            ttl_s=LIMITS.auth_cache_s,
            clock=monotonic,
            silence_s=database.silence_s,
            is_cancellable=database.is_cancellable,
        )
        # Admins work however long the database is unreachable, with the last known policy of the
        # default tenant.
        self._admins: LookupCache[str, _Tenant] = LookupCache(
            ttl_s=LIMITS.auth_cache_s,
            grace_s=math.inf,
            clock=monotonic,
            silence_s=database.silence_s,
            is_cancellable=database.is_cancellable,
        )
        self.keys = TenantKeys(database, self._get_pepper, self._forget_key, clock=clock)
        self.admin_keys = AdminKeys(
            database,
            self._get_pepper,
            self._forget_key,
            has_other_admin=lambda: self._admin_key is not None,
            clock=clock,
        )
        self.tenants = Tenants(database, self._forget_tenant, clock=clock)

    def set_admin_key(self, admin_key: str | None) -> None:
        """Accept this as an admin key from now on, in the place of the one before.

        Raises:
            ConfigError: it is shorter than `MIN_ADMIN_KEY_LENGTH`.
        """
        if admin_key is not None and len(admin_key) < MIN_ADMIN_KEY_LENGTH:
            raise ConfigError(
                f"LORASERVE_ADMIN_KEY has {len(admin_key)} characters; expected {MIN_ADMIN_KEY_LENGTH} or more.",
                hint="Make one with: openssl rand -hex 32",
            )
        self._admin_key = None if admin_key is None else admin_key.encode()

    async def open(self) -> str | None:
        """Create the pepper, the default tenant and an admin key in a new database.

        Returns:
            The secret of the new admin key, which can't be read again; None if LORASERVE_ADMIN_KEY
            is set or a working admin key exists.
        """
        now = self._clock()
        async with self._database.write() as session:
            self._pepper = await _read_or_make_pepper(session, now)
            try:
                self._default = TenantId((await find_tenant(session, DEFAULT_TENANT)).id)
            except TenantNotFound:
                made = await insert_tenant(session, DEFAULT_TENANT, NO_POLICY, actor=audit.SERVER, now=now)
                self._default = made.id
            if self._admin_key is not None:
                return None
            admins = select(ApiKey.id).where(ApiKey.tenant_id.is_(None), ApiKey.role == ADMIN_ROLE, *is_usable(now))
            if await session.scalar(admins.limit(1)) is not None:
                return None
            key = insert_key(
                session,
                tenant=None,
                name="first admin key",
                scopes=ADMIN_SCOPES,
                role=ADMIN_ROLE,
                pepper=self._get_pepper(),
                now=now,
            )
            audit.record(session, "key.create", key.record.id, actor=audit.SERVER, tenant=None, at=now)
        return key.secret

    async def authenticate(self, secret: str, *, holder: str | None = None) -> Caller:
        """Find the caller with this secret.

        Args:
            holder: address of the client; look-ups of unknown secrets are limited per holder.

        Raises:
            AuthenticationError: the secret is unknown, revoked, expired, or of a deleted tenant;
                the text is the same.
            DatabaseUnavailable: the key isn't cached and can't be looked up.
        """
        # Both sides as bytes: text outside ASCII can't be compared in constant time.
        given = secret.encode("utf-8", "surrogatepass")
        if self._admin_key is not None and hmac.compare_digest(given, self._admin_key):
            return await self._as_default(ADMIN_KEY_ID, ADMIN_ROLE)
        if not is_well_formed(secret):
            raise bad_key()
        secret_hash = hash_secret(secret, self._get_pepper())
        known = await self._callers.get(secret_hash, lambda: self._find(secret_hash), holder=holder)
        if not hmac.compare_digest(known.secret_hash, secret_hash):
            raise bad_key()
        if known.expires_at is not None and known.expires_at <= self._clock():
            raise bad_key()
        role = known.caller.role
        return known.caller if role is None else await self._as_default(known.caller.key_id, role)

    async def without_key(self) -> Caller:
        """Build the caller of a request that needs no key: an admin of `DEFAULT_TENANT`."""
        return await self._as_default(KEYLESS_ID, ADMIN_ROLE)

    async def act_for(self, caller: Caller, tenant_name: str) -> Caller:
        """Let the caller act for the tenant that the request names.

        The header ``X-Tenant`` or the path ``/t/{tenant}`` names it.

        Raises:
            TenantNotFound: there is no such tenant, or a tenant's key names another tenant; the
                text is the same.
        """
        if not caller.is_operator:
            if tenant_name != caller.tenant_name:
                raise tenant_not_found()
            return caller
        if not is_name(tenant_name):
            raise tenant_not_found()
        tenant = await self._tenants.get(tenant_name, lambda: self._find_tenant(tenant_name))
        return replace(caller, tenant=tenant.id, tenant_name=tenant_name, has_named_tenant=True, policy=tenant.policy)

    async def in_background(self, tenant: TenantId, key_id: str) -> Caller:
        """Build the caller of requests that the tenant left to the server, without a key.

        They are sent in its name after the key is revoked too.

        Args:
            key_id: key that requested them.

        Raises:
            TenantNotFound: the tenant is deleted.
            DatabaseUnavailable: it isn't cached and can't be looked up.
        """
        found = await self._by_id.get(tenant, lambda: self._find_by_id(tenant), holder=tenant)
        scopes = frozenset({"inference"})
        return Caller(tenant, found.name, key_id, scopes, policy=found.policy, is_background=True)

    async def _as_default(self, key_id: str, role: str) -> Caller:
        """Build the caller of an operator that named no tenant."""
        caller = self._operator(key_id, role)
        try:
            known = await self._admins.get(DEFAULT_TENANT, lambda: self._find_tenant(DEFAULT_TENANT))
        except DatabaseUnavailable:
            # the tenant isn't cached yet; the admin works without its policy
            return caller
        return replace(caller, policy=known.policy)

    def _operator(self, key_id: str, role: str) -> Caller:
        if self._default is None:
            raise RuntimeError("Authenticator.open() must be awaited first")
        return Caller(tenant=self._default, tenant_name=DEFAULT_TENANT, key_id=key_id, scopes=ROLES[role], role=role)

    async def _find(self, secret_hash: str) -> _Known:
        query = (
            select(ApiKey, Tenant)
            .outerjoin(Tenant, Tenant.id == ApiKey.tenant_id)
            .where(ApiKey.secret_hash == secret_hash, Tenant.deleted_at.is_(None), *is_usable(self._clock()))
        )
        async with self._database.read() as session:
            found = (await session.execute(query)).one_or_none()
        if found is None:
            raise bad_key()
        key, tenant = found
        if key.tenant_id is None:
            # a role that only a newer program has opens nothing
            if key.role is None or key.role not in ROLES:
                raise bad_key()
            caller = self._operator(key.id, key.role)
        else:
            policy = policy_of_row(tenant.limits, tenant.weight, tenant.prices)
            caller = Caller(TenantId(tenant.id), tenant.name, key.id, frozenset(key.scopes), policy=policy)
        return _Known(caller, key.secret_hash, key.expires_at)

    async def _find_tenant(self, name: str) -> _Tenant:
        async with self._database.read() as session:
            row = await find_tenant(session, name)
        return _Tenant(TenantId(row.id), policy_of_row(row.limits, row.weight, row.prices))

    async def _find_by_id(self, tenant: TenantId) -> _Found:
        async with self._database.read() as session:
            row = await session.get(Tenant, tenant)
        if row is None or row.deleted_at is not None:
            raise tenant_not_found()
        return _Found(row.name, policy_of_row(row.limits, row.weight, row.prices))

    def _get_pepper(self) -> bytes:
        if self._pepper is None:
            raise RuntimeError("Authenticator.open() must be awaited first")
        return self._pepper

    def _forget_key(self, secret_hash: str) -> None:
        self._callers.forget(lambda key: key == secret_hash)

    def _forget_tenant(self, _tenant: TenantId) -> None:
        # The tenant's hashes aren't indexed; tenants change rarely enough to look up all of them
        # again.
        self._callers.forget(lambda _: True)
        self._tenants.forget(lambda _: True)
        self._by_id.forget(lambda _: True)
        self._admins.forget(lambda _: True)


async def _read_or_make_pepper(session: AsyncSession, now: datetime) -> bytes:
    """Read the pepper that all processes on this database share, after creating it if absent."""
    row = {"name": PEPPER, "value": secrets.token_bytes(32), "created_at": now}
    await upsert(session, ServerSecret, [row])
    return (await session.scalars(select(ServerSecret.value).where(ServerSecret.name == PEPPER))).one()
