"""Snapshot of where weights were a moment ago: one query of the engine serves all readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import cached_property

import msgspec

from loraserve.types import AdapterResidency, Digest, Tier

IN_MEMORY = (Tier.DEVICE, Tier.LOADING, Tier.HOST)


class Snapshot:
    """Adapters in memory or being loaded, by digest."""

    def __init__(self, adapters: Collection[AdapterResidency], taken_at_s: float) -> None:
        self.by_digest: Mapping[Digest, AdapterResidency] = {one.digest: one for one in adapters}
        self.taken_at_s = taken_at_s

    @cached_property
    def all_tiers(self) -> bytes:
        """JSON of all digests by tier; rendered once for all operators."""
        return self.tiers(lambda digest: True)

    def tiers(self, is_seen: Callable[[Digest], bool]) -> bytes:
        """Encode JSON of the digests that are seen, by tier."""
        found: dict[str, list[Digest]] = {tier.value: [] for tier in IN_MEMORY}
        for one in self.by_digest.values():
            if one.tier in IN_MEMORY and is_seen(one.digest):
                found[one.tier.value].append(one.digest)
        return msgspec.json.encode(found)


class ResidencySnapshots:
    """The newest snapshot.

    Args:
        ask: queries the engine, which looks through all that it holds between two steps.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[Collection[AdapterResidency]]],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._clock = ask, monotonic
        self._newest: Snapshot | None = None
        self._asking = asyncio.Lock()

    async def take(self, *, max_age_s: float) -> Snapshot:
        """Take a snapshot that is at most that old; 0: a new one.

        Raises:
            EngineUnavailable
        """
        if max_age_s <= 0:
            return await self._take()
        async with self._asking:
            if self._newest is None or self._clock() - self._newest.taken_at_s > max_age_s:
                return await self._take()
            return self._newest

    async def _take(self) -> Snapshot:
        taken_at_s = self._clock()
        snapshot = Snapshot(await self._ask(), taken_at_s)
        if self._newest is None or self._newest.taken_at_s <= taken_at_s:
            self._newest = snapshot
        return snapshot
