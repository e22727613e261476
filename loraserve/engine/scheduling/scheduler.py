"""Choose which requests the next step computes, and how much of each; apply a step's results.

There is no prefill and no decode here: a request has tokens that aren't computed yet, and a step
computes some of them. What waits, and in which order, is in `queue`, `fair_queue` and `blocked`.

The order: an exclusive probe alone, or every decoding request; then prompts by
``(is_urgent first, tenant's virtual counter, its running requests ÷ weight, begun first, priority,
adapter's virtual counter, age)`` until the token budget is spent. What can't start (no slot, no
block, adapter not resident) is skipped and delays nothing behind it; see docs/fairness.md.

`schedule` may be called again before `update` has the step's results: steps are computed in the
order in which they were scheduled. So a request's KV blocks may be given to others while a step in
flight still reads and writes them: the others' step comes after it, and it writes only to blocks
that the request held when it was scheduled, never to a published one. An adapter's pages are
written by copies beside the steps. The pager, not a pin, makes these wait for the last step that
was launched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from loraserve.engine.request import Request, RequestStatus
from loraserve.engine.scheduled import ScheduledRequest, StepResult
from loraserve.engine.scheduling.adapter_pinning import AdapterPinning
from loraserve.engine.scheduling.fair_queue import OUTPUT_COST, PROMPT_COST, FairQueue
from loraserve.engine.scheduling.preemption import Preemption
from loraserve.engine.scheduling.prompt_admission import PromptAdmission
from loraserve.engine.scheduling.prompt_share import PromptShare
from loraserve.engine.scheduling.queue import WaitingQueue
from loraserve.engine.scheduling.quota import ResourceQuota
from loraserve.engine.scheduling.results import ResultProcessor, failed_output, numerics_error
from loraserve.engine.scheduling.step import ProbeBudget, Step
from loraserve.engine.scheduling.waits import AdapterPrefetch, AdapterSource, AdapterWaits, RequestDeadlines
from loraserve.errors import InvariantViolation, LoraserveError, timeout_error
from loraserve.limits import LIMITS
from loraserve.memory.timings import Timings
from loraserve.types import TIMEOUT, Digest, FinishReason, RequestId, TokenOutput

if TYPE_CHECKING:
    from loraserve.engine.speculation.proposal import Proposal
    from loraserve.memory.kv.block_pool import BlockPool

logger = logging.getLogger(__name__)

MAX_CREDIT_STEPS = 4
"""Cap, in full prefill steps, on the credit of a tenant that comes back with nothing waiting."""


class Proposer(Protocol):
    """Calls that the scheduler makes to speculation: what is proposed, and what came of it."""

    def propose(self, scheduled: Sequence[ScheduledRequest], budget: int) -> list[Proposal]: ...
    def note_made(self, proposal: Proposal) -> None: ...
    def note_result(self, entry: ScheduledRequest, num_accepted: int) -> None: ...
    def end(self, request: Request) -> None: ...


class Scheduler:
    """Hold every live request, in `_queue` or in `_running`; each ends through `_end` alone."""

    def __init__(
        self,
        kv: BlockPool,
        adapters: AdapterSource,
        *,
        max_num_seqs: int,
        token_budget: int,
        eos_token_ids: Sequence[int],
        max_inter_token_s: float | None = None,
        adapter_deadline_s: float = LIMITS.adapter_load_deadline_s,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[Request], None] = lambda request: None,
        speculation: Proposer | None = None,
        has_recurrent_state: bool = False,
    ) -> None:
        """Begin without requests.

        Args:
            max_inter_token_s: see `PromptShare`.
            on_end: told of each request that has ended, however it did.
            speculation: proposes tokens that steps verify; None: none are proposed.
            has_recurrent_state: whether running requests need slots for recurrent states.
        """
        self.num_timeouts = 0
        """Requests that ended because their own timeout was over."""
        self._kv = kv
        self._adapters = adapters
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._clock = clock
        self._on_end = on_end
        self._speculation = speculation
        self._requests: dict[RequestId, Request] = {}
        self._running: list[Request] = []  # sorted by order
        self._fair_queue = FairQueue(MAX_CREDIT_STEPS * token_budget * PROMPT_COST)
        self._queue = WaitingQueue(self._fair_queue)
        self._quota = ResourceQuota(kv, self._fair_queue, max_num_seqs, has_recurrent_state=has_recurrent_state)
        self._preemption = Preemption(self._running, self._queue, self._fair_queue, self._quota)
        self._waits = AdapterWaits(
            adapters,
            self._queue,
            kv.prefix_cache.prefill_cost,
            max_load_cost=token_budget * PROMPT_COST,
            deadline_s=adapter_deadline_s,
            clock=clock,
        )
        self._pinning = AdapterPinning(adapters, self._queue, self._waits, self._quota, self._fail_outside)
        self._admission = PromptAdmission(
            self._running,
            self._queue,
            self._quota,
            self._preemption,
            self._pinning,
            kv,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            clock=clock,
        )
        self.prompt_share = PromptShare(token_budget, max_inter_token_s)
        self._deadlines = RequestDeadlines()
        self._prefetch = AdapterPrefetch(adapters, self._queue)
        self._probe_budget = ProbeBudget(token_budget)
        self._outputs = ResultProcessor(kv, self._quota.states, frozenset(eos_token_ids), clock)
        self._failed: list[TokenOutput] = []
        # since the last step: adapters with a changed state, and whether a tenant's request was
        # added
        self._changed: set[Digest] = set()
        self._has_arrivals = False

    @property
    def num_preemptions(self) -> int:
        """Requests that were preempted for others."""
        return self._preemption.num_preemptions

    @property
    def num_fair_preemptions(self) -> int:
        """Preemptions for a tenant below its quota, or of one beyond its KV share."""
        return self._preemption.num_fair

    @property
    def base_prefix_tokens_hit(self) -> int:
        """Prompt tokens of activated adapters in the prefix cache, before the adapter acts."""
        return self._admission.base_prefix_tokens_hit

    @property
    def adapter_wait_s(self) -> Timings:
        """Seconds that each request waited for its adapter, whether it came or not."""
        return self._pinning.wait_s

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_serving(self) -> bool:
        """Return whether a tenant's request takes part in steps."""
        return any(not request.is_internal for request in self._running)

    @property
    def adapters_served(self) -> set[Digest | None]:
        """Adapters of the tenants' running requests; None stands for the base."""
        return {
            None if request.adapter is None else request.adapter.digest
            for request in self._running
            if not request.is_internal
        }

    @property
    def num_waiting_for_adapter(self) -> int:
        return len(self._waits)

    @property
    def num_tenants(self) -> int:
        """Tenants with a live request."""
        return self._fair_queue.num_tenants

    @property
    def has_computable(self) -> bool:
        """Return whether a step can compute any running request."""
        return any(not request.is_held for request in self._running)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def requests(self) -> Collection[Request]:
        """Return every live request."""
        return self._requests.values()

    def add(self, request: Request) -> None:
        """Let a new request wait. Output that it comes with isn't charged again."""
        self._requests[request.request_id] = request
        self._has_arrivals |= not request.is_internal
        self._queue.open(request)
        if request.num_output_tokens:
            request.num_charged_tokens = request.num_tokens
        if request.timeout_s is not None:
            self._deadlines.add(request, request.arrival_s + request.timeout_s, num_live=len(self._requests))
        self._queue.add(request)

    def abort(self, request_id: RequestId) -> bool:
        """End a request wherever it is; False if it is unknown or over already."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request)
        return True

    def fail(self, request: Request, error: LoraserveError) -> TokenOutput:
        """End a request with an error and return its last output."""
        self._end(request)
        return failed_output(request, error)

    def take_failed(self) -> list[TokenOutput]:
        """Return, once, the last outputs of requests that ended outside of a step."""
        failed, self._failed = self._failed, []
        return failed

    # schedule

    def note_changed(self, adapters: Collection[Digest]) -> None:
        """Note the adapters that the pager's `poll` returned: their state has changed."""
        self._changed.update(adapters)

    def schedule(self) -> list[ScheduledRequest]:
        """Choose the next step's requests within the token budget, and reserve their KV blocks.

        1. Running requests that are one token short.
        2. Prompts, begun or waiting, in the order of a `SchedulingPass`: next is always the tenant
           with the least counter. Tenants over their share fill only a part of the step, so that a
           request that comes meanwhile doesn't wait for a long step. Beside streams, all prompts
           have as much of it as `prompt_share` says, so that tokens keep coming.
        3. Without any prompt: proposed tokens of the running requests, where that pays.

        A tenant below its quota of slots or KV blocks takes what it needs from one above, which
        preempts a request of the latter (at most `MAX_FAIR_PREEMPTIONS` times each); a slot only
        from a tenant with no lower counter.

        A request without a resident adapter is skipped and delays no other. Requests with a
        resident adapter thus go first, until the adapter has arrived: then the request is the next
        to start, unless another has a lower counter or a better priority. The pager's queue and the
        deadline bound how long an adapter takes.
        """
        now = self._clock()
        self._end_overdue(now)
        self._pinning.fail_overdue(now)
        self._fair_queue.age(now)
        self._queue.blocked.unpark_ready(self._changed, now, is_admission_paused=self._adapters.is_admission_paused)
        # a waiting request starts because it was just added, or its adapter just arrived
        may_start = self._has_arrivals or self._is_any_awaited(self._changed)
        self._has_arrivals = False
        self._changed.clear()
        num_internal_rows = self._probe_budget.rows_of_next_step(self._running, may_start=may_start)
        step = Step(self._fair_queue, now, self._token_budget, num_internal_rows)
        if self._queue.exclusive:
            self._admission.schedule_exclusive(step)
            if step.scheduled:
                return step.scheduled
        prefilling = self._schedule_decodes(step)
        if prefilling or (self._queue.has_shared and not step.is_out_of_blocks):
            context = max((request.num_computed_tokens for request in prefilling), default=0)
            with step.limited_to(self.prompt_share.tokens(step.num_serving_rows, context)):
                self._admission.schedule_prompts(step, prefilling)
        if self._speculation is not None and not step.num_prompt_tokens and not step.is_out_of_blocks:
            self._schedule_proposals(step, self._speculation)
        self._waits.renew()
        self._prefetch.update()
        return step.scheduled

    def _is_any_awaited(self, adapters: Collection[Digest]) -> bool:
        """Return whether a tenant's request waits for one of the adapters."""
        return bool(adapters) and any(
            not request.is_internal and request.adapter is not None and request.adapter.digest in adapters
            for request in self._queue
        )

    def _schedule_decodes(self, step: Step) -> list[Request]:
        """Schedule running requests that are one token short; return those that lack more.

        A request with its last token in flight has no part in this step, and leaves its slot to
        others.
        """
        prefilling, size = [], self._kv.block_size
        pending = [request.num_pending_tokens for request in self._running]
        step.num_slots = self._max_num_seqs + pending.count(0)
        for request, num_pending in zip(list(self._running), pending, strict=True):
            if request.status is not RequestStatus.RUNNING or request.is_held:
                # preempted for an earlier one in this very loop, or without its mask
                continue
            if num_pending > 1:
                prefilling.append(request)
            # in most steps the last block has room
            elif (
                num_pending
                and step.room(request)
                and (
                    request.num_computed_tokens < len(request.blocks) * size
                    or self._preemption.reserve_or_preempt(request, 1, step)
                )
            ):
                step.add(request, 1)
        return prefilling

    def _schedule_proposals(self, step: Step, speculation: Proposer) -> None:
        """Add proposed tokens to the step, without taking a block that other requests may need."""
        for proposal in speculation.propose(step.scheduled, step.budget):
            request, token_ids = proposal.request, proposal.token_ids
            has_blocks = self._kv.num_available > len(self._running) and not self._quota.exceeds_kv_share(
                request, len(token_ids)
            )
            if not has_blocks or not self._quota.reserve(request, len(token_ids)):
                token_ids = token_ids[: len(request.blocks) * self._kv.block_size - request.num_computed_tokens]
            if token_ids:
                step.propose(proposal.number, token_ids)
                speculation.note_made(proposal)

    # endings outside of a step

    def _end_overdue(self, now: float) -> None:
        """End the requests that are over their own timeout, with the output that there is."""
        for request in self._deadlines.pop_overdue(now):
            self.num_timeouts += 1
            if request.num_output_tokens:
                self._end(request)
                output = TokenOutput(
                    request_id=request.request_id, finish_reason=FinishReason.LENGTH, stop_reason=TIMEOUT
                )
            else:
                output = self.fail(request, timeout_error(request.timeout_s or 0.0))
            self._failed.append(output)

    def _fail_outside(self, request: Request, error: LoraserveError) -> None:
        """End a request with an error of which no step's results tell."""
        self._failed.append(self.fail(request, error))

    # update

    def update(self, scheduled: Sequence[ScheduledRequest], results: Sequence[StepResult]) -> list[TokenOutput]:
        """Give every request of a step its results; return the clients' outputs."""
        outputs = []
        for entry, result in zip(scheduled, results, strict=True):
            output = self._advance(entry, result)
            if output is not None:
                outputs.append(output)
        return outputs

    def forget(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Undo a step that was not computed; its requests keep their new blocks."""
        for entry in scheduled:
            entry.request.num_in_flight_tokens -= entry.num_sampled_tokens
            if entry.is_current:
                entry.request.num_computed_tokens = entry.start

    def _advance(self, entry: ScheduledRequest, result: StepResult) -> TokenOutput | None:
        request = entry.request
        if result.is_deferred:
            self.forget([entry])
            return None
        request.num_in_flight_tokens -= entry.num_sampled_tokens
        if request.status is RequestStatus.FINISHED:
            # ended while the step was in flight: nothing of this is sent, counted or published
            return None
        if not result.is_finite:
            return self.fail(request, numerics_error(request))
        if result.error is not None:
            return self.fail(request, result.error)
        try:
            output = self._outputs.process(entry, result)
        except LoraserveError as error:
            return self.fail(request, error)
        if entry.proposed and output is not None:
            self._settle_proposals(entry, max(0, len(output.token_ids) - 1))
        if output is not None and output.finish_reason is not None:
            self._end(request)
        return output

    def _settle_proposals(self, entry: ScheduledRequest, num_accepted: int) -> None:
        """Charge proposed tokens: accepted ones as output, which they are, others as rows.

        A tenant's texts that are guessed badly thus take nothing of other tenants' share.
        """
        request = entry.request
        request.num_charged_tokens = max(request.num_charged_tokens, request.num_tokens)
        cost = num_accepted * OUTPUT_COST + (len(entry.proposed) - num_accepted) * PROMPT_COST
        self._fair_queue.flow(request).charge(cost)
        if self._speculation is not None:
            self._speculation.note_result(entry, num_accepted)

    # check

    def check(self, in_flight: Sequence[ScheduledRequest] = ()) -> list[str]:
        """Return every broken invariant, in words.

        Args:
            in_flight: entries of steps that were scheduled and not updated yet.
        """
        problems = [
            *self._quota.check(self._requests.values(), self._running, in_flight),
            *self._queue.check(),
        ]
        if len(self._queue) + len(self._running) != len(self._requests):
            problems.append("a request is neither waiting nor running")
        return problems

    def _end(self, request: Request) -> None:
        """End a request: every ending passes here, and gives back blocks, pin and slot once."""
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._fair_queue.tenant(request).num_running -= 1
        else:
            self._queue.remove(request)
        request.status = RequestStatus.FINISHED
        self._on_end(request)
        if self._speculation is not None:
            self._speculation.end(request)
        self._quota.free_blocks(request)
        self._waits.end(request)
        self._fair_queue.close(request)
        if request.pin is None and request.adapter_wait_s > 0 and not request.is_internal:
            self._pinning.wait_s.add(request.adapter_wait_s)
        pin, request.pin = request.pin, None
        if pin is not None:
            try:
                pin.release()
            except InvariantViolation:
                # our own bug, which the pool counts; it must not end all requests
                logger.exception("request %s doesn't hold the pin that it should", request.request_id)
