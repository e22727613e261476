"""Turns among tenants: one with hundreds of entries doesn't hold up one with a single entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from loraserve.types import TenantId

T = TypeVar("T")
_NONE_IN_FLIGHT: Mapping[TenantId, int] = {}


class TenantRoundRobin:
    """Round robin over the tenants with entries in a queue.

    One thread at a time; no other tenant is remembered.

    A tenant that joins has its turn after those that were there and haven't had theirs since:
    leaving and coming back gains nothing, and a stream of new tenants doesn't starve an old one.
    Between a tenant's joining and its first turn any other has at most two.
    """

    def __init__(self) -> None:
        self._now = 0
        self._last: dict[TenantId, int] = {}
        self._num_entries: Counter[TenantId] = Counter()

    def __len__(self) -> int:
        return len(self._last)

    def join(self, tenant: TenantId) -> None:
        """Count one more entry of the tenant."""
        self._num_entries[tenant] += 1
        self._last.setdefault(tenant, self._now)

    def leave(self, tenants: Iterable[TenantId]) -> None:
        """Count one entry less of each tenant."""
        for tenant in tenants:
            self._num_entries[tenant] -= 1
            if not self._num_entries[tenant]:
                del self._num_entries[tenant], self._last[tenant]

    def take(self, tenants: Iterable[TenantId]) -> None:
        """Note that these tenants have had their turn now."""
        self._now += 1
        for tenant in tenants:
            if tenant in self._last:
                self._last[tenant] = self._now

    def order(
        self, entries: Sequence[tuple[T, Collection[TenantId]]], num_ahead: Mapping[TenantId, int] = _NONE_IN_FLIGHT
    ) -> list[T]:
        """Sort the entries into the order in which tenants take turns.

        Each tenant's first comes before any tenant's second; one tenant's are in the given order.

        An entry of several tenants has the best position that any of them gives it.

        Args:
            entries: entries with their tenants, in the order in which they came. Every tenant has
                joined.
            num_ahead: entries of each tenant that are being served already.
        """
        if len(self._last) < 2:
            return [entry for entry, _ in entries]
        ranks: Counter[TenantId] = Counter(num_ahead)
        keyed = []
        for position, (entry, tenants) in enumerate(entries):
            turn = min((ranks[tenant], self._last[tenant]) for tenant in tenants)
            keyed.append(((*turn, position), entry))
            for tenant in tenants:
                ranks[tenant] += 1
        keyed.sort(key=lambda pair: pair[0])
        return [entry for _, entry in keyed]
