"""`client.keys`: a tenant's API keys. For admin keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime

from pydantic import Field

from loraserve.sdk.call import Call, Result, encode, idempotency_key, read_into, read_nothing, segment
from loraserve.sdk.transport.paging import all_rows, all_rows_async
from loraserve.sdk.transport.transport import AsyncTransport, Transport


class Key(Result):
    """An API key without its secret."""

    id: str
    name: str
    scopes: list[str]
    prefix: str
    """The secret's first characters, to tell keys apart."""
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class NewKey(Key):
    """The only answer that ever holds the secret."""

    key: str = Field(repr=False)


def _root(tenant: str) -> str:
    return f"/api/v1/tenants/{segment(tenant, 'tenant')}/keys"


def _create(tenant: str, name: str, scopes: Sequence[str] | None, expires_at: datetime | None) -> Call[NewKey]:
    body: dict[str, object] = {"name": name}
    if scopes is not None:
        body["scopes"] = list(scopes)
    if expires_at is not None:
        # A naive instant is this machine's.
        body["expires_at"] = expires_at.astimezone().isoformat()
    return Call("POST", _root(tenant), read_into(NewKey), headers=idempotency_key(), body=encode(body))


def _revoke(tenant: str, key_id: str) -> Call[None]:
    return Call("DELETE", f"{_root(tenant)}/{segment(key_id, 'key')}", read_nothing)


class Keys:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self, tenant: str, *, name: str, scopes: Sequence[str] | None = None, expires_at: datetime | None = None
    ) -> NewKey:
        """A new key of the tenant; `key` is its secret, shown this once.

        Args:
            name: for people, to tell keys apart.
            scopes: of ``inference``, ``adapters:read``, ``adapters:write``; None: all three. Or ``metrics:read`` alone, for
                what scrapes the metrics of all tenants.
            expires_at: when it stops working by itself; None: never.
        """
        return self._transport.send(_create(tenant, name, scopes, expires_at))

    def list(self, tenant: str) -> Iterator[Key]:
        """The tenant's keys, oldest first, the revoked too."""
        return all_rows(self._transport, _root(tenant), Key)

    def revoke(self, tenant: str, key_id: str) -> None:
        """The key works no more. Twice is as good as once."""
        self._transport.send(_revoke(tenant, key_id))


class AsyncKeys:
    """As `Keys`, awaiting."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self, tenant: str, *, name: str, scopes: Sequence[str] | None = None, expires_at: datetime | None = None
    ) -> NewKey:
        return await self._transport.send(_create(tenant, name, scopes, expires_at))

    def list(self, tenant: str) -> AsyncIterator[Key]:
        return all_rows_async(self._transport, _root(tenant), Key)

    async def revoke(self, tenant: str, key_id: str) -> None:
        await self._transport.send(_revoke(tenant, key_id))
