"""`client.tenants`: who shares the server. For admin keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import datetime

from pydantic import Field

from loraserve.sdk.call import Call, Result, encode, idempotency_key, read_into, read_nothing, segment
from loraserve.sdk.paging import all_rows, all_rows_async
from loraserve.sdk.transport import AsyncTransport, Transport

ROOT = "/api/v1/tenants"


class Tenant(Result):
    id: str
    """Never given twice, unlike the name."""
    name: str
    limits: dict[str, int | None] = Field(default_factory=dict)
    """What it may hold; None: only the server's own bounds."""
    created_at: datetime


def _create(name: str, limits: Mapping[str, int] | None) -> Call[Tenant]:
    body = {"name": name} if limits is None else {"name": name, "limits": dict(limits)}
    return Call("POST", ROOT, read_into(Tenant), headers=idempotency_key(), body=encode(body))


def _get(name: str) -> Call[Tenant]:
    return Call("GET", f"{ROOT}/{segment(name, 'tenant')}", read_into(Tenant))


def _delete(name: str) -> Call[None]:
    return Call("DELETE", f"{ROOT}/{segment(name, 'tenant')}", read_nothing)


class Tenants:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, name: str, *, limits: Mapping[str, int] | None = None) -> Tenant:
        """A new tenant without keys or adapters.

        Args:
            limits: ``max_adapters``, ``max_stored_bytes``; None: only the server's own bounds.

        Raises:
            AlreadyExists: a tenant has this name.
        """
        return self._transport.send(_create(name, limits))

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

    async def create(self, name: str, *, limits: Mapping[str, int] | None = None) -> Tenant:
        return await self._transport.send(_create(name, limits))

    def list(self) -> AsyncIterator[Tenant]:
        return all_rows_async(self._transport, ROOT, Tenant)

    async def get(self, name: str) -> Tenant:
        return await self._transport.send(_get(name))

    async def delete(self, name: str) -> None:
        await self._transport.send(_delete(name))
