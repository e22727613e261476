"""The queue of adapters that wait for the device: which is loaded and placed next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loraserve.memory.residency.tenant_round_robin import TenantRoundRobin
from loraserve.types import AdapterRef, Digest, TenantId

STALE_AFTER_S = 5.0
"""Seconds without a request after which a waiting adapter leaves the queue."""
HEAD_OF_LINE_GRACE_S = 1.0
"""Seconds that later adapters may pass the first; then the device is reserved for it."""


@dataclass(slots=True, eq=False)
class PendingAdapter:
    """Adapter in the queue.

    Attributes:
        since_s: time of the first request for it.
        asked_s: time of the last request for it.
        tenants: tenants that have requested it.
        is_second_load: whether a load failed whose bytes the last request doesn't name.
    """

    ref: AdapterRef
    since_s: float
    asked_s: float
    tenants: set[TenantId] = field(default_factory=set)
    is_second_load: bool = False


class LoadQueue:
    """Adapters that wait for the device, each on behalf of the tenants that requested it.

    One thread at a time.

    Tenants take turns, at the loaders and at room on the device.

    Invariants (`check`):
        Each adapter has a tenant; a tenant takes turns for as long as it waits for an adapter.
    """

    def __init__(self) -> None:
        # in the order of their first requests
        self._pending: OrderedDict[Digest, PendingAdapter] = OrderedDict()
        self._load_order = TenantRoundRobin()
        self._placement_order = TenantRoundRobin()
        self._reserved_for: Digest | None = None

    def __contains__(self, digest: object) -> bool:
        return digest in self._pending

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingAdapter]:
        """Yield the adapters in the order of their first requests."""
        return iter(self._pending.values())

    @property
    def reserved_for(self) -> Digest | None:
        """The adapter that has waited for room so long that none may pass it; None if any may."""
        return self._reserved_for

    def join(self, ref: AdapterRef, now_s: float) -> PendingAdapter:
        """Add the adapter, on behalf of its tenant too, and note that it was requested now."""
        pending = self._pending.get(ref.digest)
        if pending is None:
            pending = self._pending[ref.digest] = PendingAdapter(ref, now_s, now_s)
        if pending.ref.is_ephemeral:
            # the memory of an earlier request may be freed, that of the last one isn't
            pending.ref = ref
        if ref.tenant not in pending.tenants:
            pending.tenants.add(ref.tenant)
            self._load_order.join(ref.tenant)
            self._placement_order.join(ref.tenant)
        pending.asked_s = now_s
        return pending

    def may_load_again(self, failed: AdapterRef) -> bool:
        """Decide, once for an adapter, whether a request names bytes other than a failed load's.

        The memory of an ephemeral version may be freed before it is read. That is no failure for
        requests that hold the same bytes elsewhere.
        """
        pending = self._pending.get(failed.digest)
        if pending is None or pending.is_second_load or not failed.is_ephemeral:
            return False
        pending.is_second_load = True
        return (pending.ref.memory, pending.ref.parts) != (failed.memory, failed.parts)

    def leave(self, digest: Digest) -> None:
        """Remove the adapter; no-op if absent."""
        pending = self._pending.pop(digest, None)
        if pending is not None:
            self._load_order.leave(pending.tenants)
            self._placement_order.leave(pending.tenants)

    def leave_placed(self, digest: Digest) -> None:
        """Remove an adapter that has got room; that was its tenants' turn."""
        self._placement_order.take(self._pending[digest].tenants)
        self.leave(digest)

    def stale(self, now_s: float) -> list[Digest]:
        """List the adapters that no request has asked for in `STALE_AFTER_S`."""
        return [digest for digest, pending in self._pending.items() if now_s - pending.asked_s > STALE_AFTER_S]

    def next_to_load(self, candidates: Sequence[PendingAdapter], num_loading: Mapping[TenantId, int]) -> PendingAdapter:
        """Choose the adapter to load first.

        Tenants take turns, those with fewer loads in flight first, each one's adapters in queue
        order.

        Args:
            candidates: at least one, in queue order.
            num_loading: loads in flight of each tenant.
        """
        return self._load_order.order([(pending, pending.tenants) for pending in candidates], num_loading)[0]

    def note_load(self, pending: PendingAdapter) -> None:
        """Note that its load begins: that was its tenants' turn at the loaders."""
        self._load_order.take(pending.tenants)

    def serve(
        self,
        is_placeable: Callable[[Digest], bool],
        place: Callable[[Digest], bool],
        can_ever_place: Callable[[Digest], bool],
        now_s: float,
    ) -> None:
        """Place adapters, tenants in turn and each one's adapters in queue order.

        An adapter that fits may pass the first until that has waited `HEAD_OF_LINE_GRACE_S`: then
        the device is reserved for the first, until it is placed or leaves.

        Args:
            is_placeable: whether an adapter lacks room alone.
            place: places an adapter, which has left the queue then, or returns False.
            can_ever_place: whether waiting may get an adapter room; for one that it can't, none is
                held up.
        """
        order = self._order(is_placeable)
        self._reserved_for = None
        is_first = True
        for digest in order:
            since_s = self._pending[digest].since_s
            if place(digest):
                continue
            # waiting doesn't free what operators have pinned
            can_ever = can_ever_place(digest)
            if is_first and can_ever and now_s - since_s > HEAD_OF_LINE_GRACE_S:
                self._reserved_for = digest
                return
            is_first = is_first and not can_ever

    def check(self) -> list[str]:
        """List the broken invariants, in words; empty when all hold."""
        problems: list[str] = []
        if any(not pending.tenants for pending in self._pending.values()):
            problems.append("load queue: an adapter is queued for no tenant")
        tenants = {tenant for pending in self._pending.values() for tenant in pending.tenants}
        if any(len(order) != len(tenants) for order in (self._load_order, self._placement_order)):
            problems.append("load queue: tenants are listed that wait for no adapter")
        return problems

    def _order(self, is_placeable: Callable[[Digest], bool]) -> list[Digest]:
        """Sort the placeable adapters into the order in which they get room.

        The one that the device is reserved for stays first.
        """
        order = self._placement_order.order(
            [(d, pending.tenants) for d, pending in self._pending.items() if is_placeable(d)]
        )
        first = self._reserved_for
        if first is not None and first in order:
            order.remove(first)
            order.insert(0, first)
        return order
