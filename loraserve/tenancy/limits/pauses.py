"""Pauses of tenants: new requests wait until the tenant resumes, or for a bounded time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Pause:
    ends_at_s: float
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Pauses:
    """Hold tenants' new requests back on this server, each tenant's by itself.

    Args:
        max_s: seconds after which a pause ends by itself: its trainer may have died.
    """

    def __init__(self, max_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_s, self._clock = max_s, clock
        self._pauses: dict[str, _Pause] = {}

    def begin(self, tenant: str) -> None:
        """Pause the tenant, or let its pause begin again."""
        ends_at_s = self._clock() + self._max_s
        self._pauses.setdefault(tenant, _Pause(ends_at_s)).ends_at_s = ends_at_s

    def end(self, tenant: str) -> None:
        """Let the tenant's requests continue; no-op if it isn't paused."""
        pause = self._pauses.pop(tenant, None)
        if pause is not None:
            pause.ended.set()

    def is_paused(self, tenant: str) -> bool:
        """Check whether the tenant's new requests wait."""
        return self._seconds_left(tenant) > 0

    @property
    def num_paused(self) -> int:
        """Number of tenants that are paused."""
        return sum(self.is_paused(tenant) for tenant in tuple(self._pauses))

    async def wait(self, tenant: str) -> None:
        """Wait until the tenant isn't paused."""
        while (left_s := self._seconds_left(tenant)) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._pauses[tenant].ended.wait(), left_s)

    def _seconds_left(self, tenant: str) -> float:
        pause = self._pauses.get(tenant)
        if pause is None:
            return 0.0
        left_s = pause.ends_at_s - self._clock()
        if left_s <= 0:
            self.end(tenant)
        return left_s
