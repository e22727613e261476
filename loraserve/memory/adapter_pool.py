"""Which adapters have a place on the device, within all of its limits. Pinned ones stay; the idle go, least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from loraserve.errors import InvariantViolation
from loraserve.memory.device import NOTHING, AdapterDevice, Footprint, Placed
from loraserve.memory.facts import AdapterFacts, Loaded
from loraserve.types import Digest
from loraserve_kernels.layout import PackedAdapter


@dataclass(slots=True)
class Resident:
    """One adapter with a place on the device.

    Attributes:
        has_landed: steps may use it. Until then it is on its way: what it takes is taken, and it can't be evicted.
    """

    placed: Placed
    facts: AdapterFacts
    last_used_s: float
    has_landed: bool
    num_pins: int = 0
    is_operator_pinned: bool = False

    @property
    def footprint(self) -> Footprint:
        return self.placed.footprint

    @property
    def is_idle(self) -> bool:
        return self.num_pins == 0 and not self.is_operator_pinned and self.has_landed


@dataclass(frozen=True, slots=True)
class Evicted:
    """An adapter that has left the device; `moved` goes to the host's memory, where that has no copy of its own."""

    digest: Digest
    last_used_s: float
    moved: Loaded | None


class Pin:
    """Keeps one adapter on the device until `release`, which is called exactly once."""

    __slots__ = ("_pool", "digest", "is_released")

    def __init__(self, pool: AdapterPool, digest: Digest) -> None:
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


class AdapterPool:
    """Adapters on the device or on their way there, by digest. Used by the step's thread alone.

    Invariants (`check`):
        used == sum of the residents' footprints, within the device's limits
        idle == sum of the footprints of residents that have landed and have no pin
        num_pins == sum of the residents' pins == pins given out and not released
        arriving == the residents that haven't landed; none of them is pinned by a request
    """

    def __init__(self, device: AdapterDevice) -> None:
        self.device = device
        self.used = NOTHING
        self.idle = NOTHING
        self.operator = NOTHING
        """What an operator has pinned: no amount of waiting frees it."""
        self.num_pins = 0
        self.num_evictions = 0
        self.num_violations = 0
        """Pins that were released twice."""
        # least recently used first
        self._residents: OrderedDict[Digest, Resident] = OrderedDict()
        # in the order in which they were placed
        self._arriving: dict[Digest, Resident] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def budget_bytes(self) -> int:
        return self.device.limits.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes in use; whole pages where the device has pages."""
        return self.used.num_bytes

    @property
    def free(self) -> Footprint:
        return self.device.limits - self.used

    def has_landed(self, digest: Digest) -> bool:
        """Whether steps may use the adapter now."""
        return digest in self._residents and digest not in self._arriving

    def handle(self, digest: Digest) -> PackedAdapter | int:
        """What a step names a resident adapter by.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._landed(digest).placed.handle

    def facts(self, digest: Digest) -> AdapterFacts:
        """What is known of a resident adapter beside its weights.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._landed(digest).facts

    def pin(self, digest: Digest, now_s: float) -> Pin:
        """A pin on a resident adapter, which stays until the pin's release.

        Raises:
            InvariantViolation: it isn't resident.
        """
        resident = self._landed(digest)
        with _Accounted(self, resident):
            resident.num_pins += 1
        self.num_pins += 1
        self.touch(digest, now_s)
        return Pin(self, digest)

    def set_operator_pin(self, digest: Digest, is_pinned: bool) -> None:
        """If the adapter has a place, it is never evicted from now on, or may be again."""
        resident = self._residents.get(digest)
        if resident is not None:
            with _Accounted(self, resident):
                resident.is_operator_pinned = is_pinned

    def touch(self, digest: Digest, now_s: float) -> None:
        """A resident adapter counts as the most recently used."""
        self._landed(digest).last_used_s = now_s
        self._residents.move_to_end(digest)

    def can_admit(self, footprint: Footprint, keep: Set[Digest] = frozenset()) -> bool:
        """Whether there is a place, or would be after evicting every idle adapter but those in `keep`."""
        room = self.free + self.idle
        for digest in keep:
            resident = self._residents.get(digest)
            if resident is not None and resident.is_idle:
                room -= resident.footprint
        if not footprint.fits(room):
            return False
        leaving = (r.placed for d, r in self._residents.items() if r.is_idle and d not in keep)
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
        adapter: Loaded,
        now_s: float,
        *,
        is_operator_pinned: bool = False,
        keep: Set[Digest] = frozenset(),
    ) -> list[Evicted]:
        """The adapter has its place, most recently used, and is on its way there or there already; returns who was evicted for it.

        Raises:
            InvariantViolation: it has a place already, or `can_admit` is false.
        """
        footprint = self.device.footprint_of(adapter.host)
        if digest in self._residents or not self.can_admit(footprint, keep):
            raise InvariantViolation(
                f"Adapter {digest} can't be admitted: it is resident already, or there is no room."
            )
        evicted: list[Evicted] = []
        for candidate, other in list(self._residents.items()):
            if footprint.fits(self.free) and self.device.can_lay_out(footprint):
                break
            if other.is_idle and candidate not in keep:
                evicted.append(self._evict(candidate))
        placed = self.device.place(adapter.host)
        resident = Resident(
            placed, adapter.facts, now_s, self.device.is_ready(placed), is_operator_pinned=is_operator_pinned
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
        return landed

    def items(self) -> Iterator[tuple[Digest, Resident]]:
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
        return problems + self.device.check([r.placed for r in residents])

    def _unpin(self, digest: Digest) -> None:
        resident = self._landed(digest)
        with _Accounted(self, resident):
            resident.num_pins -= 1
        self.num_pins -= 1
        self._residents.move_to_end(digest)

    def _evict(self, digest: Digest) -> Evicted:
        resident = self._residents.pop(digest)
        self._account(resident, -1)
        self.used -= resident.footprint
        self.num_evictions += 1
        moved = self.device.remove(resident.placed)
        return Evicted(digest, resident.last_used_s, None if moved is None else Loaded(moved, resident.facts))

    def _landed(self, digest: Digest) -> Resident:
        if not self.has_landed(digest):
            raise InvariantViolation(f"Adapter {digest} isn't resident.")
        return self._residents[digest]

    def _account(self, resident: Resident, sign: int) -> None:
        if resident.is_idle:
            self.idle = self.idle + resident.footprint if sign > 0 else self.idle - resident.footprint
        if resident.is_operator_pinned:
            self.operator = self.operator + resident.footprint if sign > 0 else self.operator - resident.footprint


class _Accounted:
    """Keeps the pool's sums right across a change of one resident's pins or state."""

    __slots__ = ("_pool", "_resident")

    def __init__(self, pool: AdapterPool, resident: Resident) -> None:
        self._pool = pool
        self._resident = resident

    def __enter__(self) -> None:
        self._pool._account(self._resident, -1)

    def __exit__(self, *_: object) -> None:
        self._pool._account(self._resident, 1)


def _sum(residents: Iterable[Resident]) -> Footprint:
    return sum((r.footprint for r in residents), NOTHING)
