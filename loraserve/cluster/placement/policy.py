"""Constants of a placement, with what it moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """Constants of a placement; `make bench ARGS=placement` shows what each moves."""

    load_factor: float = 1.2
    """Cap on the requests that a replica has, as a multiple of the mean: the c of bounded loads."""
    chance_deviations: float = 1.0
    """Standard deviations of a Poisson count that both caps leave to chance.

    With nine requests a replica, chance alone gives one of eight replicas half as many again;
    without this, each such moment would send requests where their adapter isn't.
    """
    min_bound: int = 4
    """Requests that a replica may always have, however idle the others are."""
    share_factor: float = 1.1
    """Cap on the requests recently given to a replica, as a multiple of the mean."""
    share_half_life_s: float = 300.0
    """Half-life of the count of requests given to a replica."""
    hot_share: float = 0.03
    """Share of a replica's mean requests that one version may have on each of its replicas: with
    more, it gets another replica.

    The requests of hot versions are those that can go to the least loaded of several replicas: the
    more there are, the fewer of the others have to leave their only one. Hot versions take at most
    ``1 / hot_share`` places in a replica's memory, on average.
    """
    hot_memory: float = 0.15
    """Part of a replica's memory that hot versions may take, on average: where it has few places,
    fewer versions are hot, since each copy takes the place of an adapter that has no other.
    """
    cold_share: float = 0.012
    """Share below which a version gives a replica up: with one replica less, each of the others
    would have at most this.
    """
    hot_half_life_s: float = 300.0
    """Half-life of the count of requests for a version."""
    min_hot_requests: float = 4.0
    """Decayed count of requests below which a version is never hot: chance would make it so."""
    cooldown_s: float = 300.0
    """Seconds for which a version keeps all of its replicas after their number changed."""
    home_ratio: float = 0.75
    """A version moves to its home from where it lies in memory when the home had at most this part
    of that replica's requests.
    """
    spare_ratio: float = 2.0
    """A version that is in no replica's memory is loaded by the second of its order instead of its
    home when that has more than this many times the home's room for adapters.
    """
    host_penalty: float = 0.5
    disk_penalty: float = 2.0
    store_penalty: float = 3.0
    """Requests that weigh as much as an adapter's load from each tier, between two replicas of a
    hot version.
    """
    prefix_bonus: float = 2.0
    """Requests that weigh as much as a prompt's cached prefix, between two replicas of a hot
    version.
    """
    max_versions: int = 100_000
    """Versions whose requests are counted; the longest unused are forgotten."""
    max_orders: int = 20_000
    """Orders of replicas that are remembered."""
