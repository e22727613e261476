"""Which adapters the kernels can read now, within a budget of bytes. Pinned ones stay; the idle go, least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Set
from dataclasses import dataclass

from loraserve.errors import InvariantViolation
from loraserve.types import Digest
from loraserve_kernels.layout import PackedAdapter


@dataclass(slots=True)
class Resident:
    """One adapter on the device."""

    packed: PackedAdapter
    last_used_s: float
    num_pins: int = 0
    is_operator_pinned: bool = False

    @property
    def is_idle(self) -> bool:
        return self.num_pins == 0 and not self.is_operator_pinned


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
    """Adapters on the device, by digest. Used by the step's thread alone.

    Invariants (`check`):
        num_bytes == sum of the residents' bytes <= budget_bytes
        idle_bytes == sum of the bytes of residents without any pin
        num_pins == sum of the residents' pins == pins given out and not released
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self.idle_bytes = 0
        self.operator_bytes = 0
        """Bytes that an operator has pinned: no amount of waiting frees them."""
        self.num_pins = 0
        self.num_evictions = 0
        self.num_violations = 0
        """Pins that were released twice."""
        # least recently used first
        self._residents: OrderedDict[Digest, Resident] = OrderedDict()

    def __contains__(self, digest: object) -> bool:
        return digest in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    def packed(self, digest: Digest) -> PackedAdapter:
        """The weights of a resident adapter.

        Raises:
            InvariantViolation: it isn't resident.
        """
        return self._resident(digest).packed

    def pin(self, digest: Digest, now_s: float) -> Pin:
        """A pin on a resident adapter, which stays until the pin's release.

        Raises:
            InvariantViolation: it isn't resident.
        """
        resident = self._resident(digest)
        with _Accounted(self, resident):
            resident.num_pins += 1
        self.num_pins += 1
        self.touch(digest, now_s)
        return Pin(self, digest)

    def set_operator_pin(self, digest: Digest, is_pinned: bool) -> None:
        """If the adapter is resident, it is never evicted from now on, or may be again."""
        resident = self._residents.get(digest)
        if resident is not None:
            with _Accounted(self, resident):
                resident.is_operator_pinned = is_pinned

    def touch(self, digest: Digest, now_s: float) -> None:
        """A resident adapter counts as the most recently used."""
        self._resident(digest).last_used_s = now_s
        self._residents.move_to_end(digest)

    def can_admit(self, num_bytes: int, keep: Set[Digest] = frozenset()) -> bool:
        """Whether that many bytes are free, or would be after evicting every idle adapter but those in `keep`."""
        kept = sum(r.packed.num_bytes for d in keep if (r := self._residents.get(d)) is not None and r.is_idle)
        return self.num_bytes - self.idle_bytes + kept + num_bytes <= self.budget_bytes

    def admit(
        self,
        digest: Digest,
        packed: PackedAdapter,
        now_s: float,
        *,
        is_operator_pinned: bool = False,
        keep: Set[Digest] = frozenset(),
    ) -> list[tuple[Digest, Resident]]:
        """The adapter is resident, most recently used; returns the idle adapters that were evicted for it.

        Raises:
            InvariantViolation: it is resident already, or `can_admit` is false.
        """
        if digest in self._residents or not self.can_admit(packed.num_bytes, keep):
            raise InvariantViolation(
                f"Adapter {digest} can't be admitted: it is resident already, or there is no room."
            )
        evicted: list[tuple[Digest, Resident]] = []
        for candidate, resident in list(self._residents.items()):
            if self.num_bytes + packed.num_bytes <= self.budget_bytes:
                break
            if resident.is_idle and candidate not in keep:
                evicted.append((candidate, self._remove(candidate)))
        self.num_evictions += len(evicted)
        self._residents[digest] = Resident(packed, now_s, is_operator_pinned=is_operator_pinned)
        self.num_bytes += packed.num_bytes
        if is_operator_pinned:
            self.operator_bytes += packed.num_bytes
        else:
            self.idle_bytes += packed.num_bytes
        return evicted

    def items(self) -> Iterator[tuple[Digest, Resident]]:
        """Least recently used first."""
        yield from self._residents.items()

    def check(self) -> list[str]:
        """Every broken invariant, in words; empty when all hold."""
        residents = self._residents.values()
        counts = (
            ("bytes", self.num_bytes, sum(r.packed.num_bytes for r in residents)),
            ("idle bytes", self.idle_bytes, sum(r.packed.num_bytes for r in residents if r.is_idle)),
            (
                "operator's bytes",
                self.operator_bytes,
                sum(r.packed.num_bytes for r in residents if r.is_operator_pinned),
            ),
            ("pins", self.num_pins, sum(r.num_pins for r in residents)),
        )
        problems = [
            f"adapter pool: {found} {what} are counted as {kept}" for what, kept, found in counts if kept != found
        ]
        if self.num_bytes > self.budget_bytes:
            problems.append(f"adapter pool: {self.num_bytes} bytes are over the budget of {self.budget_bytes}")
        if any(r.num_pins < 0 for r in residents):
            problems.append("adapter pool: an adapter has fewer than no pins")
        return problems

    def _unpin(self, digest: Digest) -> None:
        resident = self._resident(digest)
        with _Accounted(self, resident):
            resident.num_pins -= 1
        self.num_pins -= 1
        self._residents.move_to_end(digest)

    def _remove(self, digest: Digest) -> Resident:
        resident = self._residents.pop(digest)
        self.num_bytes -= resident.packed.num_bytes
        self.idle_bytes -= resident.packed.num_bytes
        return resident

    def _resident(self, digest: Digest) -> Resident:
        resident = self._residents.get(digest)
        if resident is None:
            raise InvariantViolation(f"Adapter {digest} isn't resident.")
        return resident


class _Accounted:
    """Keeps the pool's sums right across a change of one resident's pins."""

    __slots__ = ("_pool", "_resident")

    def __init__(self, pool: AdapterPool, resident: Resident) -> None:
        self._pool = pool
        self._resident = resident

    def __enter__(self) -> None:
        self._add(-1)

    def __exit__(self, *_: object) -> None:
        self._add(1)

    def _add(self, sign: int) -> None:
        num_bytes = sign * self._resident.packed.num_bytes
        if self._resident.is_idle:
            self._pool.idle_bytes += num_bytes
        if self._resident.is_operator_pinned:
            self._pool.operator_bytes += num_bytes
