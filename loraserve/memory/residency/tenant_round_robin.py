"""Turns among tenants: who has hundreds of things in line holds up nobody who has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from loraserve.types import TenantId

T = TypeVar("T")
_NONE_IN_FLIGHT: Mapping[TenantId, int] = {}


class TenantRoundRobin:
    """Round robin over the tenants that are in a line. One thread at a time; it remembers those in line alone.

    Who joins has its turn after those who were there before and haven't had theirs since: leaving and coming back gains nothing, and a stream of new tenants
    holds up nobody for good. Between a tenant's joining and its first turn any other has at most two.
    """

    def __init__(self) -> None:
        self._now = 0
        self._last: dict[TenantId, int] = {}
        self._num_entries: Counter[TenantId] = Counter()

    def __len__(self) -> int:
        return len(self._last)

    def join(self, tenant: TenantId) -> None:
        """The tenant has one thing more in line."""
        self._num_entries[tenant] += 1
        self._last.setdefault(tenant, self._now)

    def leave(self, tenants: Iterable[TenantId]) -> None:
        """Each has one thing less."""
        for tenant in tenants:
            self._num_entries[tenant] -= 1
            if not self._num_entries[tenant]:
                del self._num_entries[tenant], self._last[tenant]

    def take(self, tenants: Iterable[TenantId]) -> None:
        """They have had their turn now."""
        self._now += 1
        for tenant in tenants:
            if tenant in self._last:
                self._last[tenant] = self._now

    def order(
        self, entries: Sequence[tuple[T, Collection[TenantId]]], num_ahead: Mapping[TenantId, int] = _NONE_IN_FLIGHT
    ) -> list[T]:
        """The things in the order in which they have their turns: a tenant's own as given, and each tenant's first before anybody's second.

        What several tenants want has the best place of all of theirs.

        Args:
            entries: things and who wants each, in the order in which they came. Every tenant has joined.
            num_ahead: how many of a tenant's are being served already.
        """
        if len(self._last) < 2:
            return [entry for entry, _ in entries]
        ranks: Counter[TenantId] = Counter(num_ahead)
        keyed = []
        for position, (entry, tenants) in enumerate(entries):
            place = min((ranks[tenant], self._last[tenant]) for tenant in tenants)
            keyed.append(((*place, position), entry))
            for tenant in tenants:
                ranks[tenant] += 1
        keyed.sort(key=lambda pair: pair[0])
        return [entry for _, entry in keyed]
