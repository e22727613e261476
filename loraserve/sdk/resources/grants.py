"""`client.grants`: which other tenants may use an adapter, as ``OWNER/NAME``. They neither see its files nor change it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import datetime

from loraserve.sdk.call import Call, Result, read_into, read_nothing, segment
from loraserve.sdk.transport.paging import all_rows, all_rows_async
from loraserve.sdk.transport.transport import AsyncTransport, Transport


class Grant(Result):
    adapter: str
    tenant: str
    """The name of the tenant that may use it."""
    created_at: datetime


def _root(adapter: str) -> str:
    return f"/api/v1/adapters/{segment(adapter, 'name')}/grants"


def _path(adapter: str, tenant: str) -> str:
    return f"{_root(adapter)}/{segment(tenant, 'tenant')}"


def _add(adapter: str, tenant: str) -> Call[Grant]:
    return Call("PUT", _path(adapter, tenant), read_into(Grant))


def _get(adapter: str, tenant: str) -> Call[Grant]:
    return Call("GET", _path(adapter, tenant), read_into(Grant))


def _remove(adapter: str, tenant: str) -> Call[None]:
    return Call("DELETE", _path(adapter, tenant), read_nothing)


class Grants:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def add(self, adapter: str, tenant: str) -> Grant:
        """Let `tenant` use the adapter. Twice is as good as once.

        Raises:
            TenantNotFound: there is no such tenant.
        """
        return self._transport.send(_add(adapter, tenant))

    def list(self, adapter: str) -> Iterator[Grant]:
        """Who may use the adapter beside its owner; pages are asked for as they're needed."""
        return all_rows(self._transport, _root(adapter), Grant)

    def get(self, adapter: str, tenant: str) -> Grant:
        """Raises GrantNotFound where there is none."""
        return self._transport.send(_get(adapter, tenant))

    def remove(self, adapter: str, tenant: str) -> None:
        """`tenant` may use it no more, within seconds. Requests that run finish."""
        self._transport.send(_remove(adapter, tenant))


class AsyncGrants:
    """As `Grants`, awaiting."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def add(self, adapter: str, tenant: str) -> Grant:
        return await self._transport.send(_add(adapter, tenant))

    def list(self, adapter: str) -> AsyncIterator[Grant]:
        return all_rows_async(self._transport, _root(adapter), Grant)

    async def get(self, adapter: str, tenant: str) -> Grant:
        return await self._transport.send(_get(adapter, tenant))

    async def remove(self, adapter: str, tenant: str) -> None:
        await self._transport.send(_remove(adapter, tenant))
