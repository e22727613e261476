"""Packed adapters in host memory, within a budget of bytes.

They were evicted from the device, wait for it, or are copies of adapters there.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from cachetools import Cache

from loraserve.memory.loading.adapter_metadata import LoadedAdapter
from loraserve.types import Digest

MAX_LOOKED_AT = 64
"""Entries that `HostCache.has_room_for` looks at, at most."""


@dataclass(frozen=True, slots=True)
class HostEntry:
    """Adapter in host memory.

    Attributes:
        last_used_s: time of its last use, carried over from the device.
    """

    adapter: LoadedAdapter
    last_used_s: float


class _Evictable(Cache[Digest, HostEntry]):
    """A cache by bytes that evicts the least recently put first.

    Unlike in cachetools' LRU, a look at an entry is no use of it.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, getsizeof=_size)
        self.num_evictions = 0
        self._order: OrderedDict[Digest, None] = OrderedDict()

    def __setitem__(self, digest: Digest, entry: HostEntry) -> None:
        super().__setitem__(digest, entry)
        self._order[digest] = None
        self._order.move_to_end(digest)

    def __delitem__(self, digest: Digest) -> None:
        super().__delitem__(digest)
        del self._order[digest]

    def next_to_go(self) -> Iterator[Digest]:
        """Iterate over the adapters in the order of their eviction."""
        return iter(self._order)

    def popitem(self) -> tuple[Digest, HostEntry]:
        self.num_evictions += 1
        digest = next(iter(self._order))
        return digest, self.pop(digest)


class HostCache:
    """Adapters by digest; the least recently used is evicted first, a held one never.

    Invariants (`check`):
        num_bytes == bytes of the evictable + bytes of the held <= budget_bytes; no digest is in
        both.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._evictable = _Evictable(budget_bytes)
        self._held: dict[Digest, HostEntry] = {}
        self._held_bytes = 0

    def __contains__(self, digest: object) -> bool:
        return digest in self._held or digest in self._evictable

    def __len__(self) -> int:
        return len(self._held) + len(self._evictable)

    @property
    def num_bytes(self) -> int:
        return int(self._evictable.currsize) + self._held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of held adapters."""
        return self._held_bytes

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_evictions(self) -> int:
        return self._evictable.num_evictions

    def has_room_for(self, num_bytes: int, is_worth_less: Callable[[Digest], bool]) -> bool:
        """Check whether the bytes fit once evictable adapters that are worth less have gone.

        Only the next `MAX_LOOKED_AT` to be evicted count.
        """
        room = self.budget_bytes - self.num_bytes
        for digest in itertools.islice(self._evictable.next_to_go(), MAX_LOOKED_AT):
            if room >= num_bytes or not is_worth_less(digest):
                break
            room += self._evictable[digest].adapter.num_bytes
        return room >= num_bytes

    def can_put(self, num_bytes: int) -> bool:
        """Check whether the bytes fit once everything that isn't held has been evicted."""
        return self._held_bytes + num_bytes <= self.budget_bytes

    def put(self, digest: Digest, adapter: LoadedAdapter, last_used_s: float, *, hold: bool = False) -> bool:
        """Put the adapter in the cache, evicting the least recently used to make room.

        Return False, and change nothing, if it doesn't fit with what is held.
        """
        if not self.can_put(adapter.num_bytes):
            return False
        self.take(digest)
        while self.num_bytes + adapter.num_bytes > self.budget_bytes:
            self._evictable.popitem()
        entry = HostEntry(adapter, last_used_s)
        if hold:
            self._held[digest] = entry
            self._held_bytes += adapter.num_bytes
        else:
            self._evictable[digest] = entry
        return True

    def touch(self, digest: Digest, last_used_s: float) -> None:
        """Make the adapter the most recently used, at that time; no-op if absent."""
        where = self._held if digest in self._held else self._evictable
        if digest in where:
            where[digest] = HostEntry(where[digest].adapter, last_used_s)

    def take(self, digest: Digest) -> HostEntry | None:
        """Remove the adapter and return it; None if absent."""
        entry = self._held.pop(digest, None)
        if entry is not None:
            self._held_bytes -= entry.adapter.num_bytes
            return entry
        taken: HostEntry | None = self._evictable.pop(digest, None)
        return taken

    def hold(self, digest: Digest) -> None:
        """Keep the adapter from being evicted until `unhold`; no-op if absent."""
        entry: HostEntry | None = self._evictable.pop(digest, None)
        if entry is not None:
            self._held[digest] = entry
            self._held_bytes += entry.adapter.num_bytes

    def unhold(self, digest: Digest) -> None:
        """Make a held adapter evictable, as the most recently used; no-op if it isn't held."""
        entry = self._held.pop(digest, None)
        if entry is not None:
            self._held_bytes -= entry.adapter.num_bytes
            self._evictable[digest] = entry

    def items(self) -> Iterator[tuple[Digest, HostEntry]]:
        yield from self._held.items()
        yield from self._evictable.items()

    def find(self, digests: Iterable[Digest]) -> dict[Digest, HostEntry]:
        """Select those of the adapters that are here."""
        found = {}
        for digest in digests:
            where = self._held if digest in self._held else self._evictable
            if digest in where:
                found[digest] = where[digest]
        return found

    def check(self) -> list[str]:
        """List the broken invariants, in words; empty when all hold."""
        problems: list[str] = []
        total = sum(entry.adapter.num_bytes for _, entry in self.items())
        if total != self.num_bytes:
            problems.append(f"host cache: adapters of {total} bytes are counted as {self.num_bytes}")
        if self.num_bytes > self.budget_bytes:
            problems.append(f"host cache: {self.num_bytes} bytes are over the budget of {self.budget_bytes}")
        if self._held.keys() & set(self._evictable):
            problems.append("host cache: an adapter is held and evictable")
        return problems


def _size(entry: HostEntry) -> int:
    return entry.adapter.num_bytes
