"""Shares of a server's capacity that requests hold.

They are divided so that no holder starves the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NewType

from loraserve.errors import LoraserveError, Overloaded, RateLimited
from loraserve.limits import LIMITS, Limits
from loraserve.types import TenantId

Holder = NewType("Holder", str)
"""Tenant, operator, or address of an unauthenticated client."""

OPERATOR = Holder("operator")
"""Holder of admin requests, whichever tenant they act for,
so that a tenant that fills its share doesn't lock them out.
"""

_RETRY_S = 1.0
_IPV6_SITE_BITS = 64


class Shares:
    """Capacity of one kind, of which a holder may have as much as is free.

    A single holder gets half of it, a second one at least a third, and beside n greedy holders the
    next one still finds 1 / (n + 1). Nothing is reserved, and holders needn't be known beforehand.

    Args:
        name: name in metrics.
        what: name of the held things in messages, in the plural.
        capacity: total amount.
        max_per_holder: maximum for one holder, beside its share.
        share_of_free: multiple of the free amount that a holder may have.

    Source: dynamic thresholds of switches' shared buffers (Choudhury and Hahne, IEEE/ACM ToN 1998).
    """

    def __init__(
        self,
        name: str,
        what: str,
        capacity: int,
        *,
        max_per_holder: int | None = None,
        share_of_free: float = LIMITS.share_of_free,
        retry_s: float = _RETRY_S,
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.total = 0
        """Amount that all holders have together."""
        self.num_refused = {"share": 0, "full": 0}
        """Refusals, by whether a holder had its share or there was no room at all."""
        self._what = what
        self._max_per_holder = capacity if max_per_holder is None else max_per_holder
        self._share_of_free = share_of_free
        self._retry_s = retry_s
        # has entries only for holders that hold something
        self._held: Counter[Holder] = Counter()

    def held(self, holder: Holder) -> int:
        return self._held.get(holder, 0)

    def has_room(self, holder: Holder, amount: int = 1) -> bool:
        """Return whether the holder may take so much more."""
        wanted = self.held(holder) + amount
        return wanted <= self._max_per_holder and wanted <= self._share_of_free * (self.capacity - self.total)

    def take(self, holder: Holder, amount: int = 1) -> None:
        """Give the holder so much more, until `give_back`.

        Raises:
            RateLimited: it would have more than its share.
            Overloaded: it has nothing, and still there is no room.
        """
        if not self.has_room(holder, amount):
            raise self._refusal(self.held(holder), amount)
        self._held[holder] += amount
        self.total += amount

    def give_back(self, holder: Holder, amount: int = 1) -> None:
        self._held[holder] -= amount
        self.total -= amount
        if not self._held[holder]:
            del self._held[holder]

    def _refusal(self, held: int, amount: int) -> LoraserveError:
        if held or amount > self._max_per_holder:
            self.num_refused["share"] += 1
            others = self.total - held
            why = f"while others use {others}" if others else "which leaves as many for others"
            return RateLimited(
                f"You hold {held} of {self.capacity} {self._what}; {amount} more would exceed your share, {why}.",
                retry_after_s=self._retry_s,
                hint="Wait until some of them have ended.",
            )
        self.num_refused["full"] += 1
        return Overloaded(
            f"{self.total} of {self.capacity} {self._what} are in use; {amount} more would exceed the limit.",
            retry_after_s=self._retry_s,
        )


class Rooms:
    """Capacities that a server's requests share before they reach the engine."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        def shares(name: str, what: str, capacity: int) -> Shares:
            return Shares(name, what, capacity, share_of_free=limits.share_of_free)

        self.connections = shares("connections", "connections", limits.max_connections)
        """Open connections, by address."""
        self.unproven = shares("unproven", "requests with unverified keys", limits.max_unproven_requests)
        """Requests whose key isn't verified yet, by address."""
        self.lingering = shares("lingering", "refused requests", limits.max_lingering_requests)
        """Refused requests whose bodies are still read,
        so that their clients receive the refusal; by address.
        """
        self.live = shares("live", "requests", limits.max_live_requests)
        self.management = shares("management", "management requests", limits.max_management_requests)
        self.body_bytes = shares("body_bytes", "bytes of requests' bodies", limits.max_body_bytes_in_flight)

    def all(self) -> tuple[Shares, ...]:
        return self.connections, self.unproven, self.lingering, self.live, self.management, self.body_bytes


class Claim:
    """Shares of `Rooms` that one request holds.

    It holds them first for its client's address and, once authenticated, for its holder. The
    creator must call `release` however the request ends; it is a no-op when called again.

    Args:
        max_body_bytes: maximum of its body in memory at once; the rest of a larger body goes to
            disk.
    """

    def __init__(self, rooms: Rooms, address: Holder, *, max_body_bytes: int = LIMITS.max_body_bytes) -> None:
        self._rooms = rooms
        self.holder = address
        self._max_body_bytes = max_body_bytes
        self._num_body_bytes = 0
        self._given_back: list[Callable[[], None]] = []
        self._is_proven = False

    def begin(self) -> None:
        """Take a share of the requests whose key isn't verified.

        Raises:
            RateLimited: the address has its share.
            Overloaded: there is no room.
        """
        self._take(self._rooms.unproven)

    def prove(self, holder: Holder, *, is_management: bool) -> None:
        """Move to the holder's share of the requests that are answered.

        Raises:
            RateLimited: it has its share.
            Overloaded: there is no room.
        """
        if self._is_proven:
            return
        self.release()
        self.holder = holder
        self._take(self._rooms.live)
        if is_management:
            self._take(self._rooms.management)
        self._is_proven = True

    def hold_body(self, num_bytes: int) -> None:
        """Count further bytes of the body, which stay in memory until the request ends.

        Raises:
            RateLimited: the holder has its share of all bodies' bytes.
            Overloaded: there is no room.
        """
        more = min(num_bytes, self._max_body_bytes - self._num_body_bytes)
        if more > 0:
            self._take(self._rooms.body_bytes, more)
            self._num_body_bytes += more

    def release(self) -> None:
        """Give everything back."""
        while self._given_back:
            self._given_back.pop()()

    def _take(self, shares: Shares, amount: int = 1) -> None:
        holder = self.holder
        shares.take(holder, amount)
        self._given_back.append(lambda: shares.give_back(holder, amount))


def tenant_holder(tenant: TenantId) -> Holder:
    return Holder(f"tenant:{tenant}")


def address_holder(host: str) -> Holder:
    """Return the holder of a client's address.

    Of an IPv6 address, it is the half that the client can't choose.
    """
    try:
        address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    except ValueError:
        return Holder(f"address:{host}")
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or IPv6Address(int(address) >> _IPV6_SITE_BITS << _IPV6_SITE_BITS)
    return Holder(f"address:{address}")
