"""Values that are kept for tenants, each for its own tenant alone, within a budget of bytes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

HALF = 0.5
"""Most of the budget that one tenant's values take, even while no other has any."""


class TenantCache(Generic[T]):
    """Values up to a number of bytes, by their last use; full, the largest tenant gives way.

    One tenant's key never finds another's value: how soon an answer comes doesn't tell a tenant
    what others have asked for. Nor do one tenant's values push out those of a smaller one.

    Args:
        max_bytes: of all of them.
        share: part of it that one tenant's values may take.
    """

    def __init__(self, max_bytes: int, *, share: float = HALF) -> None:
        self._max_bytes, self._share_bytes = max_bytes, int(max_bytes * share)
        self._values: dict[str, OrderedDict[Hashable, tuple[T, int]]] = {}
        self._bytes: Counter[str] = Counter()
        self._num_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._values.values()))

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def items(self) -> Iterator[tuple[str, Hashable, T]]:
        """Iterate over tenants, keys and values, each tenant's least recently used first."""
        for tenant, values in self._values.items():
            for key, (value, _) in values.items():
                yield tenant, key, value

    def get(self, tenant: str, key: Hashable) -> T | None:
        """Return the tenant's value and note its use; None if it isn't there."""
        values = self._values.get(tenant)
        if values is None or key not in values:
            return None
        values.move_to_end(key)
        return values[key][0]

    def put(self, tenant: str, key: Hashable, value: T, num_bytes: int) -> None:
        """Keep the value for the tenant, which pays for it; one over its share isn't kept."""
        self.drop(tenant, key)
        if num_bytes > self._share_bytes:
            return
        self._values.setdefault(tenant, OrderedDict())[key] = value, num_bytes
        self._add(tenant, num_bytes)
        while self._bytes[tenant] > self._share_bytes:
            self._drop_oldest(tenant)
        while self._num_bytes > self._max_bytes:
            self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))

    def drop(self, tenant: str, key: Hashable) -> None:
        """Forget the tenant's value; no-op if absent."""
        values = self._values.get(tenant)
        if values is None or key not in values:
            return
        _, num_bytes = values.pop(key)
        self._add(tenant, -num_bytes)
        if not values:
            del self._values[tenant], self._bytes[tenant]

    def _drop_oldest(self, tenant: str) -> None:
        self.drop(tenant, next(iter(self._values[tenant])))

    def _add(self, tenant: str, num_bytes: int) -> None:
        self._bytes[tenant] += num_bytes
        self._num_bytes += num_bytes
