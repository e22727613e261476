"""How many of something are under way: bounded for each tenant, so that nobody takes every place, and for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from loraserve.limits import LIMITS
from loraserve.tenancy.limits.shares import Shares, tenant_holder
from loraserve.types import TenantId

_RETRY_S = 5.0
_CUT_S, _LOOK_S = 2.0, 0.005
"""Longest time that whatever is cut short may take to give its place back, and time between two looks at that."""


class Sender(Protocol):
    """Sender of the bytes that a place is held for."""

    @property
    def behind_s(self) -> float:
        """Seconds by which they are behind the least rate; 0 while nothing is waited for."""
        ...

    def cut(self) -> None:
        """Wait for no more of them."""
        ...


class ConcurrencyLimiter:
    """ConcurrencyLimiter for something that takes a while, of which a tenant may have a few, and no more than are free.

    A tenant that has none finds one all the same where another's is held for bytes that don't come: that one is cut short.

    Args:
        what: what they are called in messages and metrics, in the plural.
    """

    def __init__(self, what: str, *, max_in_all: int, max_per_tenant: int) -> None:
        self.shares = Shares(what, what, max_in_all, max_per_holder=max_per_tenant, retry_s=_RETRY_S)
        self._senders: set[Sender] = set()

    def acquire(self, tenant: TenantId) -> None:
        """A place is the tenant's until `release`.

        Raises:
            RateLimited: the tenant has as many as it may.
            Overloaded: all are taken.
        """
        self.shares.take(tenant_holder(tenant))

    async def acquire_or_displace(self, tenant: TenantId, sender: Sender | None) -> None:
        """Take a place as `acquire` does; where all are taken, wait for that of the request furthest behind.

        It waits only if one is far enough behind.

        Args:
            sender: of the bytes that this place is for; None: they are here already.

        Raises:
            RateLimited, Overloaded: as `acquire`.
        """
        holder = tenant_holder(tenant)
        if not self.shares.held(holder) and not self.shares.has_room(holder):
            slowest = max(self._senders, key=lambda one: one.behind_s, default=None)
            if slowest is not None and slowest.behind_s >= LIMITS.stalled_upload_s:
                slowest.cut()
                await self._wait_for_room(tenant)
        self.acquire(tenant)
        if sender is not None:
            self._senders.add(sender)

    async def _wait_for_room(self, tenant: TenantId) -> None:
        deadline_s = time.monotonic() + _CUT_S
        while not self.shares.has_room(tenant_holder(tenant)) and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_S)

    def release(self, tenant: TenantId, sender: Sender | None = None) -> None:
        if sender is not None:
            self._senders.discard(sender)
        self.shares.give_back(tenant_holder(tenant))

    @asynccontextmanager
    async def slot(self, tenant: TenantId, sender: Sender | None = None) -> AsyncIterator[None]:
        """Hold a place for the length of a with block.

        Raises:
            RateLimited, Overloaded: as `acquire_or_displace`.
        """
        await self.acquire_or_displace(tenant, sender)
        try:
            yield
        finally:
            self.release(tenant, sender)
