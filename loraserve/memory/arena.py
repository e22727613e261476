"""One device's memory beside the base's weights: pages of one size, rented by the KV cache and by adapters. What is idle gives way by value, whoever's it is."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from loraserve.errors import InvariantViolation


class Tenure(StrEnum):
    """Who rents."""

    KV = "kv"
    ADAPTERS = "adapters"


class Renter(Protocol):
    """Who holds pages, and has some that nobody uses now."""

    @property
    def num_idle_pages(self) -> int:
        """Pages that would be free if everything idle left."""
        ...

    def least_value(self) -> float | None:
        """What the idle thing that is worth least is worth: seconds to bring it back × uses per second ÷ bytes. None where nothing is idle."""
        ...

    def evict_least(self, cause: Tenure, num_wanted: int) -> None:
        """That thing has left, and its pages, one at least, are free; of what is worth nothing, as much as is wanted.

        Args:
            cause: for whom.
            num_wanted: pages.
        """
        ...


class Lease:
    """One renter's part of an arena. Its owner calls `join` before anybody rents."""

    def __init__(self, arena: Arena, name: Tenure) -> None:
        self.arena = arena
        self.name = name
        self.num_rented = 0
        self.renter: Renter | None = None
        # in an arena with places, its pages
        self.pages: set[int] = set()

    def join(self, renter: Renter) -> None:
        """`renter` says from now on what of this part is idle, and gives it up for others."""
        self.renter = renter

    @property
    def num_free(self) -> int:
        """Pages that nobody rents."""
        return self.arena.num_free

    @property
    def num_obtainable(self) -> int:
        """Pages that nobody rents, or that others would give up."""
        return self.arena.num_free + self.arena.num_idle_besides(self)

    def rent(self, count: int) -> None:
        """So many pages more are rented, of an arena without places.

        Raises:
            InvariantViolation: as many aren't free. The caller has made sure that they are.
        """
        self.arena._move(self, count)

    def give_back(self, count: int) -> None:
        """So many pages are free again, of an arena without places.

        Raises:
            InvariantViolation: fewer are rented.
        """
        self.arena._move(self, -count)

    def take(self, count: int) -> list[int]:
        """Rent so many pages, and say which.

        Raises:
            InvariantViolation: as many aren't free.
        """
        return self.arena._take(self, count)

    def put_back(self, pages: Sequence[int]) -> None:
        """These pages are free again.

        Raises:
            InvariantViolation: one isn't rented here.
        """
        self.arena._put_back(self, pages)

    def least_value_of_others(self) -> float | None:
        """What the least valuable that others have idle is worth; None where they have nothing idle."""
        offer = self.arena.least_offer(besides=self)
        return None if offer is None else offer[0]

    def evict_least_of_others(self, num_wanted: int) -> None:
        """That has left, and its pages are free.

        Raises:
            InvariantViolation: others have nothing idle.
        """
        offer = self.arena.least_offer(besides=self)
        if offer is None:
            raise InvariantViolation(f"{self.name} wants others to give up pages, who have nothing idle.")
        self.arena.evict(offer[1], self, num_wanted)

    def make_room(self, num_pages: int) -> bool:
        """So many pages are free, the least valuable idle things of any renter having left for them; False, and nothing has changed, where that can't be."""
        return self.arena.make_room(self, num_pages)


class Arena:
    """A number of pages of one size. Used by the step's thread alone.

    Invariants (`check`):
        free + rented by KV + rented by adapters == num_pages; with places, each page is free or of one renter.
    """

    def __init__(self, num_pages: int, page_num_bytes: int, *, has_places: bool = False) -> None:
        """
        Args:
            has_places: pages are numbered from 0 and rented by number, where bytes lie in one piece of memory; else they are only counted.
        """
        self.num_pages = num_pages
        self.page_num_bytes = page_num_bytes
        self.has_places = has_places
        self.num_free = num_pages
        # the lowest first
        self._free = list(range(num_pages - 1, -1, -1)) if has_places else []
        self._leases = {name: Lease(self, name) for name in Tenure}

    def lease(self, name: Tenure) -> Lease:
        """That renter's part."""
        return self._leases[name]

    def pages_of(self, num_bytes: int) -> int:
        """Pages that hold so many bytes."""
        return -(-num_bytes // self.page_num_bytes)

    def num_idle_besides(self, lease: Lease) -> int:
        """Pages that the others would give up."""
        return sum(
            other.renter.num_idle_pages
            for other in self._leases.values()
            if other is not lease and other.renter is not None
        )

    def make_room(self, lease: Lease, num_pages: int) -> bool:
        """As `Lease.make_room`."""
        num_idle = sum(lease.renter.num_idle_pages for lease in self._leases.values() if lease.renter is not None)
        if num_pages > self.num_free + num_idle:
            return False
        while num_pages > self.num_free:
            offer = self.least_offer()
            if offer is None:
                raise InvariantViolation(
                    f"{num_pages} pages are wanted, {self.num_free} free; renters count others as idle, and offer none."
                )
            self.evict(offer[1], lease, num_pages - self.num_free)
        return True

    def least_offer(self, besides: Lease | None = None) -> tuple[float, Renter] | None:
        """The least valuable idle thing, as what it's worth and whose it is; of equals the KV cache's."""
        offers = [
            (value, lease.renter)
            for lease in self._leases.values()
            if lease is not besides and lease.renter is not None and (value := lease.renter.least_value()) is not None
        ]
        return min(offers, key=lambda offer: offer[0], default=None)

    def evict(self, renter: Renter, lease: Lease, num_wanted: int) -> None:
        """What the renter has offered has left for the lease's owner.

        Raises:
            InvariantViolation: no page is free by that.
        """
        num_free = self.num_free
        renter.evict_least(lease.name, num_wanted)
        if self.num_free <= num_free:
            raise InvariantViolation("A renter has evicted something, and no page is free by that.")

    def check(self) -> list[str]:
        """Every broken invariant, in words; empty when all hold."""
        leases = self._leases.values()
        problems = []
        rented = sum(lease.num_rented for lease in leases)
        if self.num_free + rented != self.num_pages or self.num_free < 0:
            problems.append(f"arena: free {self.num_free} + rented {rented} != {self.num_pages} pages")
        if any(lease.num_rented < 0 for lease in leases):
            problems.append("arena: somebody rents fewer than no pages")
        if self.has_places:
            places = [*self._free, *(page for lease in leases for page in lease.pages)]
            if sorted(places) != list(range(self.num_pages)):
                problems.append("arena: a page is free and rented, or rented twice, or lost")
            if len(self._free) != self.num_free or any(len(lease.pages) != lease.num_rented for lease in leases):
                problems.append("arena: pages are counted otherwise than they are rented")
        problems += [
            f"arena: {lease.name} offers more pages than it rents"
            for lease in leases
            if lease.renter is not None and not 0 <= lease.renter.num_idle_pages <= lease.num_rented
        ]
        return problems

    def _move(self, lease: Lease, count: int) -> None:
        if self.has_places:
            raise InvariantViolation("Pages of this arena have places: they are taken and put back by number.")
        self._count(lease, count)

    def _count(self, lease: Lease, count: int) -> None:
        if count > self.num_free or lease.num_rented + count < 0:
            raise InvariantViolation(
                f"{lease.name} has {lease.num_rented} pages and wants {count:+} of {self.num_free} that are free."
            )
        self.num_free -= count
        lease.num_rented += count

    def _take(self, lease: Lease, count: int) -> list[int]:
        if not self.has_places:
            raise InvariantViolation("Pages of this arena have no places: they are only counted.")
        self._count(lease, count)
        pages = [self._free.pop() for _ in range(count)]
        lease.pages.update(pages)
        return pages

    def _put_back(self, lease: Lease, pages: Sequence[int]) -> None:
        if not lease.pages.issuperset(pages) or len(set(pages)) != len(pages):
            raise InvariantViolation(f"{lease.name} gives back pages that it doesn't rent.")
        self._count(lease, -len(pages))
        lease.pages.difference_update(pages)
        self._free.extend(reversed(pages))
