"""Weighted rendezvous hashing: each key has its own order of the replicas.

A replica's place depends on the key and on itself alone. So a lost replica moves only the keys that
had it first, 1/N of them at equal weights, and all routers agree without talking.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998); weights by
``-w / ln(u)``, as in Schindelhauer and Schomaker, "Weighted distributed hash tables" (2005).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from loraserve.cluster.placement.views import ReplicaView
from loraserve.errors import InvariantViolation

_SPAN = 1 << 64
_MASK = _SPAN - 1


def hash64(text: str) -> int:
    """Hash the text to 64 bits, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(key: int, other: int) -> int:
    """Mix 64 bits that depend on all bits of both (the finalizer of splitmix64)."""
    x = (key ^ (other * 0x9E3779B97F4A7C15)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class RendezvousOrders:
    """Orders of the present replicas by key, of which the last used are remembered."""

    def __init__(self, max_orders: int) -> None:
        self._max_orders = max_orders
        self._members: tuple[tuple[str, int], ...] = ()
        self._hashes: list[int] = []
        self._orders: OrderedDict[str, list[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._orders)

    def order(self, key: str, replicas: Sequence[ReplicaView]) -> list[int]:
        """Sort the replicas' positions in `replicas`, the key's first choice first.

        Raises:
            InvariantViolation: two replicas have the same id, or one has no capacity.
        """
        members = tuple((view.replica_id, view.capacity_bytes) for view in replicas)
        if members != self._members:
            _check(members)
            self._members = members
            self._hashes = [hash64(replica_id) for replica_id, _ in members]
            self._orders.clear()
        found = self._orders.get(key)
        if found is None:
            found = self._orders[key] = self._compute(key)
            if len(self._orders) > self._max_orders:
                self._orders.popitem(last=False)
        else:
            self._orders.move_to_end(key)
        return found

    def first(self, key: str, places: Sequence[int]) -> int:
        """Find the key's first choice among some positions of the last `order`."""
        start = hash64(key)
        return min(places, key=lambda place: self._score(start, place))

    def _compute(self, key: str) -> list[int]:
        start = hash64(key)
        return sorted(range(len(self._members)), key=lambda place: self._score(start, place))

    def _score(self, start: int, place: int) -> tuple[float, str]:
        replica_id, weight = self._members[place]
        uniform = (mix(start, self._hashes[place]) + 0.5) / _SPAN
        # rounding could make it 1, whose logarithm is 0
        return weight / math.log(min(uniform, 1 - 2**-53)), replica_id


def _check(members: Sequence[tuple[str, int]]) -> None:
    seen: set[str] = set()
    for replica_id, weight in members:
        if replica_id in seen:
            raise InvariantViolation(f"Replica {replica_id!r} is listed twice; each is ranked once. List it once.")
        if weight <= 0:
            raise InvariantViolation(
                f"Replica {replica_id!r} has a capacity of {weight} bytes; expected 1 or more. Report what it can hold."
            )
        seen.add(replica_id)
