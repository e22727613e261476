# Generated from loraserve/sdk/_async/tenancy.py by `make sdk`: don't edit.
"""`client.tenants`, `client.keys`, `client.admin_keys`, `client.grants`.

All but grants, and a tenant's own keys, take an admin key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from loraserve.contract.alias import Grant
from loraserve.contract.tenant import AdminKey, Key, NewAdminKey, NewKey, Tenant
from loraserve.sdk._sync.paging import all_rows
from loraserve.sdk._sync.transport import Transport
from loraserve.sdk.call import Call, encode, idempotency_key, if_match_header, read_into, read_nothing, segment
from loraserve.sdk.types.fields import Limits

ROOT = "/api/v1/tenants"
OWN_KEYS = "/api/v1/keys"
ADMIN_KEYS = "/api/v1/admin-keys"


class Tenants:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        name: str,
        *,
        limits: Limits | None = None,
        weight: float | None = None,
        prices: Mapping[str, Any] | None = None,
    ) -> Tenant:
        """Create a tenant without keys or adapters.

        Args:
            limits: ``max_adapters``, ``max_stored_bytes``, ``requests_per_minute``,
                ``tokens_per_minute``, ``max_concurrent_requests``, ``max_queued_requests``,
                ``max_kv_share``; None: only the server's own bounds. ``max_cached_bytes`` (in the
                result cache); None: nothing.
            weight: its share of the engine against other tenants' when there isn't enough for all;
                None: 1.
            prices: ``{"currency", "prompt", "cached", "completion", "adapters": {NAME: {…}}}``, per
                million tokens, as decimal text.

        Raises:
            AlreadyExists: a tenant has this name.
        """
        body = encode({"name": name, **_policy(limits, weight, prices)})
        return self._transport.send(Call("POST", ROOT, read_into(Tenant), headers=idempotency_key(), body=body))

    def update(
        self,
        name: str,
        *,
        limits: Limits | None = None,
        weight: float | None = None,
        prices: Mapping[str, Any] | None = None,
        if_match: str | None = None,
    ) -> Tenant:
        """Change the fields that are given, for all later requests.

        Other replicas follow within seconds.

        Args:
            limits: the limits to change; None as a limit's value removes it.
            prices: the whole table; empty: its tokens have no price any more.
            if_match: the ETag that the tenant was read with: change it only if it hasn't changed
                since.

        Raises:
            PreconditionFailed: it has changed since.
        """
        body, headers = encode(_policy(limits, weight, prices)), if_match_header(if_match)
        return self._transport.send(Call("PATCH", _tenant_path(name), read_into(Tenant), headers=headers, body=body))

    def list(self) -> Iterator[Tenant]:
        """Yield every tenant by name; pages are requested as they're needed."""
        return all_rows(self._transport, ROOT, Tenant)

    def get(self, name: str) -> Tenant:
        """Return the tenant.

        Raises:
            TenantNotFound: there is none.
        """
        return self._transport.send(Call("GET", _tenant_path(name), read_into(Tenant)))

    def delete(self, name: str) -> None:
        """Delete the tenant. Its keys and models stop working at once."""
        self._transport.send(Call("DELETE", _tenant_path(name), read_nothing))


class Keys:
    """Keys of a tenant: of any with an admin key, else with a key that has ``keys:write``.

    Where `tenant` is None, they are those of the tenant that the client acts for. A tenant's key
    manages keys within its own bounds: no scope that it lacks, no later end.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        tenant: str | None = None,
        *,
        name: str,
        scopes: Sequence[str] | None = None,
        expires_at: datetime | None = None,
    ) -> NewKey:
        """Create a key of the tenant; `key` is its secret, shown this once.

        Args:
            name: a label to tell keys apart.
            scopes: of ``inference``, ``adapters:read``, ``adapters:write``, ``keys:write``; None:
                the first three, or those of them that the maker has. Or ``metrics:read`` alone, for
                a scraper of all tenants' metrics.
            expires_at: when it stops working; None: never, or when the maker does.

        Raises:
            PermissionDenied: the key would have a scope that its maker lacks, or outlast it.
        """
        body: dict[str, object] = {"name": name}
        if scopes is not None:
            body["scopes"] = list(scopes)
        if expires_at is not None:
            # a naive instant is in this machine's time zone
            body["expires_at"] = expires_at.astimezone().isoformat()
        headers = idempotency_key()
        return self._transport.send(
            Call("POST", _keys_path(tenant), read_into(NewKey), headers=headers, body=encode(body))
        )

    def list(self, tenant: str | None = None) -> Iterator[Key]:
        """Yield the tenant's keys, oldest first, revoked ones too."""
        return all_rows(self._transport, _keys_path(tenant), Key)

    def rotate(self, tenant: str | None, key_id: str, *, overlap_s: float = 0.0) -> NewKey:
        """Create a key of the same name, scopes and end in the place of this one.

        Args:
            overlap_s: seconds for which the old one works on.

        Raises:
            PermissionDenied: the key has a scope that this client's lacks, or outlasts it.
        """
        path = f"{_keys_path(tenant)}/{segment(key_id, 'key')}/rotate"
        body = encode({"overlap_s": overlap_s})
        return self._transport.send(Call("POST", path, read_into(NewKey), headers=idempotency_key(), body=body))

    def revoke(self, tenant: str | None, key_id: str) -> None:
        """Revoke the key, which may be this client's own; no-op if it is revoked.

        Raises:
            PermissionDenied: the key has a scope that this client's lacks.
        """
        self._transport.send(Call("DELETE", f"{_keys_path(tenant)}/{segment(key_id, 'key')}", read_nothing))


class AdminKeys:
    """Operators' keys, which belong to no tenant."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, *, name: str, role: str, expires_at: datetime | None = None) -> NewAdminKey:
        """Create a key; `key` is its secret, shown this once.

        Args:
            name: a label to tell keys apart.
            role: ``admin``, ``operator:read`` or ``metrics:read``.
            expires_at: when it stops working; None: never.
        """
        body: dict[str, object] = {"name": name, "role": role}
        if expires_at is not None:
            body["expires_at"] = expires_at.astimezone().isoformat()
        call = Call("POST", ADMIN_KEYS, read_into(NewAdminKey), headers=idempotency_key(), body=encode(body))
        return self._transport.send(call)

    def list(self) -> Iterator[AdminKey]:
        """Yield operators' keys, oldest first, revoked ones too."""
        return all_rows(self._transport, ADMIN_KEYS, AdminKey)

    def rotate(self, key_id: str, *, overlap_s: float = 0.0) -> NewAdminKey:
        """Create a key of the same name, role and end in the place of this one.

        Args:
            overlap_s: seconds for which the old one works on.
        """
        path, body = f"{ADMIN_KEYS}/{segment(key_id, 'key')}/rotate", encode({"overlap_s": overlap_s})
        call = Call("POST", path, read_into(NewAdminKey), headers=idempotency_key(), body=body)
        return self._transport.send(call)

    def revoke(self, key_id: str) -> None:
        """Revoke the key; no-op if it is revoked.

        Raises:
            Conflict: it is the last admin key that works.
        """
        self._transport.send(Call("DELETE", f"{ADMIN_KEYS}/{segment(key_id, 'key')}", read_nothing))


class Grants:
    """Grants let other tenants use an adapter as ``OWNER/NAME``.

    They neither see its files nor change it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def add(self, adapter: str, tenant: str) -> Grant:
        """Let `tenant` use the adapter; no-op if it may.

        Raises:
            TenantNotFound: there is no such tenant.
        """
        return self._transport.send(Call("PUT", _grant_path(adapter, tenant), read_into(Grant)))

    def list(self, adapter: str) -> Iterator[Grant]:
        """Yield the adapter's grants; pages are requested as they're needed."""
        return all_rows(self._transport, _grants_path(adapter), Grant)

    def get(self, adapter: str, tenant: str) -> Grant:
        """Return the grant.

        Raises:
            GrantNotFound: there is none.
        """
        return self._transport.send(Call("GET", _grant_path(adapter, tenant), read_into(Grant)))

    def remove(self, adapter: str, tenant: str) -> None:
        """End `tenant`'s use of the adapter within seconds. Running requests finish."""
        self._transport.send(Call("DELETE", _grant_path(adapter, tenant), read_nothing))


def _policy(limits: Limits | None, weight: float | None, prices: Mapping[str, Any] | None) -> dict[str, object]:
    """Return the fields that are given."""
    body: dict[str, object] = {}
    if limits is not None:
        body["limits"] = dict(limits)
    if weight is not None:
        body["weight"] = weight
    if prices is not None:
        body["prices"] = dict(prices) or None
    return body


def _tenant_path(tenant: str) -> str:
    return f"{ROOT}/{segment(tenant, 'tenant')}"


def _keys_path(tenant: str | None) -> str:
    return OWN_KEYS if tenant is None else f"{_tenant_path(tenant)}/keys"


def _grants_path(adapter: str) -> str:
    return f"/api/v1/adapters/{segment(adapter, 'name')}/grants"


def _grant_path(adapter: str, tenant: str) -> str:
    return f"{_grants_path(adapter)}/{segment(tenant, 'tenant')}"
