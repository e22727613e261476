"""Views that a placement sees: a request, and what the router last heard of each replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from loraserve.types import Digest, TenantId, Tier


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Request as far as its placement depends on it."""

    tenant: TenantId
    digest: Digest | None = None
    """Version that it is for; None: the base."""
    adapter_bytes: int = 0
    """Bytes of the version's weights: what a replica without it has to read."""
    prefix_key: str | None = None
    """Hash of the prompt's first block, the same for all turns of a conversation; None: unknown.

    It is compared within the tenant and the version alone, as the prefix cache does.
    """


@dataclass(slots=True)
class ReplicaView:
    """State that the router last heard of one replica; the router changes it in place."""

    replica_id: str
    residency: Mapping[Digest, Tier] = field(default_factory=dict)
    """Tier of each version that the replica holds; a version that isn't in it has to be read from
    the store.
    """
    running: int = 0
    waiting: int = 0
    capacity_bytes: int = 1
    """Bytes of adapters that it can hold in memory: its weight in the hashing."""
    num_places: int = 0
    """Adapters of the usual size that its memory holds; 0: unknown."""
    count_spare: Callable[[], int] = lambda: 0
    """Return how many adapters it can load before it drops one that lies in no other's memory.

    It is called only for a version that lies in no replica's memory: counting takes as long as
    replicas hold adapters.
    """

    @property
    def load(self) -> int:
        """Requests that it has, running or waiting."""
        return self.running + self.waiting

    def tier(self, digest: Digest | None) -> Tier | None:
        """Look up the tier in which the version is; None if it has to be read from the store.

        The base is on every device.
        """
        return Tier.DEVICE if digest is None else self.residency.get(digest)


def spare_places(held: Mapping[str, tuple[Collection[Digest], int]]) -> dict[str, int]:
    """Compute each replica's room for adapters: places less the adapters that no other replica has.

    Args:
        held: by replica, the digests that it has in memory and its number of places.
    """
    num_holders = Counter(digest for digests, _ in held.values() for digest in digests)
    return {
        replica_id: max(0, num_places - sum(num_holders[digest] == 1 for digest in digests))
        for replica_id, (digests, num_places) in held.items()
    }
