"""Adapters on the device: their states, their pins, and which is evicted when memory runs out.

An adapter goes through four states::

    ARRIVING → PROTECTED → READY ⇄ DRAINING → evicted

Its memory is taken while the copy runs (ARRIVING). Once that has landed, the requests that wait for
it get one step to pin it (PROTECTED); after that it may be evicted whenever no pin holds it
(READY). When a large adapter has waited too long, residents are closed to new requests until their
pins are gone (DRAINING).
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, KeysView
from itertools import islice

from loraserve.errors import InvariantViolation
from loraserve.memory.arena import Owner
from loraserve.memory.devices.base import NOTHING, AdapterDevice, AdapterHandle, Footprint
from loraserve.memory.eviction import NEVER, CostEstimate, Popularity
from loraserve.memory.loading.adapter_metadata import AdapterMetadata, LoadedAdapter
from loraserve.memory.residency.resident_adapter import AdapterState, EvictedAdapter, ResidentAdapter
from loraserve.memory.timings import Timings
from loraserve.types import Digest, Histogram

MAX_VICTIM_CANDIDATES = 8
"""Number of the least recently used adapters of which the least valuable is evicted."""
ASSUMED_LOAD_S = 2e-9
"""Seconds to load a byte, until one is measured."""


class Pin:
    """A hold that keeps one adapter on the device until `release`, which is called exactly once."""

    __slots__ = ("_cache", "digest", "is_released")

    def __init__(self, cache: DeviceCache, digest: Digest) -> None:
        self.digest = digest
        self.is_released = False
        self._cache = cache

    def release(self) -> None:
        """Give the pin back.

        Raises:
            InvariantViolation: it was released before; the cache counts the violation, and nothing
                else changes.
        """
        if self.is_released:
            self._cache.num_violations += 1
            raise InvariantViolation(f"A pin on adapter {self.digest} was released twice.")
        self.is_released = True
        self._cache._unpin(self.digest)


class DeviceCache:
    """Adapters on the device or on their way there, by digest. Used by the step's thread alone.

    Invariants (`check`):
        - used == sum of the residents' footprints, within the device's limits
        - evictable == sum of the footprints of evictable residents
        - num_pins == sum of the residents' pins == pins given out and not released
        - The sets of arriving, protected and draining adapters are those whose state says so.
        - No arriving adapter is pinned.
        - bytes in use == pages that the device's arena client holds

    Attributes:
        popularity: uses of adapters, including those elsewhere.
        load_cost: seconds per byte to bring an adapter back: measured here from copies to a device
            with memory of its own; elsewhere the pager notes what loads take.
        on_evicted: called with each adapter that is evicted for anything but another adapter.
        used: memory of all residents.
        evictable: memory of residents that may be evicted now.
        operator: memory of residents that an operator has pinned: waiting doesn't free it.
        num_violations: pins that were released twice.
    """

    def __init__(self, device: AdapterDevice, clock: Callable[[], float] = time.monotonic) -> None:
        self.device = device
        self.popularity = Popularity()
        self.load_cost = CostEstimate(ASSUMED_LOAD_S)
        self.on_evicted: Callable[[EvictedAdapter], None] | None = None
        self.used = NOTHING
        self.evictable = NOTHING
        self.operator = NOTHING
        self.num_pins = 0
        self.num_evictions_for: Counter[Owner] = Counter()
        self.num_violations = 0
        self._clock = clock
        self._client = device.arena_client
        self._client.register(self)
        self._load_s = Timings()
        # evictions for the adapter that is being admitted
        self._evicted: list[EvictedAdapter] = []
        # least recently used first
        self._residents: OrderedDict[Digest, ResidentAdapter] = OrderedDict()
        # of the residents, those in these states, in the order in which they entered them
        self._arriving: dict[Digest, ResidentAdapter] = {}
        self._protected: dict[Digest, ResidentAdapter] = {}
        self._draining: dict[Digest, ResidentAdapter] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def num_evictions(self) -> int:
        return self.num_evictions_for.total()

    @property
    def budget_bytes(self) -> int:
        """Bytes that adapters may take at most."""
        return self.device.limits.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes in use; whole pages where the device has pages."""
        return self.used.num_bytes

    @property
    def free(self) -> Footprint:
        """Footprint that adapters may still take; the KV cache may have it now."""
        return self.device.limits - self.used

    @property
    def load_s(self) -> Histogram:
        """Seconds from when adapters got their memory until steps could use them."""
        return self._load_s.histogram

    @property
    def num_arriving(self) -> int:
        """Adapters on their way to the device."""
        return len(self._arriving)

    @property
    def max_residents(self) -> int:
        """Number of adapters of the residents' mean size that fit; 0 without a resident."""
        limits, used, count = self.device.limits, self.used, len(self._residents)
        sizes = (
            (limits.num_bytes, used.num_bytes),
            (limits.num_tiles, used.num_tiles),
            (limits.num_slots, used.num_slots),
        )
        return min((limit * count // size for limit, size in sizes if size), default=0)

    @property
    def draining(self) -> KeysView[Digest]:
        """Adapters that take no new requests, in the order in which they were chosen."""
        return self._draining.keys()

    @property
    def num_idle_pages(self) -> int:
        """Pages of evictable adapters."""
        return self.evictable.num_bytes // self._client.arena.page_num_bytes

    def victim_value(self) -> float | None:
        """Estimate the value of the adapter that is evicted first; None if there is none.

        The value is the seconds to bring it back × uses per second ÷ bytes.
        """
        victim = self._victim()
        return None if victim is None else victim[0]

    def evict_victim(self, cause: Owner, num_pages: int) -> None:
        """Evict the least valuable evictable adapter.

        Args:
            cause: the owner that needs its pages.
            num_pages: ignored: one adapter leaves, however many pages it has.

        Raises:
            InvariantViolation: no adapter is evictable.
        """
        victim = self._victim()
        if victim is None:
            raise InvariantViolation("No adapter is idle, and one must be evicted.")
        self._evict(victim[1], cause)

    def state(self, digest: Digest) -> AdapterState | None:
        """Look up the adapter's state; None if it has no memory on the device."""
        resident = self._residents.get(digest)
        return None if resident is None else resident.state

    def has_landed(self, digest: Digest) -> bool:
        """Check whether steps may use the adapter now."""
        return self.state(digest) not in (None, AdapterState.ARRIVING)

    def takes_requests(self, digest: Digest) -> bool:
        """Check whether a new request may pin the adapter now."""
        return self.state(digest) in (AdapterState.PROTECTED, AdapterState.READY)

    def handle(self, digest: Digest) -> AdapterHandle:
        """Look up the handle by which a step names a resident adapter.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._landed(digest).placed.handle

    def metadata(self, digest: Digest) -> AdapterMetadata:
        """Look up what is known of a resident adapter apart from its weights.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._landed(digest).metadata

    def pin(self, digest: Digest, now_s: float, *, is_use: bool = True) -> Pin:
        """Pin a resident adapter until the pin's release, and count a use of it.

        Args:
            is_use: False for a probe, which doesn't show how soon the adapter is needed again.

        Raises:
            InvariantViolation: it isn't resident.
        """
        resident = self._landed(digest)
        with _Accounted(self, resident):
            resident.num_pins += 1
        self.num_pins += 1
        if is_use:
            resident.last_used_s, resident.pending_use = now_s, NEVER
            self._residents.move_to_end(digest)
            self.popularity.use(digest, now_s)
        return Pin(self, digest)

    def set_operator_pin(self, digest: Digest, is_pinned: bool) -> None:
        """Keep a resident adapter until the operator's pin is taken back; no-op if absent."""
        resident = self._residents.get(digest)
        if resident is None:
            return
        with _Accounted(self, resident):
            resident.is_operator_pinned = is_pinned
            if is_pinned and self._draining.pop(digest, None) is not None:
                resident.state = AdapterState.READY

    def touch(self, digest: Digest, now_s: float) -> None:
        """Make a resident adapter the most recently used, with one use pending."""
        resident = self._landed(digest)
        resident.last_used_s, resident.pending_use = now_s, NEVER.used(now_s)
        self._residents.move_to_end(digest)

    def can_admit(self, footprint: Footprint) -> bool:
        """Check whether there is room, or would be after evicting idle adapters and KV blocks."""
        num_obtainable = self._client.num_obtainable * self._client.arena.page_num_bytes + self.evictable.num_bytes
        if not footprint.fits(self.free + self.evictable) or footprint.num_bytes > num_obtainable:
            return False
        return self.device.can_lay_out(footprint, (r.placed for r in self._residents.values() if r.is_evictable))

    def can_ever_admit(self, footprint: Footprint) -> bool:
        """Check whether there would be room if every adapter left that no operator has pinned."""
        if not footprint.fits(self.device.limits - self.operator):
            return False
        leaving = (r.placed for r in self._residents.values() if not r.is_operator_pinned)
        return self.device.can_lay_out(footprint, leaving)

    def admit(
        self,
        digest: Digest,
        adapter: LoadedAdapter,
        now_s: float,
        *,
        is_operator_pinned: bool = False,
        is_protected: bool = False,
    ) -> list[EvictedAdapter]:
        """Give the adapter memory, start its copy, and return what was evicted for it.

        Where adapters have all that they may take, other adapters go; otherwise whatever is worth
        least, the KV cache's blocks included.

        Args:
            is_protected: if no copy is needed, the adapter is protected until the next
                `take_landed`.

        Raises:
            InvariantViolation: it has memory already, or `can_admit` is false.
        """
        footprint = self.device.footprint_of(adapter.host)
        if digest in self._residents or not self.can_admit(footprint):
            raise InvariantViolation(
                f"Adapter {digest} can't be admitted: it is resident already, or there is no room."
            )
        started_s = self._clock()
        while not (footprint.fits(self.free) and self.device.can_lay_out(footprint)):
            self.evict_victim(Owner.ADAPTERS, 0)
        self._client.make_room(footprint.num_bytes // self._client.arena.page_num_bytes)
        evicted, self._evicted = self._evicted, []
        placed = self.device.place(adapter.host)
        state, states = AdapterState.READY, None
        if not self.device.is_ready(placed):
            state, states = AdapterState.ARRIVING, self._arriving
        elif is_protected:
            state, states = AdapterState.PROTECTED, self._protected
        resident = ResidentAdapter(
            placed,
            adapter.metadata,
            state,
            now_s,
            started_s,
            NEVER.used(now_s),
            is_operator_pinned=is_operator_pinned,
        )
        self._residents[digest] = resident
        self.used += footprint
        self._account(resident, 1)
        if states is not None:
            states[digest] = resident
        if resident.has_landed:
            self._load_s.add(self._clock() - started_s)
        return evicted

    def discard(self, digest: Digest) -> bool:
        """Free an adapter's memory without keeping a copy, if no pin holds it.

        Return whether it has no memory on the device now.
        """
        resident = self._residents.get(digest)
        if resident is not None and resident.is_evictable:
            self._remove(digest)
        return digest not in self._residents

    def take_landed(self) -> list[Digest]:
        """Take the adapters that landed since the last call, in the order of their admission.

        They are protected now; the protection of earlier ones ends.
        """
        self.protect(())
        landed = [digest for digest, resident in self._arriving.items() if self.device.is_ready(resident.placed)]
        for digest in landed:
            resident = self._arriving.pop(digest)
            resident.state = AdapterState.PROTECTED
            self._protected[digest] = resident
            elapsed_s = self._clock() - resident.started_s
            self._load_s.add(elapsed_s)
            if not self.device.is_host_memory:
                self.load_cost.note(resident.footprint.num_bytes, elapsed_s)
        return landed

    def protect(self, digests: Iterable[Digest]) -> None:
        """Protect only these ready adapters from eviction until the next `take_landed`."""
        for resident in self._protected.values():
            with _Accounted(self, resident):
                resident.state = AdapterState.READY
        self._protected = {d: self._residents[d] for d in digests if self.state(d) is AdapterState.READY}
        for resident in self._protected.values():
            with _Accounted(self, resident):
                resident.state = AdapterState.PROTECTED

    def drain_for(self, footprint: Footprint) -> None:
        """Close as many residents to new requests as make room for this footprint once idle.

        The least recently used are chosen first.
        """
        room = sum((resident.footprint for resident in self._draining.values()), self.free)
        for digest, resident in self._residents.items():
            leaving = (draining.placed for draining in self._draining.values())
            if footprint.fits(room) and self.device.can_lay_out(footprint, leaving):
                return
            # an arriving one may be drained as soon as it has landed
            if resident.is_operator_pinned or not self.takes_requests(digest):
                continue
            with _Accounted(self, resident):
                resident.state = AdapterState.DRAINING
            self._protected.pop(digest, None)
            self._draining[digest] = resident
            room += resident.footprint

    def end_drain(self) -> None:
        """Open all draining adapters to requests again."""
        for resident in self._draining.values():
            resident.state = AdapterState.READY
        self._draining.clear()

    def items(self) -> Iterator[tuple[Digest, ResidentAdapter]]:
        """Yield the residents, the least recently used first."""
        yield from self._residents.items()

    def find(self, digests: Iterable[Digest]) -> dict[Digest, ResidentAdapter]:
        """Select those of the adapters that are residents."""
        return {digest: self._residents[digest] for digest in digests if digest in self._residents}

    def check(self) -> list[str]:
        """List the broken invariants, in words; empty when all hold."""
        residents = self._residents.values()
        sums = (
            ("in use", self.used, _sum(residents)),
            ("evictable", self.evictable, _sum(r for r in residents if r.is_evictable)),
            ("pinned by operators", self.operator, _sum(r for r in residents if r.is_operator_pinned)),
        )
        problems = [
            f"adapter pool: {found} is {what}, and is counted as {kept}" for what, kept, found in sums if kept != found
        ]
        num_pins = sum(r.num_pins for r in residents)
        if num_pins != self.num_pins:
            problems.append(f"adapter pool: {num_pins} pins are counted as {self.num_pins}")
        if not self.used.fits(self.device.limits):
            problems.append(f"adapter pool: {self.used} exceeds the limits of {self.device.limits}")
        if any(r.num_pins < 0 for r in residents):
            problems.append("adapter pool: an adapter has a negative number of pins")
        for state, kept in (
            (AdapterState.ARRIVING, self._arriving),
            (AdapterState.PROTECTED, self._protected),
            (AdapterState.DRAINING, self._draining),
        ):
            if kept != {digest: r for digest, r in self._residents.items() if r.state is state}:
                problems.append(f"adapter pool: the adapters listed as {state.name} differ from those in that state")
        if any(r.num_pins for r in self._arriving.values()):
            problems.append("adapter pool: an adapter is pinned before its copy has ended")
        if self.used.num_bytes != self._client.num_allocated * self._client.arena.page_num_bytes:
            problems.append(
                f"adapter pool: {self.used.num_bytes} bytes are in use, of {self._client.num_allocated} pages"
            )
        return problems + self.device.check([r.placed for r in residents]) + self._client.arena.check()

    def _unpin(self, digest: Digest) -> None:
        resident = self._landed(digest)
        with _Accounted(self, resident):
            resident.num_pins -= 1
        self.num_pins -= 1
        self._residents.move_to_end(digest)

    def _victim(self) -> tuple[float, Digest] | None:
        """Find the least valuable of the longest unused evictable adapters, with its value."""
        now_s, seconds_per_byte = self._clock(), self.load_cost.seconds_per_unit
        evictable = ((digest, r) for digest, r in self._residents.items() if r.is_evictable)
        candidates = [
            (self._uses_per_second(digest, resident, now_s) * seconds_per_byte, digest)
            for digest, resident in islice(evictable, MAX_VICTIM_CANDIDATES)
        ]
        return min(candidates, key=lambda candidate: candidate[0], default=None)

    def _uses_per_second(self, digest: Digest, resident: ResidentAdapter, now_s: float) -> float:
        return self.popularity.per_second(digest, now_s) + resident.pending_use.per_second(now_s)

    def _remove(self, digest: Digest) -> EvictedAdapter:
        resident = self._residents.pop(digest)
        self._draining.pop(digest, None)
        self._account(resident, -1)
        self.used -= resident.footprint
        host = self.device.remove(resident.placed)
        moved = None if host is None else LoadedAdapter(host, resident.metadata)
        return EvictedAdapter(digest, resident.last_used_s, moved)

    def _evict(self, digest: Digest, cause: Owner) -> None:
        evicted = self._remove(digest)
        self.num_evictions_for[cause] += 1
        if cause is Owner.ADAPTERS:
            self._evicted.append(evicted)
        elif self.on_evicted is not None:
            self.on_evicted(evicted)

    def _landed(self, digest: Digest) -> ResidentAdapter:
        if not self.has_landed(digest):
            raise InvariantViolation(f"Adapter {digest} isn't resident.")
        return self._residents[digest]

    def _account(self, resident: ResidentAdapter, sign: int) -> None:
        if resident.is_evictable:
            self.evictable = self.evictable + resident.footprint if sign > 0 else self.evictable - resident.footprint
        if resident.is_operator_pinned:
            self.operator = self.operator + resident.footprint if sign > 0 else self.operator - resident.footprint


class _Accounted:
    """Keep the cache's sums right across a change of one resident's pins or state."""

    __slots__ = ("_cache", "_resident")

    def __init__(self, cache: DeviceCache, resident: ResidentAdapter) -> None:
        self._cache = cache
        self._resident = resident

    def __enter__(self) -> None:
        self._cache._account(self._resident, -1)

    def __exit__(self, *_: object) -> None:
        self._cache._account(self._resident, 1)


def _sum(residents: Iterable[ResidentAdapter]) -> Footprint:
    return sum((r.footprint for r in residents), NOTHING)
