"""Which adapters have a place on the device, within all of its limits. Pinned ones stay; of the idle, those that are worth least go first."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import islice

from loraserve.errors import InvariantViolation
from loraserve.memory.arena import Owner
from loraserve.memory.devices.base import NOTHING, AdapterDevice, Footprint, PlacedAdapter
from loraserve.memory.eviction import NEVER, CostEstimate, Popularity, Uses
from loraserve.memory.loading.adapter_metadata import AdapterMetadata, LoadedAdapter
from loraserve.types import Digest
from loraserve_kernels.cpu.lora.layout import PackedAdapter

MAX_VICTIM_CANDIDATES = 8
"""Of the idle adapters, the least recently used ones among which the least valuable is looked for."""
ASSUMED_LOAD_S = 2e-9
"""A byte, until one is measured."""


@dataclass(slots=True)
class ResidentAdapter:
    """One adapter with a place on the device.

    Attributes:
        has_landed: steps may use it. Until then it is on its way: what it takes is taken, and it can't be evicted.
        awaited: one use, from when it got its place or was asked for until it's pinned: whoever did that is yet to come.
        placed_s: when it got its place, by the pool's clock.
    """

    placed: PlacedAdapter
    metadata: AdapterMetadata
    last_used_s: float
    has_landed: bool
    num_pins: int = 0
    is_operator_pinned: bool = False
    pending_use: Uses = NEVER
    placed_s: float = 0.0

    @property
    def footprint(self) -> Footprint:
        return self.placed.footprint

    @property
    def is_idle(self) -> bool:
        return self.num_pins == 0 and not self.is_operator_pinned and self.has_landed


@dataclass(frozen=True, slots=True)
class EvictedAdapter:
    """An adapter that has left the device; `moved` goes to the host's memory, where that has no copy of its own."""

    digest: Digest
    last_used_s: float
    moved: LoadedAdapter | None


class Pin:
    """Keeps one adapter on the device until `release`, which is called exactly once."""

    __slots__ = ("_pool", "digest", "is_released")

    def __init__(self, pool: DeviceCache, digest: Digest) -> None:
        self.digest = digest
        self.is_released = False
        self._pool = pool

    def release(self) -> None:
        """The adapter has one pin less.

        Raises:
            InvariantViolation: it was released before. Nothing has changed but the pool's count of violations.
        """
        if self.is_released:
            self._pool.num_violations += 1
            raise InvariantViolation(f"A pin on adapter {self.digest} was released twice.")
        self.is_released = True
        self._pool._unpin(self.digest)


class DeviceCache:
    """Adapters on the device or on their way there, by digest. Used by the step's thread alone.

    Invariants (`check`):
        used == sum of the residents' footprints, within the device's limits
        idle == sum of the footprints of residents that have landed and have no pin
        num_pins == sum of the residents' pins == pins given out and not released
        arriving == the residents that haven't landed; none of them is pinned by a request
        bytes in use == pages that the device's lease has rented

    Attributes:
        popularity: uses of adapters, of those elsewhere too.
        load_cost: seconds per byte to bring an adapter back: of a copy to a device with memory of its own, which is measured here; else of a load, which the loads' owner notes.
        fresh: adapters that are on the device for a request that hasn't pinned them yet: they aren't given up to others. The loads' owner says which.
        when_evicted: told of each that has to leave for somebody else than an adapter.
    """

    def __init__(self, device: AdapterDevice, clock: Callable[[], float] = time.monotonic) -> None:
        self.device = device
        self.popularity = Popularity()
        self.load_cost = CostEstimate(ASSUMED_LOAD_S)
        self.fresh: Set[Digest] = frozenset()
        self.on_evicted: Callable[[EvictedAdapter], None] | None = None
        self._clock = clock
        self._client = device.arena_client
        self._client.register(self)
        # while one is admitted: whoever isn't evicted for it, and who was
        self._keep: Set[Digest] = frozenset()
        self._evicted: list[EvictedAdapter] = []
        self.used = NOTHING
        self.idle = NOTHING
        self.operator = NOTHING
        """What an operator has pinned: no amount of waiting frees it."""
        self.num_pins = 0
        self.num_evictions_for: Counter[Owner] = Counter()
        self.num_violations = 0
        """Pins that were released twice."""
        # least recently used first
        self._residents: OrderedDict[Digest, ResidentAdapter] = OrderedDict()
        # in the order in which they were placed
        self._arriving: dict[Digest, ResidentAdapter] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def num_evictions(self) -> int:
        return self.num_evictions_for.total()

    @property
    def budget_bytes(self) -> int:
        """What adapters may take at most."""
        return self.device.limits.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes in use; whole pages where the device has pages."""
        return self.used.num_bytes

    @property
    def free(self) -> Footprint:
        """What adapters may take more, if it's free: the KV cache may have it."""
        return self.device.limits - self.used

    @property
    def num_idle_pages(self) -> int:
        """Pages of those that would be given up to others."""
        return self._idle_besides(self._kept(self._keep)).num_bytes // self._client.arena.page_num_bytes

    def victim_value(self) -> float | None:
        """What the least valuable that is idle is worth: seconds to bring it back × uses per second ÷ bytes. None if none would be given up."""
        offer = self._victim()
        return None if offer is None else offer[0]

    def evict_victim(self, cause: Owner, num_pages: int) -> None:
        """The least valuable that is idle has left.

        Args:
            cause: for whom.
            num_wanted: no matter: one leaves, whatever its pages.

        Raises:
            InvariantViolation: none would be given up.
        """
        offer = self._victim()
        if offer is None:
            raise InvariantViolation("No adapter is idle, and one was to be evicted.")
        self._evict(offer[1], cause)

    def has_landed(self, digest: Digest) -> bool:
        """Whether steps may use the adapter now."""
        return digest in self._residents and digest not in self._arriving

    def handle(self, digest: Digest) -> PackedAdapter | int:
        """What a step names a resident adapter by.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._landed(digest).placed.handle

    def metadata(self, digest: Digest) -> AdapterMetadata:
        """What is known of a resident adapter beside its weights.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._landed(digest).metadata

    def pin(self, digest: Digest, now_s: float, *, is_use: bool = True) -> Pin:
        """A pin on a resident adapter, which stays until the pin's release; it has been used once more.

        Args:
            is_use: False of one that nobody asked for: it says nothing of how soon the adapter is wanted again.

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
        """If the adapter has a place, it is never evicted from now on, or may be again."""
        resident = self._residents.get(digest)
        if resident is not None:
            with _Accounted(self, resident):
                resident.is_operator_pinned = is_pinned

    def touch(self, digest: Digest, now_s: float) -> None:
        """A resident adapter was asked for: it counts as the most recently used, and awaits a use."""
        resident = self._landed(digest)
        resident.last_used_s, resident.pending_use = now_s, NEVER.used(now_s)
        self._residents.move_to_end(digest)

    def can_admit(self, footprint: Footprint, keep: Set[Digest] = frozenset()) -> bool:
        """Whether there is a place, or would be after evicting every idle adapter but those in `keep`, and what is idle of the KV cache."""
        kept = self._kept(keep)
        idle = self._idle_besides(kept)
        num_obtainable = self._client.num_obtainable * self._client.arena.page_num_bytes + idle.num_bytes
        if not footprint.fits(self.free + idle) or footprint.num_bytes > num_obtainable:
            return False
        leaving = (r.placed for d, r in self._residents.items() if r.is_idle and d not in kept)
        return self.device.can_lay_out(footprint, leaving)

    def can_ever_admit(self, footprint: Footprint) -> bool:
        """Whether there would be a place if every adapter left that no operator has pinned."""
        if not footprint.fits(self.device.limits - self.operator):
            return False
        leaving = (r.placed for r in self._residents.values() if not r.is_operator_pinned)
        return self.device.can_lay_out(footprint, leaving)

    def can_admit_without(self, footprint: Footprint, leaving: Set[Digest], room: Footprint) -> bool:
        """Whether there would be a place once those have left; `room` is what is free then."""
        return footprint.fits(room) and self.device.can_lay_out(
            footprint, (r.placed for d in leaving if (r := self._residents.get(d)) is not None)
        )

    def admit(
        self,
        digest: Digest,
        adapter: LoadedAdapter,
        now_s: float,
        *,
        is_operator_pinned: bool = False,
        keep: Set[Digest] = frozenset(),
    ) -> list[EvictedAdapter]:
        """The adapter has its place, most recently used, and is on its way there or there already; returns which adapters were evicted for it.

        Where adapters have all that they may take, other adapters go; else whatever is worth least, of the KV cache too.

        Raises:
            InvariantViolation: it has a place already, or `can_admit` is false.
        """
        footprint = self.device.footprint_of(adapter.host)
        if digest in self._residents or not self.can_admit(footprint, keep):
            raise InvariantViolation(
                f"Adapter {digest} can't be admitted: it is resident already, or there is no room."
            )
        self._keep = keep
        while not (footprint.fits(self.free) and self.device.can_lay_out(footprint)):
            self.evict_victim(Owner.ADAPTERS, 0)
        self._client.make_room(footprint.num_bytes // self._client.arena.page_num_bytes)
        evicted, self._evicted, self._keep = self._evicted, [], frozenset()
        placed, placed_s = self.device.place(adapter.host), self._clock()
        resident = ResidentAdapter(
            placed,
            adapter.metadata,
            now_s,
            self.device.is_ready(placed),
            is_operator_pinned=is_operator_pinned,
            pending_use=NEVER.used(now_s),
            placed_s=placed_s,
        )
        self._residents[digest] = resident
        self.used += footprint
        self._account(resident, 1)
        if not resident.has_landed:
            self._arriving[digest] = resident
        return evicted

    def take_landed(self) -> list[Digest]:
        """Those that have arrived since the last call, in the order in which they were placed: from now on steps may use them."""
        landed = [digest for digest, resident in self._arriving.items() if self.device.is_ready(resident.placed)]
        for digest in landed:
            resident = self._arriving.pop(digest)
            with _Accounted(self, resident):
                resident.has_landed = True
            if not self.device.is_host_memory:
                self.load_cost.note(resident.footprint.num_bytes, self._clock() - resident.placed_s)
        return landed

    def items(self) -> Iterator[tuple[Digest, ResidentAdapter]]:
        """Least recently used first."""
        yield from self._residents.items()

    def check(self) -> list[str]:
        """Every broken invariant, in words; empty when all hold."""
        residents = self._residents.values()
        sums = (
            ("in use", self.used, _sum(residents)),
            ("idle", self.idle, _sum(r for r in residents if r.is_idle)),
            ("pinned by operators", self.operator, _sum(r for r in residents if r.is_operator_pinned)),
        )
        problems = [
            f"adapter pool: {found} is {what}, and is counted as {kept}" for what, kept, found in sums if kept != found
        ]
        num_pins = sum(r.num_pins for r in residents)
        if num_pins != self.num_pins:
            problems.append(f"adapter pool: {num_pins} pins are counted as {self.num_pins}")
        if not self.used.fits(self.device.limits):
            problems.append(f"adapter pool: {self.used} is over the limits of {self.device.limits}")
        if any(r.num_pins < 0 for r in residents):
            problems.append("adapter pool: an adapter has fewer than no pins")
        if self._arriving != {digest: r for digest, r in self._residents.items() if not r.has_landed}:
            problems.append("adapter pool: those that arrive aren't those that haven't landed")
        if any(r.num_pins for r in self._arriving.values()):
            problems.append("adapter pool: an adapter is pinned that hasn't landed")
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
        """The least valuable of the idle adapters that were used longest ago, with its value; the longest ago of equals."""
        now_s, pace, kept = self._clock(), self.load_cost.seconds_per_unit, self._kept(self._keep)
        idle = ((d, r) for d, r in self._residents.items() if r.is_idle and d not in kept)
        offers = [
            ((self.popularity.per_second(digest, now_s) + resident.pending_use.per_second(now_s)) * pace, digest)
            for digest, resident in islice(idle, MAX_VICTIM_CANDIDATES)
        ]
        return min(offers, key=lambda offer: offer[0], default=None)

    def _kept(self, keep: Set[Digest]) -> Set[Digest]:
        """Those and the fresh ones."""
        return keep | self.fresh if keep and self.fresh else keep or self.fresh

    def _idle_besides(self, keep: Set[Digest]) -> Footprint:
        idle = self.idle
        for digest in keep:
            resident = self._residents.get(digest)
            if resident is not None and resident.is_idle:
                idle -= resident.footprint
        return idle

    def _evict(self, digest: Digest, cause: Owner) -> None:
        resident = self._residents.pop(digest)
        self._account(resident, -1)
        self.used -= resident.footprint
        self.num_evictions_for[cause] += 1
        moved = self.device.remove(resident.placed)
        evicted = EvictedAdapter(
            digest, resident.last_used_s, None if moved is None else LoadedAdapter(moved, resident.metadata)
        )
        if cause is Owner.ADAPTERS:
            self._evicted.append(evicted)
        elif self.on_evicted is not None:
            self.on_evicted(evicted)

    def _landed(self, digest: Digest) -> ResidentAdapter:
        if not self.has_landed(digest):
            raise InvariantViolation(f"Adapter {digest} isn't resident.")
        return self._residents[digest]

    def _account(self, resident: ResidentAdapter, sign: int) -> None:
        if resident.is_idle:
            self.idle = self.idle + resident.footprint if sign > 0 else self.idle - resident.footprint
        if resident.is_operator_pinned:
            self.operator = self.operator + resident.footprint if sign > 0 else self.operator - resident.footprint


class _Accounted:
    """Keeps the pool's sums right across a change of one resident's pins or state."""

    __slots__ = ("_pool", "_resident")

    def __init__(self, pool: DeviceCache, resident: ResidentAdapter) -> None:
        self._pool = pool
        self._resident = resident

    def __enter__(self) -> None:
        self._pool._account(self._resident, -1)

    def __exit__(self, *_: object) -> None:
        self._pool._account(self._resident, 1)


def _sum(residents: Iterable[ResidentAdapter]) -> Footprint:
    return sum((r.footprint for r in residents), NOTHING)
