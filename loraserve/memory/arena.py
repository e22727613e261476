"""Pool of equal pages that the KV cache and adapters share.

The least valuable idle content is evicted, in whichever cache it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from loraserve.errors import InvariantViolation


class Owner(StrEnum):
    """Content of a page."""

    KV = "kv"
    ADAPTERS = "adapters"


class EvictableCache(Protocol):
    """A cache in the arena's pages that can evict its idle content."""

    @property
    def num_idle_pages(self) -> int:
        """Pages that would be free if all idle content was evicted."""
        ...

    def victim_value(self) -> float | None:
        """Estimate the value of what this cache would evict first; None if nothing is idle.

        The value is the seconds to restore it × uses per second ÷ bytes.
        """
        ...

    def evict_victim(self, cause: Owner, num_pages: int) -> None:
        """Evict the least valuable idle content and free its pages, at least one.

        Of content without value, evict as much as is needed.

        Args:
            cause: the owner that needs the pages.
            num_pages: pages needed.
        """
        ...


class ArenaClient:
    """Access of one owner to the arena. Its cache is registered before any client allocates.

    Attributes:
        num_allocated: pages that this client holds.
        pages: their numbers, in an indexed arena.
        cache: the cache that evicts idle content for other clients.
    """

    def __init__(self, arena: Arena, owner: Owner) -> None:
        self.arena = arena
        self.owner = owner
        self.num_allocated = 0
        self.cache: EvictableCache | None = None
        self.pages: set[int] = set()

    def register(self, cache: EvictableCache) -> None:
        """Make `cache` the one that evicts this client's idle content for others."""
        self.cache = cache

    @property
    def num_free(self) -> int:
        """Free pages of the arena."""
        return self.arena.num_free

    @property
    def num_obtainable(self) -> int:
        """Pages that are free, or would be if the other clients evicted all idle content."""
        return self.arena.num_free + self.arena.num_idle_besides(self)

    def allocate(self, count: int) -> None:
        """Allocate pages of a counted arena.

        Raises:
            InvariantViolation: fewer are free. The caller has made sure that there are enough.
        """
        self.arena._move(self, count)

    def free(self, count: int) -> None:
        """Free pages of a counted arena.

        Raises:
            InvariantViolation: this client holds fewer.
        """
        self.arena._move(self, -count)

    def allocate_pages(self, count: int) -> list[int]:
        """Allocate pages of an indexed arena and return their numbers.

        Raises:
            InvariantViolation: fewer are free.
        """
        return self.arena._allocate_pages(self, count)

    def free_pages(self, pages: Sequence[int]) -> None:
        """Free these pages of an indexed arena.

        Raises:
            InvariantViolation: this client doesn't hold one of them.
        """
        self.arena._free_pages(self, pages)

    def victim_value_of_others(self) -> float | None:
        """Estimate the value of the other clients' least valuable idle content, if any."""
        victim = self.arena.victim(besides=self)
        return None if victim is None else victim[0]

    def evict_victim_of_others(self, num_pages: int) -> None:
        """Evict the least valuable idle content of other clients.

        Raises:
            InvariantViolation: they have none.
        """
        victim = self.arena.victim(besides=self)
        if victim is None:
            raise InvariantViolation(f"{self.owner} needs other clients' pages, and they have nothing idle.")
        self.arena.evict(victim[1], self, num_pages)

    def make_room(self, num_pages: int) -> bool:
        """Evict the least valuable idle content of any client until this many pages are free.

        Evict nothing, and return False, if that isn't possible.
        """
        return self.arena.make_room(self, num_pages)


class Arena:
    """A number of pages of one size, used by the step's thread alone.

    Invariants (`check`):
        free + allocated to KV + allocated to adapters == num_pages; in an indexed arena each page
        is free or has one owner.
    """

    def __init__(self, num_pages: int, page_num_bytes: int, *, is_indexed: bool = False) -> None:
        """Make an arena whose pages are all free.

        Args:
            is_indexed: pages are parts of one piece of memory, allocated by number from 0;
                otherwise they are only counted.
        """
        self.num_pages = num_pages
        self.page_num_bytes = page_num_bytes
        self.is_indexed = is_indexed
        self.num_free = num_pages
        # the lowest number is allocated first
        self._free = list(range(num_pages - 1, -1, -1)) if is_indexed else []
        self._clients = {owner: ArenaClient(self, owner) for owner in Owner}

    def client(self, owner: Owner) -> ArenaClient:
        return self._clients[owner]

    def pages_of(self, num_bytes: int) -> int:
        """Count the pages that hold this many bytes."""
        return -(-num_bytes // self.page_num_bytes)

    def num_idle_besides(self, client: ArenaClient) -> int:
        """Count the pages that the other clients could free by evicting idle content."""
        return sum(
            other.cache.num_idle_pages
            for other in self._clients.values()
            if other is not client and other.cache is not None
        )

    def make_room(self, client: ArenaClient, num_pages: int) -> bool:
        """Make room, as `ArenaClient.make_room` describes."""
        num_idle = sum(one.cache.num_idle_pages for one in self._clients.values() if one.cache is not None)
        if num_pages > self.num_free + num_idle:
            return False
        while num_pages > self.num_free:
            victim = self.victim()
            if victim is None:
                raise InvariantViolation(
                    f"{num_pages} pages are needed and {self.num_free} are free; "
                    "caches count idle pages but have no victim."
                )
            self.evict(victim[1], client, num_pages - self.num_free)
        return True

    def victim(self, besides: ArenaClient | None = None) -> tuple[float, EvictableCache] | None:
        """Find the least valuable idle content, with its value and cache; None if there is none.

        Of equals it is the KV cache's.
        """
        victims = [
            (value, client.cache)
            for client in self._clients.values()
            if client is not besides and client.cache is not None and (value := client.cache.victim_value()) is not None
        ]
        return min(victims, key=lambda victim: victim[0], default=None)

    def evict(self, cache: EvictableCache, client: ArenaClient, num_pages: int) -> None:
        """Evict the cache's victim on behalf of the client.

        Raises:
            InvariantViolation: no page became free.
        """
        num_free = self.num_free
        cache.evict_victim(client.owner, num_pages)
        if self.num_free <= num_free:
            raise InvariantViolation("A cache has evicted its victim, and no page became free.")

    def check(self) -> list[str]:
        """List the broken invariants, in words; empty when all hold."""
        clients = self._clients.values()
        problems = []
        num_allocated = sum(client.num_allocated for client in clients)
        if self.num_free + num_allocated != self.num_pages or self.num_free < 0:
            problems.append(f"arena: free {self.num_free} + allocated {num_allocated} != {self.num_pages} pages")
        if any(client.num_allocated < 0 for client in clients):
            problems.append("arena: a client holds a negative number of pages")
        if self.is_indexed:
            numbers = [*self._free, *(page for client in clients for page in client.pages)]
            if sorted(numbers) != list(range(self.num_pages)):
                problems.append("arena: a page is free and allocated, or allocated twice, or lost")
            if len(self._free) != self.num_free or any(len(one.pages) != one.num_allocated for one in clients):
                problems.append("arena: the counts of pages differ from the allocated pages")
        problems += [
            f"arena: {client.owner} counts more idle pages than it holds"
            for client in clients
            if client.cache is not None and not 0 <= client.cache.num_idle_pages <= client.num_allocated
        ]
        return problems

    def _move(self, client: ArenaClient, count: int) -> None:
        if self.is_indexed:
            raise InvariantViolation("This arena is indexed: its pages are allocated and freed by number.")
        self._count(client, count)

    def _count(self, client: ArenaClient, count: int) -> None:
        if count > self.num_free or client.num_allocated + count < 0:
            raise InvariantViolation(
                f"{client.owner} holds {client.num_allocated} pages and needs {count:+} of {self.num_free} free ones."
            )
        self.num_free -= count
        client.num_allocated += count

    def _allocate_pages(self, client: ArenaClient, count: int) -> list[int]:
        if not self.is_indexed:
            raise InvariantViolation("This arena isn't indexed: its pages are only counted.")
        self._count(client, count)
        pages = [self._free.pop() for _ in range(count)]
        client.pages.update(pages)
        return pages

    def _free_pages(self, client: ArenaClient, pages: Sequence[int]) -> None:
        if not client.pages.issuperset(pages) or len(set(pages)) != len(pages):
            raise InvariantViolation(f"{client.owner} frees pages that it doesn't hold.")
        self._count(client, -len(pages))
        client.pages.difference_update(pages)
        self._free.extend(reversed(pages))
