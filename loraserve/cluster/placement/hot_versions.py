"""Number of replicas of each version: one, and more while it is hot, with hysteresis."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loraserve.cluster.placement.demand import DecayingCounts
from loraserve.cluster.placement.policy import PlacementPolicy


@dataclass(slots=True)
class _HotVersion:
    num_replicas: int
    changed_s: float


class HotVersions:
    """Number of replicas of each version, by its measured share of all requests.

    A version grows at once to as many replicas as leave each at most ``hot_share`` of a replica's
    mean requests. It shrinks only once one replica less would leave each at most ``cold_share``,
    and ``cooldown_s`` after its last change. Between the two nothing changes, so that a share that
    swings by chance doesn't load and drop an adapter again and again. Both shares are larger where
    `num_places` is small, so that hot versions take at most ``hot_memory`` of them.
    """

    def __init__(self, policy: PlacementPolicy) -> None:
        self.num_places = 0
        """Adapters that a replica's memory holds; 0: unknown, as if it held all."""
        self._policy = policy
        self._demand = DecayingCounts(policy.hot_half_life_s, policy.max_versions)
        # only versions of two replicas and more
        self._hot: dict[str, _HotVersion] = {}

    def __len__(self) -> int:
        return len(self._hot)

    @property
    def num_counted(self) -> int:
        """Versions whose demand is known."""
        return len(self._demand)

    def num_replicas(self, digest: str, num_present: int) -> int:
        """Count the present replicas on which the version belongs: 1 unless it is hot."""
        found = self._hot.get(digest)
        return 1 if found is None else min(found.num_replicas, num_present)

    def all(self) -> dict[str, int]:
        """List the number of replicas of each hot version."""
        return {digest: found.num_replicas for digest, found in self._hot.items()}

    def record(self, digest: str, num_present: int, now_s: float) -> None:
        """Count a request for the version, and let its number of replicas follow."""
        self._demand.add(digest, now_s)
        self._resize(digest, num_present, now_s)

    def refresh(self, num_present: int, now_s: float) -> None:
        """Shrink versions that aren't requested any more."""
        for digest in list(self._hot):
            self._resize(digest, num_present, now_s)

    def _resize(self, digest: str, num_present: int, now_s: float) -> None:
        hot_share, cold_share = self._shares()
        # in units of what a replica has on average
        load = self._demand.share(digest) * num_present
        found = self._hot.get(digest)
        size = 1 if found is None else found.num_replicas
        if load > hot_share * size:
            if size < num_present and self._demand.count(digest, now_s) >= self._policy.min_hot_requests:
                wanted = min(num_present, math.ceil(load / hot_share))
                self._hot[digest] = _HotVersion(wanted, now_s)
        elif found is not None and load <= cold_share * (size - 1):
            if now_s - found.changed_s < self._policy.cooldown_s:
                return
            # to the middle of the band: the next change isn't near on either side
            middle = (hot_share + cold_share) / 2
            wanted = max(1, min(size - 1, math.ceil(load / middle)))
            if wanted == 1:
                del self._hot[digest]
            else:
                self._hot[digest] = _HotVersion(wanted, now_s)

    def _shares(self) -> tuple[float, float]:
        """Compute the shares from which on a version is hot, and up to which it is cold."""
        policy, scale = self._policy, 1.0
        if self.num_places:
            # a replica's requests fill at most that many places with more than this share each
            scale = max(1.0, 1 / (policy.hot_memory * self.num_places * policy.hot_share))
        return scale * policy.hot_share, scale * policy.cold_share
