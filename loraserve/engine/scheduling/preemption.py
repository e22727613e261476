"""Preempt running requests, which start over later, for others that need KV blocks or slots."""

from __future__ import annotations

import math
from collections.abc import Callable

from loraserve.engine.request import Request, RequestStatus
from loraserve.engine.scheduling.fair_queue import FairQueue, TenantFlow
from loraserve.engine.scheduling.queue import WaitingQueue
from loraserve.engine.scheduling.quota import ResourceQuota
from loraserve.engine.scheduling.step import Step

MAX_FAIR_PREEMPTIONS = 3
"""Preemptions for fairness of one request, at most, so that it ends."""


class Preemption:
    """Choose a victim, and put it back into the waiting queue.

    Args:
        running: the scheduler's running requests, sorted by order: victims leave it.

    Attributes:
        num_preemptions: victims so far.
        num_fair: those of them that made room for a tenant below its quota, or for their own tenant
            beyond its KV share.
    """

    def __init__(
        self, running: list[Request], queue: WaitingQueue, fair_queue: FairQueue, quota: ResourceQuota
    ) -> None:
        self.num_preemptions = 0
        self.num_fair = 0
        self._running, self._queue, self._fair_queue, self._quota = running, queue, fair_queue, quota

    def reserve_or_preempt(self, request: Request, count: int, step: Step) -> bool:
        """Give a running request the blocks that it needs, if need be those of others.

        Return False if the request is preempted itself.
        """
        while True:
            if self._quota.exceeds_kv_share(request, count):
                scheduled = {id(entry.request) for entry in step.scheduled}
                tenant = self._fair_queue.tenant(request)
                own = [
                    other
                    for other in self._running
                    if self._fair_queue.tenant(other) is tenant and id(other) not in scheduled
                ]
                victim = own[-1]
                self.num_fair += 1
            elif self._quota.reserve(request, count):
                return True
            else:
                step.is_out_of_blocks = True
                victim = self._choose_victim(step)
            self.preempt(victim, step)
            if victim is request:
                return False

    def preempt_for_blocks(self, step: Step) -> bool:
        """Preempt a request of a tenant over its block quota; False if there is none."""
        return self._preempt_fairly(self._find_victim(self._quota.is_over_block_quota), step)

    def preempt_for_slot(self, request: Request, step: Step) -> bool:
        """Preempt a request to give its slot to this one; False if there is none."""
        return self._preempt_fairly(self._find_slot(request), step)

    def can_preempt_for_slot(self, request: Request) -> bool:
        """Return whether `preempt_for_slot` would find a victim."""
        return self._find_slot(request) is not None

    def has_slot_to_give(self) -> bool:
        """Return whether one of several tenants is over its slot quota."""
        if self._fair_queue.num_tenants < 2:
            return False
        return any(map(self._quota.is_over_slot_quota, self._fair_queue.tenants(self._running)))

    def _preempt_fairly(self, victim: Request | None, step: Step) -> bool:
        if victim is None:
            return False
        self.num_fair += 1
        self.preempt(victim, step)
        return True

    def _find_slot(self, request: Request) -> Request | None:
        """Return a victim of a tenant over its slot quota that has no lower counter than this one.

        A slot taken from a tenant with a lower counter would set the counters further apart, each
        time again: a quota of slots is a whole number, and one at least, which may be far more than
        what is due to a tenant by its weight.
        """
        least = -math.inf if request.is_urgent else self._fair_queue.tenant(request).virtual_counter
        return self._find_victim(
            lambda tenant: self._quota.is_over_slot_quota(tenant) and tenant.virtual_counter >= least
        )

    def _find_victim(self, is_over_quota: Callable[[TenantFlow], bool]) -> Request | None:
        """Return the running request that loses least, of those of tenants over their quota.

        It may be in this step already. The youngest of those that decode loses least, since what
        has been answered is in the prefix cache.
        """
        over = set(filter(is_over_quota, self._fair_queue.tenants(self._running)))
        if not over:
            return None
        candidates = [
            request
            for request in reversed(self._running)
            if self._fair_queue.tenant(request) in over
            and not request.is_urgent
            and not request.is_internal
            and request.num_preemptions < MAX_FAIR_PREEMPTIONS
            and request.num_pending_tokens > 0
        ]
        return min(candidates, key=lambda request: request.num_pending_tokens > 1, default=None)

    def _choose_victim(self, step: Step) -> Request:
        """Return the running request that loses least and isn't in this step yet.

        Requests of tenants over their block quota come first, unless they were preempted too often.
        Then one that only waits for its last token in flight, else the one of the lowest priority,
        then the youngest.
        """
        scheduled = {id(entry.request) for entry in step.scheduled}
        candidates = [other for other in reversed(self._running) if id(other) not in scheduled]
        if self._fair_queue.num_tenants > 1:
            over = [
                other
                for other in candidates
                if other.num_preemptions < MAX_FAIR_PREEMPTIONS
                and not other.is_urgent
                and self._quota.is_over_block_quota(self._fair_queue.tenant(other))
            ]
            candidates = over or candidates
        return min(candidates, key=lambda other: other.num_pending_tokens > 0)

    def preempt(self, request: Request, step: Step) -> None:
        """Free the request's blocks and let it wait; it keeps its tokens, its pin and its order."""
        step.remove(request)
        if request.num_pending_tokens == 0:
            # its slot was free already
            step.num_slots -= 1
        self._running.remove(request)
        self._fair_queue.tenant(request).num_running -= 1
        self._quota.free_blocks(request, is_use=False)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        step.preempted.append(request)
        self._queue.add(request)
