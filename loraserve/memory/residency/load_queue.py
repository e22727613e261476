"""The line for the device: who waits for a place, whose turn it is, and from when on nobody passes the first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loraserve.memory.residency.tenant_round_robin import TenantRoundRobin
from loraserve.types import AdapterRef, Digest, TenantId

STALE_AFTER_S = 5.0
"""A waiting adapter that nobody has asked for in this time leaves the line."""
HEAD_OF_LINE_GRACE_S = 1.0
"""While the first in line has waited less than this for space, later ones that fit may pass it; then room is made for it."""


@dataclass(slots=True, eq=False)
class PendingAdapter:
    """One adapter's place in the line.

    Attributes:
        since_s: when it was asked for first.
        asked_s: when it was asked for last.
        tenants: who has asked for it.
    """

    ref: AdapterRef
    since_s: float
    asked_s: float
    tenants: set[TenantId] = field(default_factory=set)


class LoadQueue:
    """Adapters that wait for a place on the device, each for whoever has asked for it. One thread at a time.

    Tenants have turns at places, and at the loaders, which read what waits.

    Invariants (`check`):
        Each waits for somebody; a tenant has turns as long as something waits for it.
    """

    def __init__(self) -> None:
        # in the order they came
        self._waits: OrderedDict[Digest, PendingAdapter] = OrderedDict()
        self._load_order = TenantRoundRobin()
        self._placement_order = TenantRoundRobin()
        # who has waited long enough: nobody else passes
        self._reserved_for: Digest | None = None

    def __contains__(self, digest: object) -> bool:
        return digest in self._waits

    def __len__(self) -> int:
        return len(self._waits)

    def __iter__(self) -> Iterator[PendingAdapter]:
        """In the order they came."""
        return iter(self._waits.values())

    @property
    def reserved_for(self) -> Digest | None:
        """Who has waited for space long enough that nobody else passes; None while whoever fits may."""
        return self._reserved_for

    def join(self, ref: AdapterRef, now_s: float) -> PendingAdapter:
        """The adapter is in line, for its tenant too, and was asked for now."""
        wait = self._waits.get(ref.digest)
        if wait is None:
            wait = self._waits[ref.digest] = PendingAdapter(ref, now_s, now_s)
        if ref.tenant not in wait.tenants:
            wait.tenants.add(ref.tenant)
            self._load_order.join(ref.tenant)
            self._placement_order.join(ref.tenant)
        wait.asked_s = now_s
        return wait

    def leave(self, digest: Digest) -> None:
        """The adapter isn't in line, whether it was or not."""
        wait = self._waits.pop(digest, None)
        if wait is not None:
            self._load_order.leave(wait.tenants)
            self._placement_order.leave(wait.tenants)

    def leave_with_place(self, digest: Digest) -> None:
        """A waiting adapter has got its place: those who wanted it have had their turn."""
        self._placement_order.take(self._waits[digest].tenants)
        self.leave(digest)

    def stale(self, now_s: float) -> list[Digest]:
        """Those that nobody has asked for in `STALE_AFTER_S`."""
        return [digest for digest, wait in self._waits.items() if now_s - wait.asked_s > STALE_AFTER_S]

    def next_to_load(self, waits: Sequence[PendingAdapter], num_loading: Mapping[TenantId, int]) -> PendingAdapter:
        """Which to load first: tenants in turn, those with fewer loads in flight first, each one's in the order of its arrivals.

        Args:
            waits: at least one, in the order they came.
            num_loading: loads in flight for each tenant.
        """
        return self._load_order.order([(wait, wait.tenants) for wait in waits], num_loading)[0]

    def note_load(self, wait: PendingAdapter) -> None:
        """Its load begins: those who want it have had their turn at the loaders."""
        self._load_order.take(wait.tenants)

    def serve(
        self,
        is_ready: Callable[[Digest], bool],
        place: Callable[[Digest], bool],
        can_ever_place: Callable[[Digest], bool],
        now_s: float,
    ) -> None:
        """Give places, tenants in turn and each one's in the order of its arrivals.

        Whoever fits may pass the first in line until its patience is over: then the line is closed for that one, and stays so until it has its place or
        leaves.

        Args:
            is_ready: whether it waits for a place alone.
            place: give it a place, after which it has left the line; or else return False.
            can_ever_place: whether waiting may get it a place. Nobody is held up for whom it can't.
        """
        line = self._in_turn(is_ready)
        self._reserved_for = None
        is_first = True
        for digest in line:
            since_s = self._waits[digest].since_s
            if place(digest):
                continue
            # what operators have pinned no patience frees, and nobody is held up for it
            can_ever = can_ever_place(digest)
            if is_first and can_ever and now_s - since_s > HEAD_OF_LINE_GRACE_S:
                self._reserved_for = digest
                return
            is_first = is_first and not can_ever

    def check(self) -> list[str]:
        """Every broken invariant, in words; empty when all hold."""
        problems: list[str] = []
        if any(not wait.tenants for wait in self._waits.values()):
            problems.append("place line: an adapter waits for nobody")
        tenants = {tenant for wait in self._waits.values() for tenant in wait.tenants}
        if any(len(turns) != len(tenants) for turns in (self._load_order, self._placement_order)):
            problems.append("place line: tenants have turns without waiting")
        return problems

    def _in_turn(self, is_ready: Callable[[Digest], bool]) -> list[Digest]:
        """Those that are ready, in the order in which they get a place; whom the line is closed for stays its first."""
        line = self._placement_order.order([(d, wait.tenants) for d, wait in self._waits.items() if is_ready(d)])
        first = self._reserved_for
        if first is not None and first in line:
            line.remove(first)
            line.insert(0, first)
        return line
