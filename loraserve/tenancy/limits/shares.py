"""Shares of a server's capacity that requests hold.

They are divided so that no holder starves the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

from loraserve.errors import LoraserveError, Overloaded, RateLimited
from loraserve.limits import LIMITS, Limits
from loraserve.types import TenantId


class Holder(NamedTuple):
    """Tenant, operator, or address of an unauthenticated client.

    Attributes:
        key: which of the tenant's keys; empty: the holder's share isn't divided any further.
    """

    name: str
    key: str = ""


OPERATOR = Holder("operator")
"""Holder of admin requests, whichever tenant they act for,
so that a tenant that fills its share doesn't lock them out.
"""

_RETRY_S = 1.0
_IPV6_SITE_BITS = 64
_KEY_SHARE = 3
"""Maximum that one key may have, as a multiple of what its tenant may have besides: of a tenant's
share, a single key gets six sevenths.
"""


class Shares:
    """Capacity of one kind, of which a holder may have as much as is free.

    A single holder gets half of it, a second one at least a third, and with n greedy holders the
    next one still finds 1 / (n + 1). A tenant's keys divide its share in the same manner. Nothing
    is reserved, and holders needn't be known beforehand.

    Args:
        name: name in metrics.
        what: name of the held things in messages, in the plural.
        capacity: total amount.
        max_per_holder: maximum for one holder, whatever `share_of_free` allows.
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
        self.num_refused = {"share": 0, "key": 0, "full": 0}
        """Refusals: a holder had its share, a key its part of one, or there was no room at all."""
        self._what = what
        self._max_per_holder = capacity if max_per_holder is None else max_per_holder
        self._share_of_free = share_of_free
        self._retry_s = retry_s
        # both have entries only for what holds something
        self._held: Counter[str] = Counter()
        self._held_by_key: Counter[Holder] = Counter()

    def held(self, holder: Holder) -> int:
        """Look up what the holder has, with all of its keys."""
        return self._held.get(holder.name, 0)

    def has_room(self, holder: Holder, amount: int = 1) -> bool:
        """Check whether the holder, and its key, may take that much more."""
        room = self._room(holder)
        return amount <= room and self._key_has_room(holder, amount, room)

    def _room(self, holder: Holder) -> float:
        """Compute how much more the holder may have."""
        limit = min(self._max_per_holder, self._share_of_free * (self.capacity - self.total))
        return limit - self.held(holder)

    def _key_has_room(self, holder: Holder, amount: int, room: float) -> bool:
        return not holder.key or self._held_by_key.get(holder, 0) + amount <= _KEY_SHARE * room

    def take(self, holder: Holder, amount: int = 1) -> None:
        """Reserve `amount` for the holder until `give_back`.

        Raises:
            RateLimited: it would have more than its share.
            Overloaded: it has nothing, and still there is no room.
        """
        if not self.has_room(holder, amount):
            raise self._refusal(holder, amount)
        self._add(holder, amount)

    def give_back(self, holder: Holder, amount: int = 1) -> None:
        self._add(holder, -amount)

    def _add(self, holder: Holder, amount: int) -> None:
        self.total += amount
        self._held[holder.name] += amount
        if not self._held[holder.name]:
            del self._held[holder.name]
        if holder.key:
            self._held_by_key[holder] += amount
            if not self._held_by_key[holder]:
                del self._held_by_key[holder]

    def move(self, holder: Holder, to: Holder) -> None:
        """Give one of what `holder` has to another; it stays where it is if that is refused.

        Raises:
            RateLimited, Overloaded: as `take`.
        """
        self.give_back(holder)
        try:
            self.take(to)
        except LoraserveError:
            self._add(holder, 1)
            raise

    def _refusal(self, holder: Holder, amount: int) -> LoraserveError:
        held = self.held(holder)
        if amount <= self._room(holder):
            self.num_refused["key"] += 1
            return RateLimited(
                f"Your key holds {self._held_by_key[holder]} of the {held} {self._what} of your tenant; {amount} more "
                "would leave too few to its other keys.",
                retry_after_s=self._retry_s,
                hint="Wait until some of them have ended.",
            )
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
        """Open connections: of the tenant whose request they had last, by address before that."""
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


class ConnectionSlot:
    """Slot of one connection among all connections, held from its acceptance to its end.

    The client's address holds it until a request on the connection is authenticated, and then the
    tenant of the last such request: behind a proxy, a tenant's connections aren't its address's.

    Attributes:
        host: client's address, as far as the connection itself shows it.
    """

    def __init__(self, connections: Shares, host: str) -> None:
        """Take a slot for the address.

        Raises:
            RateLimited: the address has its share.
            Overloaded: there is no room.
        """
        self.host = host
        self._connections = connections
        holder = address_holder(host)
        connections.take(holder)
        self._holder: Holder | None = holder

    def move(self, holder: Holder) -> None:
        """Let `holder` have the slot; no-op once it is released.

        Raises:
            RateLimited: the holder has its share; the slot stays where it is.
            Overloaded: there is no room.
        """
        if self._holder is not None and self._holder != holder:
            self._connections.move(self._holder, holder)
            self._holder = holder

    def release(self) -> None:
        """Give the slot back; no-op when called again."""
        if self._holder is not None:
            self._connections.give_back(self._holder)
            self._holder = None


class Claim:
    """Shares of `Rooms` that one request holds.

    It holds them first for its client's address and, once authenticated, for its holder, as its
    connection's slot is held. The creator must call `release` however the request ends; it is a
    no-op when called again.

    Args:
        slot: slot of its connection; None: it has no connection of its own.
        max_body_bytes: maximum of its body in memory at once; the rest of a larger body goes to
            disk.
    """

    def __init__(
        self,
        rooms: Rooms,
        address: Holder,
        *,
        slot: ConnectionSlot | None = None,
        max_body_bytes: int = LIMITS.max_body_bytes,
    ) -> None:
        self._rooms = rooms
        self._slot = slot
        self.holder = address
        self.is_slot_refused = False
        """Whether the holder may not have the connection's slot: the connection has to end."""
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
        self._move_slot()
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
        self._move_slot()
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

    def _move_slot(self) -> None:
        if self._slot is None:
            return
        try:
            self._slot.move(self.holder)
        except LoraserveError:
            self.is_slot_refused = True
            raise

    def _take(self, shares: Shares, amount: int = 1) -> None:
        holder = self.holder
        shares.take(holder, amount)
        self._given_back.append(lambda: shares.give_back(holder, amount))


def tenant_holder(tenant: TenantId, key_id: str | None = None) -> Holder:
    return Holder(f"tenant:{tenant}", key_id or "")


def address_holder(host: str) -> Holder:
    """Choose the holder of a client's address.

    Of an IPv6 address, it is the half that the client can't choose.
    """
    try:
        address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    except ValueError:
        return Holder(f"address:{host}")
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or IPv6Address(int(address) >> _IPV6_SITE_BITS << _IPV6_SITE_BITS)
    return Holder(f"address:{address}")
