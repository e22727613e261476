"""Prompts of a step: begun ones go on, and waiting requests start in their turn."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from loraserve.engine.request import Request, RequestStatus
from loraserve.engine.scheduling.adapter_pinning import AdapterPinning
from loraserve.engine.scheduling.fair_queue import PROMPT_COST
from loraserve.engine.scheduling.preemption import Preemption
from loraserve.engine.scheduling.queue import SchedulingPass, WaitingQueue
from loraserve.engine.scheduling.quota import ResourceQuota
from loraserve.engine.scheduling.step import Step

if TYPE_CHECKING:
    from loraserve.memory.kv.block_pool import BlockPool

_ORDER = attrgetter("order")

MAX_DEFICIT_STEPS = 16
"""Cap, in full prefill steps, on the deficit of a tenant that already holds its share of slots.

Without it, a tenant with long prompts would get nothing after them until the few tokens a step of
the others added up to as much."""
OVER_SHARE_DIVISOR = 4
"""Part of the token budget up to which prompts of tenants over their share fill a step."""


class PromptAdmission:
    """Choose the prompts that a step computes, and start the waiting requests among them.

    Args:
        running: the scheduler's running requests, sorted by order: started ones join it.

    Attributes:
        base_prefix_tokens_hit: prompt tokens of activated adapters that the prefix cache had,
            before the adapter acts.
    """

    def __init__(
        self,
        running: list[Request],
        queue: WaitingQueue,
        quota: ResourceQuota,
        preemption: Preemption,
        pinning: AdapterPinning,
        kv: BlockPool,
        *,
        max_num_seqs: int,
        token_budget: int,
        clock: Callable[[], float],
    ) -> None:
        self.base_prefix_tokens_hit = 0
        self._running, self._queue, self._quota, self._preemption = running, queue, quota, preemption
        self._pinning, self._kv, self._max_num_seqs, self._clock = pinning, kv, max_num_seqs, clock
        self._fair_queue = queue.fair_queue
        self._max_deficit = MAX_DEFICIT_STEPS * token_budget * PROMPT_COST

    def schedule_exclusive(self, step: Step) -> None:
        """Start exclusive requests: they are alone in their step."""
        for request in list(self._queue.exclusive):
            if step.budget == 0 or len(self._running) >= self._max_num_seqs:
                return
            if self._pinning.pin_or_request(request, step):
                count = min(request.num_pending_tokens, step.budget)
                if not self._quota.reserve(request, count):
                    return
                self._start(request, count, step)

    def schedule_prompts(self, step: Step, prefilling: Sequence[Request]) -> None:
        """Give prompts the rest of the step's budget, in the order of a `SchedulingPass`.

        Args:
            prefilling: running requests that lack more than one token.
        """
        # nothing is admitted in a step that preempts for lack of blocks
        is_admitting = not step.is_out_of_blocks and (
            len(self._running) < step.num_slots or self._preemption.has_slot_to_give()
        )
        if not prefilling and not is_admitting:
            return
        visits = SchedulingPass(
            self._queue,
            prefilling,
            step.scheduled,
            now_s=step.now_s,
            is_admitting=is_admitting,
            is_admission_paused=self._pinning.is_admission_paused,
        )
        for request in visits:
            count = min(request.num_pending_tokens, self._room(request, step))
            if count == 0 and request.is_internal and step.budget:
                # A probe without budget must still pin an adapter that just arrived, or it is
                # evicted before the next step. Don't start a load: it would compete with prefill.
                if request.status is not RequestStatus.RUNNING and request.adapter_wait_started_s is not None:
                    self._pinning.pin_or_request(request, step)
                continue
            if count == 0:
                visits.skip_tenant()
                if step.budget == 0:
                    visits.stop()
            elif request.status is not RequestStatus.RUNNING:
                self._admit(request, step, visits)
            elif self._preemption.reserve_or_preempt(request, count, step):
                step.add(request, count)
            if step.is_out_of_blocks:
                visits.is_admitting = False

    def _room(self, request: Request, step: Step) -> int:
        """Return how many tokens of a prompt the step has room for."""
        room = step.room(request)
        if (
            request.is_internal
            or request.is_urgent
            or not self._fair_queue.is_over_share(self._fair_queue.tenant(request), step.now_s)
        ):
            return room
        return min(room, max(0, -(-step.token_budget // OVER_SHARE_DIVISOR) - step.num_prompt_tokens))

    def _admit(self, request: Request, step: Step, visits: SchedulingPass) -> None:
        """Start a waiting request, or else skip the requests that mustn't overtake it."""
        tenant = self._fair_queue.tenant(request)
        is_full = len(self._running) >= step.num_slots
        if is_full and not request.is_urgent and not self._quota.is_below_slot_quota(tenant):
            visits.skip_tenant(
                max_deficit=self._max_deficit if self._quota.has_reached_slot_quota(tenant) else math.inf
            )
            return
        if any(request is other for other in step.preempted):
            # not in this step: so the last token of a request preempted in flight is known when it
            # starts again
            return
        if self._pinning.hold_to_share(request):
            # in order: its smaller adapters must not starve this one
            visits.skip_tenant(max_deficit=0.0)
            return
        if not self._pinning.pin_or_request(request, step):
            visits.skip_adapter()
            return
        if is_full and not request.is_urgent and not self._preemption.can_preempt_for_slot(request):
            # tenants that come later have higher counters: there is no slot for them either
            visits.is_admitting = False
            return
        if request.can_use_prefix_cache:
            self._quota.attach_prefix(request)
        count = min(request.num_pending_tokens, self._room(request, step))
        if self._quota.exceeds_kv_share(request, count):
            self._quota.free_blocks(request, is_use=False)
            visits.skip_tenant(max_deficit=0.0)
            return
        # a preempted request waits for all the blocks that it needs: started with fewer, it would
        # be preempted again
        has_blocks = (not request.num_preemptions or self._quota.has_blocks_for_all(request)) and self._quota.reserve(
            request, count
        )
        while not has_blocks and self._quota.is_below_block_quota(request):
            if not self._preemption.preempt_for_blocks(step):
                break
            has_blocks = self._quota.reserve(request, count)
        if has_blocks and len(self._running) >= step.num_slots:
            self._preemption.preempt_for_slot(request, step)
        if not has_blocks or len(self._running) >= step.num_slots:
            # in order: a later, shorter request must not starve this one of blocks
            self._quota.free_blocks(request, is_use=False)
            visits.is_admitting = False
            return
        self._start(request, count, step)

    def _start(self, request: Request, count: int, step: Step) -> None:
        """Move a waiting request that has what it needs to the running ones, and into the step."""
        self._queue.remove(request)
        request.status = RequestStatus.RUNNING
        if self._quota.states is not None:
            self._quota.states.take(request)
        # scores and hidden states from before a preemption
        request.prompt_logprobs.clear()
        if request.pooler is not None:
            request.pooler.reset()
        # cached tokens cost nothing, even those that others computed while the request was
        # preempted
        request.num_charged_tokens = max(request.num_charged_tokens, request.num_computed_tokens)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self._clock()
            request.num_cached_tokens = request.num_computed_tokens
            if request.can_use_prefix_cache:
                self._kv.prefix_cache.note_lookup(request.num_tokens, request.num_cached_tokens)
            if request.adapter is not None:
                self.base_prefix_tokens_hit += min(request.num_cached_tokens, request.num_base_tokens)
        insort(self._running, request, key=_ORDER)
        self._fair_queue.tenant(request).num_running += 1
        step.add(request, count)
