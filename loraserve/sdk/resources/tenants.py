"""`client.tenants`: who shares the server. For admin keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import datetime
from typing import Any

from pydantic import Field

from loraserve.sdk.call import Call, Result, encode, idempotency_key, read_into, read_nothing, segment
from loraserve.sdk.transport.paging import all_rows, all_rows_async
from loraserve.sdk.transport.transport import AsyncTransport, Transport

ROOT = "/api/v1/tenants"
Limits = Mapping[str, int | float | None]


class Tenant(Result):
    id: str
    """Never given twice, unlike the name."""
    name: str
    limits: dict[str, int | float | None] = Field(default_factory=dict)
    """What it may hold and ask for; None: only the server's own bounds."""
    weight: float = 1.0
    """Its share of the engine against other tenants' weights, when there isn't enough for all."""
    prices: dict[str, Any] | None = None
    """Per million tokens, as decimal text; None: its tokens have no price."""
    created_at: datetime


def _policy(limits: Limits | None, weight: float | None, prices: Mapping[str, Any] | None) -> dict[str, object]:
    """The fields that are given."""
    body: dict[str, object] = {}
    if limits is not None:
        body["limits"] = dict(limits)
    if weight is not None:
        body["weight"] = weight
    if prices is not None:
        body["prices"] = dict(prices) or None
    return body


def _create(name: str, policy: Mapping[str, object]) -> Call[Tenant]:
    return Call("POST", ROOT, read_into(Tenant), headers=idempotency_key(), body=encode({"name": name, **policy}))


def _update(name: str, policy: Mapping[str, object], if_match: str | None) -> Call[Tenant]:
    headers = {} if if_match is None else {"If-Match": if_match}
    path = f"{ROOT}/{segment(name, 'tenant')}"
    return Call("PATCH", path, read_into(Tenant), headers=headers, body=encode(policy))


def _get(name: str) -> Call[Tenant]:
    return Call("GET", f"{ROOT}/{segment(name, 'tenant')}", read_into(Tenant))


def _delete(name: str) -> Call[None]:
    return Call("DELETE", f"{ROOT}/{segment(name, 'tenant')}", read_nothing)


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
        """A new tenant without keys or adapters.

        Args:
            limits: ``max_adapters``, ``max_stored_bytes``, ``requests_per_minute``, ``tokens_per_minute``,
                ``max_concurrent_requests``, ``max_queued_requests``, ``max_kv_share``; None: only the server's own bounds.
            weight: its share of the engine against other tenants' when there isn't enough for all; None: 1.
            prices: ``{"currency", "prompt", "cached", "completion", "adapters": {NAME: {…}}}``, per million tokens, as decimal text.

        Raises:
            AlreadyExists: a tenant has this name.
        """
        return self._transport.send(_create(name, _policy(limits, weight, prices)))

    def update(
        self,
        name: str,
        *,
        limits: Limits | None = None,
        weight: float | None = None,
        prices: Mapping[str, Any] | None = None,
        if_match: str | None = None,
    ) -> Tenant:
        """Change what is given, and leave the rest. It holds for the tenant's requests from now on; within seconds on every replica.

        Args:
            limits: those to change; None as a limit's value: no limit any more.
            prices: the whole table; empty: its tokens have no price any more.
            if_match: the ETag that the tenant was read with: change it only if nobody else did meanwhile.

        Raises:
            PreconditionFailed: somebody did.
        """
        return self._transport.send(_update(name, _policy(limits, weight, prices), if_match))

    def list(self) -> Iterator[Tenant]:
        """Every tenant by name; pages are asked for as they're needed."""
        return all_rows(self._transport, ROOT, Tenant)

    def get(self, name: str) -> Tenant:
        """Raises TenantNotFound where there is none."""
        return self._transport.send(_get(name))

    def delete(self, name: str) -> None:
        """The tenant's keys and models work no more, at once."""
        self._transport.send(_delete(name))


class AsyncTenants:
    """As `Tenants`, awaiting."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self,
        name: str,
        *,
        limits: Limits | None = None,
        weight: float | None = None,
        prices: Mapping[str, Any] | None = None,
    ) -> Tenant:
        """As `Tenants.create`."""
        return await self._transport.send(_create(name, _policy(limits, weight, prices)))

    async def update(
        self,
        name: str,
        *,
        limits: Limits | None = None,
        weight: float | None = None,
        prices: Mapping[str, Any] | None = None,
        if_match: str | None = None,
    ) -> Tenant:
        """As `Tenants.update`."""
        return await self._transport.send(_update(name, _policy(limits, weight, prices), if_match))

    def list(self) -> AsyncIterator[Tenant]:
        return all_rows_async(self._transport, ROOT, Tenant)

    async def get(self, name: str) -> Tenant:
        return await self._transport.send(_get(name))

    async def delete(self, name: str) -> None:
        await self._transport.send(_delete(name))
