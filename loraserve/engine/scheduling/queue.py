"""Waiting requests, and the order in which one step visits them and the prompts that have begun."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import TypeGuard

from loraserve.engine.request import Request, RequestStatus
from loraserve.engine.scheduled import ScheduledRequest
from loraserve.engine.scheduling.blocked import ParkedFlowIndex, ParkedFlows
from loraserve.engine.scheduling.fair_queue import PROMPT_COST, AdapterFlow, FairQueue, TenantFlow, flow_key
from loraserve.engine.scheduling.lazy_heap import NEVER, Key

_ORDER = attrgetter("order")


class WaitingQueue:
    """Waiting requests: exclusive ones, urgent ones, and the others in the fair queue.

    Attributes:
        exclusive: requests that need a step of their own, the oldest first.
        urgent: requests that run before every tenant's, sorted by `Request.order`.
        version: changes whenever a request is added or removed.
    """

    def __init__(self, fair_queue: FairQueue) -> None:
        self.fair_queue = fair_queue
        self.blocked = ParkedFlowIndex()
        self.exclusive: list[Request] = []
        self.urgent: list[Request] = []
        self.version = 0
        self._num_fair_queued = 0

    def __len__(self) -> int:
        return len(self.exclusive) + len(self.urgent) + self._num_fair_queued

    def __iter__(self) -> Iterator[Request]:
        """Return all of them, in no particular order."""
        yield from self.exclusive
        yield from self.urgent
        for flow in self.fair_queue.flows:
            yield from flow.waiting

    @property
    def has_shared(self) -> bool:
        """Return whether a request waits that may share a step."""
        return bool(self.urgent or self._num_fair_queued)

    def open(self, request: Request) -> None:
        """Count a new request in its flow, which may start again."""
        self.blocked.unpark(self.fair_queue.open(request))

    def add(self, request: Request) -> None:
        """Let a request wait."""
        self.version += 1
        if request.is_exclusive:
            self.exclusive.append(request)
        elif request.is_urgent:
            insort(self.urgent, request, key=_ORDER)
        else:
            self.fair_queue.add(request)
            self._num_fair_queued += 1

    def remove(self, request: Request) -> None:
        """Take out a waiting request.

        Raises:
            ValueError: it doesn't wait.
        """
        self.version += 1
        if request.is_exclusive:
            self.exclusive.remove(request)
        elif request.is_urgent:
            self.urgent.remove(request)
        else:
            self.blocked.unpark(self.fair_queue.flow(request))
            self.fair_queue.remove(request)
            self._num_fair_queued -= 1

    def peek(self, count: int) -> list[Request]:
        """Return the requests that are expected to run next, except exclusive ones."""
        found = self.urgent[:count]
        cursors: list[TenantCursor] = []
        heap: list[tuple[float, int]] = []
        tenants = self.fair_queue.waiting_tenants
        while len(found) < count and (tenant := tenants.pop()) is not None:
            heapq.heappush(heap, (tenant.virtual_counter, len(cursors)))
            cursors.append(TenantCursor(tenant, self.blocked.parked(tenant), visits_parked=True))
            following = tenants.peek()
            while heap and len(found) < count and (following is None or heap[0][0] <= following.virtual_counter):
                counter, number = heap[0]
                request = cursors[number].next(is_admitting=True)
                if request is None:
                    heapq.heappop(heap)
                    continue
                found.append(request)
                expected = request.num_pending_tokens * PROMPT_COST / cursors[number].tenant.weight
                heapq.heapreplace(heap, (counter + expected, number))
        for cursor in cursors:
            cursor.close()
            tenants.push(cursor.tenant)
        return found

    def check(self) -> list[str]:
        """Return every broken invariant, in words."""
        return [*self.fair_queue.check(), *self.blocked.check(self.fair_queue.flows)]


class SchedulingPass:
    """Visit the requests that a step could compute, the tenant with the least counter first.

    What a visited request is charged counts at once: its tenant's next one comes after those of
    tenants that have a lower counter by then. Of a tenant's requests, begun prompts come first,
    then waiting requests: by priority, then by their adapters' counters, then by age. Urgent
    requests come before all of them.

    A flow of which no request could be computed (its adapter isn't resident, or its tenant is at
    its KV quota) is advanced to the counter of the flow served instead: time spent blocked earns no
    credit. A flow that found no room keeps its deficit, within bounds (`skip_tenant`).

    Attributes:
        is_admitting: whether waiting requests are visited. May be set to False during the pass.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        prefilling: Sequence[Request],
        scheduled: list[ScheduledRequest],
        *,
        now_s: float,
        is_admitting: bool = True,
        is_admission_paused: bool = False,
    ) -> None:
        """Begin an admission's visits of the waiting queue.

        Args:
            prefilling: running requests with more than one token to compute.
            scheduled: the step so far: a visited request was served if it is the last of these.
            is_admission_paused: whether waiting requests may start only with a pin, or if they wait
                for their adapter.
        """
        self.is_admitting = is_admitting
        self._queue = queue
        self._prefilling = prefilling
        self._scheduled = scheduled
        self._now_s = now_s
        self._is_admission_paused = is_admission_paused
        self._current: TenantCursor | None = None
        self._is_skipped = False
        self._max_deficit = math.inf
        self._is_stopped = False

    def stop(self) -> None:
        """Visit no request any more."""
        self._is_stopped = True

    def skip_tenant(self, *, max_deficit: float = math.inf) -> None:
        """Visit no more requests of this tenant.

        Args:
            max_deficit: cap on the weighted service that the tenant may carry over; 0 if a limit of
                its own stopped it.
        """
        self._is_skipped, self._max_deficit = True, max_deficit

    def skip_adapter(self) -> None:
        """Skip the tenant's other requests for this one's adapter, which isn't resident."""
        if self._current is not None:
            self._current.skip_adapter()

    def __iter__(self) -> Iterator[Request]:
        urgent = [request for request in self._prefilling if request.is_urgent]
        for request in chain(urgent, list(self._queue.urgent) if self.is_admitting else ()):
            if not self._is_stopped and (self.is_admitting or request.status is RequestStatus.RUNNING):
                yield request
        cursors: list[TenantCursor] = []
        try:
            yield from self._visit_tenants(cursors)
        finally:
            for cursor in cursors:
                cursor.close()
                cursor.park_blocked(self._queue.blocked, self._now_s)
                self._queue.fair_queue.waiting_tenants.push(cursor.tenant)

    def _visit_tenants(self, cursors: list[TenantCursor]) -> Iterator[Request]:
        """Put the cursors of visited tenants into ``cursors``.

        Tenants with begun prompts are in the heap from the start, others once none in it has a
        lower counter.
        """
        waiting, heap = self._queue.fair_queue.waiting_tenants, self._begin_with_prefilling(cursors)
        skipped: list[tuple[TenantFlow, float]] = []
        visited = {id(cursor.tenant) for cursor in cursors}
        while not self._is_stopped:
            following = waiting.peek() if self.is_admitting else None
            if following is not None and (not heap or (following.rank or NEVER) < heap[0][0]):
                waiting.pop()
                if id(following) not in visited:
                    visited.add(id(following))
                    cursors.append(self._cursor(following))
                    heapq.heappush(heap, (cursors[-1].key, len(cursors) - 1))
                continue
            if not heap:
                return
            cursor = cursors[heap[0][1]]
            candidate = cursor.next(self.is_admitting)
            if candidate is None:
                heapq.heappop(heap)
                if self.is_admitting and not cursor.was_served:
                    skipped.append((cursor.tenant, 0.0))
                continue
            counter = cursor.tenant.virtual_counter
            self._is_skipped, self._current = False, cursor
            yield candidate
            if self._scheduled and self._scheduled[-1].request is candidate:
                cursor.note_served()
                for tenant, max_deficit in skipped:
                    tenant.virtual_counter = max(tenant.virtual_counter, counter - max_deficit)
                skipped.clear()
                heapq.heapreplace(heap, (cursor.key, heap[0][1]))
            elif self._is_skipped:
                heapq.heappop(heap)
                if self._max_deficit < math.inf and not cursor.was_served:
                    skipped.append((cursor.tenant, self._max_deficit))

    def _begin_with_prefilling(self, cursors: list[TenantCursor]) -> list[tuple[Key, int]]:
        by_tenant: dict[TenantFlow, TenantCursor] = {}
        for request in self._prefilling:
            if not request.is_urgent:
                tenant = self._queue.fair_queue.tenant(request)
                if tenant not in by_tenant:
                    by_tenant[tenant] = self._cursor(tenant)
                by_tenant[tenant].prefilling.append(request)
        cursors += by_tenant.values()
        heap = [(cursor.key, number) for number, cursor in enumerate(cursors)]
        heapq.heapify(heap)
        return heap

    def _cursor(self, tenant: TenantFlow) -> TenantCursor:
        return TenantCursor(tenant, self._queue.blocked.parked(tenant), is_admission_paused=self._is_admission_paused)


class TenantCursor:
    """Visit one tenant's requests in order; `close` puts its flows back into the tenant's heap.

    Args:
        parked: the tenant's parked flows.
        visits_parked: whether their requests are visited too, though none can start.
    """

    def __init__(
        self, tenant: TenantFlow, parked: ParkedFlows, *, visits_parked: bool = False, is_admission_paused: bool = False
    ) -> None:
        self.tenant = tenant
        self.prefilling: list[Request] = []
        self.was_served = False
        self._num_prefilling_visited = 0
        self._cursors: list[AdapterCursor] = []
        self._has_cursor: set[int] = set()
        # (priority of its next request, counter, that request's age), number of the cursor, the
        # request or None where the pass skips the flow
        self._heap: list[tuple[Key, int, Request | None]] = []
        self._current: AdapterCursor | None = None
        self._counter = 0.0
        self._skipped: list[AdapterFlow] = []
        self._is_admission_paused = is_admission_paused
        self._parked = parked
        self._parked_flows = iter(parked if visits_parked else ())
        self._next_parked = next(self._parked_flows, None)
        parked.begin_pass()

    @property
    def key(self) -> Key:
        """Place of the tenant among others: by counter, then by weighted running requests."""
        return self.tenant.virtual_counter, self.tenant.num_running / self.tenant.weight, 0

    def next(self, is_admitting: bool) -> Request | None:
        """Return the next request; None if none is left."""
        while self._num_prefilling_visited < len(self.prefilling):
            request = self.prefilling[self._num_prefilling_visited]
            self._num_prefilling_visited += 1
            # the step may have preempted it
            if request.status is RequestStatus.RUNNING:
                return request
        if not is_admitting:
            return None
        if self._current is not None:
            # it was visited last
            self._push(heapq.heappop(self._heap)[1])
            self._current = None
        while True:
            while (following := self._take_flow()) is not None:
                if id(following) not in self._has_cursor:
                    self._has_cursor.add(id(following))
                    self._cursors.append(AdapterCursor(following, is_admission_paused=self._is_admission_paused))
                    self._push(len(self._cursors) - 1)
            if not self._heap:
                return None
            _, number, candidate = self._heap[0]
            if candidate is not None:
                break
            heapq.heappop(self._heap)
            self._skip(self._cursors[number].flow)
        self._current = self._cursors[number]
        self._current.visited = candidate
        self._counter = self._current.flow.virtual_counter
        return candidate

    def _take_flow(self) -> AdapterFlow | None:
        """Return the tenant's next flow, if it comes before those that are being visited."""
        following, rank = self.tenant.waiting_flows.peek(), NEVER
        if following is not None:
            rank = following.rank or NEVER
        parked = self._next_parked
        is_parked = parked is not None and (flow_key(parked) or NEVER) < rank
        if is_parked and parked is not None:
            following, rank = parked, flow_key(parked) or NEVER
        if following is None or (self._heap and not rank < self._heap[0][0]):
            return None
        if is_parked:
            self._next_parked = next(self._parked_flows, None)
        else:
            self.tenant.waiting_flows.pop()
        return following

    def skip_adapter(self) -> None:
        """Skip the requests for the adapter of the last one, which isn't resident."""
        if self._current is not None:
            self._current.skip()

    def note_served(self) -> None:
        """Advance the skipped flows to the counter that the last request's flow had."""
        self.was_served = True
        if self._current is None:
            return
        for flow in self._skipped:
            if flow is not self._current.flow:
                flow.virtual_counter = max(flow.virtual_counter, self._counter)
        self._skipped.clear()
        self._parked.advance(self._heap[0][0], self._counter)

    def close(self) -> None:
        """Put the visited flows back into the tenant's heap."""
        for cursor in self._cursors:
            self.tenant.waiting_flows.push(cursor.flow)

    def park_blocked(self, blocked: ParkedFlowIndex, now_s: float) -> None:
        """Park the visited flows that can start no request."""
        for cursor in self._cursors:
            cursor.park_if_blocked(blocked, now_s)

    def _push(self, number: int) -> None:
        cursor = self._cursors[number]
        request = next(cursor.others, None)
        flow, at = cursor.flow, request or cursor.unvisited_last
        if at is None:
            self._skip(flow)
        else:
            heapq.heappush(self._heap, ((at.priority, flow.virtual_counter, at.sequence_number), number, request))

    def _skip(self, flow: AdapterFlow) -> None:
        if flow.waiting:
            self._skipped.append(flow)


class AdapterCursor:
    """Visit the waiting requests of one flow, as it was when the first of them was visited.

    Attributes:
        others: requests still to be visited.
        visited: the request visited last.
    """

    def __init__(self, flow: AdapterFlow, *, is_admission_paused: bool) -> None:
        self.flow = flow
        self.visited: Request | None = None
        self._is_admission_paused = is_admission_paused
        self._is_blocked = False
        self._unblocked = tuple(flow.unblocked)
        waiting = tuple(flow.waiting)
        self._last: Request | None = waiting[-1] if waiting else None
        self.others: Iterator[Request] = iter(waiting)
        if is_admission_paused:
            can_start = flow.num_pinned or flow.num_blocked
            self.others = (
                (r for r in waiting if r.pin or r.adapter_wait_started_s is not None) if can_start else iter(())
            )

    @property
    def unvisited_last(self) -> Request | None:
        """Request at which the pass skips the flow, if it comes that far."""
        return None if self.visited is self._last else self._last

    def skip(self) -> None:
        """Skip the other requests that already know that the adapter isn't resident."""
        flow, visited = self.flow, self.visited
        if visited is not None and visited.status is RequestStatus.FINISHED:
            # the adapter's load failed: the others fail in this step too, not after as many loads
            return
        if flow.num_blocked == len(flow.waiting):
            self.others, self._last = iter(()), None
            self._is_blocked = self._is_blocked or _waits_for_adapter(visited)
        elif _waits_for_adapter(visited) and not self._is_blocked:
            self._is_blocked = True
            rest = () if self._is_admission_paused and not flow.num_pinned else self._unblocked
            self.others = (r for r in rest if r.order > visited.order and (r.pin or not self._is_admission_paused))

    def park_if_blocked(self, blocked: ParkedFlowIndex, now_s: float) -> None:
        """Park the flow if none of its requests can start."""
        flow = self.flow
        if not flow.waiting or flow.num_live > len(flow.waiting) or flow.num_pinned:
            return
        if self._is_blocked and not flow.unblocked:
            blocked.park(flow, flow.waiting[0], now_s)
        elif self._is_admission_paused and (self._is_blocked or not flow.num_blocked):
            blocked.park(flow, flow.waiting[-1], now_s, awaits_admission=True)


def _waits_for_adapter(request: Request | None) -> TypeGuard[Request]:
    return (
        request is not None and request.status is RequestStatus.WAITING and request.adapter_wait_started_s is not None
    )
