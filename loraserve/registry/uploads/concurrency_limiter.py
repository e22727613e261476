"""Limit of concurrent transfers, per tenant and in all, so that no tenant occupies every slot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from loraserve.limits import LIMITS
from loraserve.tenancy.limits.shares import Shares, tenant_holder
from loraserve.types import TenantId

_RETRY_S = 5.0
_CUT_S, _LOOK_S = 2.0, 0.005
"""Maximum time, and polling interval, in seconds to wait for a displaced transfer to release its
slot.
"""


class Sender(Protocol):
    """Client that sends the bytes of a transfer."""

    @property
    def behind_s(self) -> float:
        """Seconds by which the sender lags behind the minimum rate.

        It is 0 while no bytes are awaited.
        """
        ...

    def cut(self) -> None:
        """Stop waiting for more bytes."""
        ...


class ConcurrencyLimiter:
    """Slots for transfers, of which each tenant may hold a few and no more than are free.

    A tenant without a slot displaces the slowest transfer if that one's sender has stalled.

    Args:
        what: name of the transfers in messages and metrics, in the plural.
    """

    def __init__(self, what: str, *, max_in_all: int, max_per_tenant: int) -> None:
        self.shares = Shares(what, what, max_in_all, max_per_holder=max_per_tenant, retry_s=_RETRY_S)
        self._senders: set[Sender] = set()

    def acquire(self, tenant: TenantId) -> None:
        """Take a slot for the tenant until `release`.

        Raises:
            RateLimited: the tenant holds its maximum.
            Overloaded: all slots are taken.
        """
        self.shares.take(tenant_holder(tenant))

    async def acquire_or_displace(self, tenant: TenantId, sender: Sender | None, *, wait_s: float = 0.0) -> None:
        """Take a slot as `acquire` does, or that of the transfer that lags most.

        If none is free, that transfer is stopped and waited for. A transfer is stopped only if it
        lags by `LIMITS.stalled_upload_s` or more.

        Args:
            sender: client that sends this transfer's bytes; None if they have arrived already.
            wait_s: seconds to wait for a slot that ends by itself.

        Raises:
            RateLimited, Overloaded: as `acquire`.
        """
        holder = tenant_holder(tenant)
        if not self.shares.held(holder) and not self.shares.has_room(holder):
            slowest = max(self._senders, key=lambda one: one.behind_s, default=None)
            if slowest is not None and slowest.behind_s >= LIMITS.stalled_upload_s:
                slowest.cut()
                await self._wait_for_room(tenant, _CUT_S)
        if wait_s:
            await self._wait_for_room(tenant, wait_s)
        self.acquire(tenant)
        if sender is not None:
            self._senders.add(sender)

    async def _wait_for_room(self, tenant: TenantId, wait_s: float) -> None:
        deadline_s = time.monotonic() + wait_s
        while not self.shares.has_room(tenant_holder(tenant)) and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_S)

    def release(self, tenant: TenantId, sender: Sender | None = None) -> None:
        if sender is not None:
            self._senders.discard(sender)
        self.shares.give_back(tenant_holder(tenant))

    @asynccontextmanager
    async def slot(
        self, tenant: TenantId, sender: Sender | None = None, *, wait_s: float = 0.0
    ) -> AsyncIterator[Callable[[], None]]:
        """Hold a slot for the length of a with block; yield what releases it earlier.

        Raises:
            RateLimited, Overloaded: as `acquire_or_displace`.
        """
        await self.acquire_or_displace(tenant, sender, wait_s=wait_s)
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self.release(tenant, sender)

        try:
            yield release
        finally:
            release()
