"""Which requests take part in the next step, and with how many tokens; and what a step's outcome does to them.

There is no prefill and no decode here: a request has tokens that aren't computed yet, and a step computes some of them.

`schedule` may be called again before `update` has the step's results: steps are computed in the order in which they were scheduled.
That is what makes it safe to give a request's KV blocks to others while a step in flight still reads and writes them: the others'
step comes after it, and it writes only to blocks that the request held when it was scheduled, never to one that was published.
An adapter's pages are written by copies beside the steps, so whoever places an adapter where another was waits for the last step
that was launched; the pin isn't kept for that.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter

from loraserve.engine.activation import find_activation
from loraserve.engine.request import Request, Status
from loraserve.engine.scheduled import ScheduledRequest, StepResult
from loraserve.engine.scheduling.adapter_waits import AdapterSource, AdapterWaits
from loraserve.engine.scheduling.deadlines import OwnTimes
from loraserve.engine.scheduling.endings import numerics_error, overdue_error
from loraserve.engine.scheduling.fair_queue import PROMPT_COST, Accounts
from loraserve.engine.scheduling.invariants import broken_invariants
from loraserve.engine.scheduling.output import Outcomes
from loraserve.engine.scheduling.preemption import Preemption
from loraserve.engine.scheduling.prefetch import LookAhead
from loraserve.engine.scheduling.probe_budget import ProbeRows
from loraserve.engine.scheduling.queue import Line, Turns
from loraserve.engine.scheduling.quota import Holdings
from loraserve.engine.scheduling.step import Step
from loraserve.engine_client.timeouts import TIMEOUT, timeout_error
from loraserve.errors import InvariantViolation, LoraserveError
from loraserve.limits import LIMITS
from loraserve.memory.kv_cache import KVCache
from loraserve.memory.residency.pager import Residency
from loraserve.memory.timings import Timings
from loraserve.types import AdapterRef, Digest, FinishReason, RequestId, TokenOutput

logger = logging.getLogger(__name__)

_ORDER = attrgetter("order")

CREDIT_STEPS = 4
"""So many steps full of prompt tokens a tenant that comes back may have had less than others: beyond that, having been away is no credit."""
OWED_STEPS = 16
"""So many steps full of prompt tokens a tenant may have had less than others, by its weight, that has its part of the places and waits for more: beyond that, it isn't made up
for. Else one whose long prompts were computed meanwhile would have nothing for as long as the other's few tokens a step take to be as much."""
AHEAD_DIVISOR = 4
"""Prompts of tenants that had more than others lately fill a step up to this part of the token budget."""


class Scheduler:
    """Holds every live request; each is in `_line` or in `_running`, and ends through `_end` alone."""

    def __init__(
        self,
        kv: KVCache,
        adapters: AdapterSource,
        *,
        max_num_seqs: int,
        token_budget: int,
        eos_token_ids: Sequence[int],
        adapter_deadline_s: float = LIMITS.adapter_load_deadline_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_timeouts = 0
        """Requests that ended since their own time was over."""
        self.base_prefix_tokens_hit = 0
        self.adapter_wait_s = Timings()
        """What each request for an adapter waited for it, probes left out: counted when the wait is over, however it ended."""
        self._kv = kv
        self._adapters = adapters
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._clock = clock
        self._requests: dict[RequestId, Request] = {}
        self._accounts = Accounts(CREDIT_STEPS * token_budget * PROMPT_COST)
        self._most_owed = OWED_STEPS * token_budget * PROMPT_COST
        self._line = Line(self._accounts)
        self._holdings = Holdings(kv, self._accounts, max_num_seqs)
        self._running: list[Request] = []  # sorted by order
        self._preemption = Preemption(self._running, self._line, self._holdings, self._accounts)
        self._failed: list[TokenOutput] = []
        self._waits = AdapterWaits(
            adapters,
            kv.prefill_pace,
            max_load_cost=token_budget * PROMPT_COST,
            deadline_s=adapter_deadline_s,
            clock=clock,
        )
        self._timeouts = OwnTimes()
        self._outcomes = Outcomes(kv, frozenset(eos_token_ids), clock)
        self._look_ahead = LookAhead(adapters, self._line)
        # since the last step: adapters, and whether somebody's request
        self._changed: set[Digest] = set()
        self._has_arrivals = False
        self._probe_rows = ProbeRows(token_budget)

    @property
    def num_preemptions(self) -> int:
        """Requests that were put back for others."""
        return self._preemption.num

    @property
    def num_fair_preemptions(self) -> int:
        """Of those, for a tenant that had less than its part of the places or of the KV blocks, or by one that held more than it may."""
        return self._preemption.num_fair

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_serving(self) -> bool:
        """Whether somebody's request takes part in steps: one that isn't a probe."""
        return any(not request.is_internal for request in self._running)

    @property
    def adapters_served(self) -> set[Digest | None]:
        """Of somebody's requests that take part in steps; None: some have none."""
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
        """Those with a request here."""
        return self._accounts.num_live

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """The request waits for its turn. What it came with beside its prompt was computed before, and is charged to nobody again."""
        self._requests[request.request_id] = request
        adapter = None if request.adapter is None else request.adapter.digest
        self._has_arrivals |= not request.is_internal
        request.share = self._accounts.open(
            request.tenant, adapter, request.weight, request.kv_share, is_nobody=request.is_internal
        )
        if request.num_output_tokens:
            request.num_charged_tokens = request.num_tokens
        if request.timeout_s is not None:
            self._timeouts.note(request, request.arrival_s + request.timeout_s, num_live=len(self._requests))
        self._line.add(request)

    def abort(self, request_id: RequestId) -> bool:
        """End a request wherever it is; False if it is unknown or over already."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request)
        return True

    def fail(self, request: Request, error: LoraserveError) -> TokenOutput:
        """End a request with an error and return what its client is told."""
        self._end(request)
        return TokenOutput(
            request_id=request.request_id,
            finish_reason=FinishReason.ERROR,
            error_code=error.code,
            error_message=str(error),
        )

    def take_failed(self) -> list[TokenOutput]:
        """Return, once, the requests that failed before they could run."""
        failed, self._failed = self._failed, []
        return failed

    # schedule

    def note_changed(self, adapters: Collection[Digest]) -> None:
        """These have come to the device, couldn't be loaded, or wait for it no more, as the pager's `poll` has said: who wants one may ask for it again."""
        self._changed.update(adapters)

    def schedule(self) -> list[ScheduledRequest]:
        """Choose the next step's requests within the token budget, and reserve the KV blocks they need.

        Running requests that are one token short come first. What they leave is for prompts, those that have begun and those that wait, tenant by tenant: the next
        is always of the tenant that had least, by its weight (`line.Turns`); a tenant that had more than others lately fills only a part of the step, so that who
        comes meanwhile doesn't wait for a long one. A tenant that has fewer than its part of the places, or of the KV blocks, takes what it needs of one that has
        more, a place only of one that had no less: a request of the other starts over later. That happens to a request `MAX_FAIR_PREEMPTIONS` times at most.

        A request whose adapter is still loading is passed over and holds up nobody. Those whose adapters are there thus go first, and none of them goes before a cold
        one for longer than its adapter takes: once that is there, the request has its place in the order again, and the next sequence to begin is its own, unless
        others came before it, their tenant or adapter had less, or they have a better priority. How long the adapter takes is bounded by the pager's turns and
        patience, and by the deadline.
        """
        now = self._clock()
        self._end_overdue(now)
        self._fail_overdue(now)
        self._accounts.age(now)
        self._line.note_changed(self._changed, now, is_closed=self._adapters.is_line_closed)
        # a request that waits begins because it has just come, or its adapter has
        has_news = self._has_arrivals or self._is_any_for_requests(self._changed)
        self._has_arrivals = False
        self._changed.clear()
        step = Step(now, self._token_budget, self._probe_rows.of_next_step(self._running, has_news=has_news))
        if self._line.apart:
            self._compute_apart(step)
            if step.scheduled:
                return step.scheduled
        begun = self._decode(step)
        if begun or (self._line.has_others and not step.is_short):
            self._take_turns(step, begun)
        self._waits.keep_asking(self._line.express)
        self._look_ahead.look()
        return step.scheduled

    def _is_any_for_requests(self, digests: Collection[Digest]) -> bool:
        """Whether one of these adapters is somebody's who waits, and isn't a probe."""
        return bool(digests) and any(
            not request.is_internal and request.adapter is not None and request.adapter.digest in digests
            for request in self._line
        )

    def _compute_apart(self, step: Step) -> None:
        for request in list(self._line.apart):
            if step.budget == 0 or len(self._running) >= self._max_num_seqs:
                return
            if self._has_adapter(request, step):
                count = min(request.num_pending_tokens, step.budget)
                if not self._holdings.reserve(request, count):
                    return
                self._begin(request, count, step)

    def _decode(self, step: Step) -> list[Request]:
        """Schedule the running requests that are one token short; return those that have further to go.

        Those whose last token is in flight have no part in this step, and keep no place in it from others.
        """
        begun, size = [], self._kv.block_size
        step.num_places = self._max_num_seqs + sum(request.num_pending_tokens == 0 for request in self._running)
        for request in list(self._running):
            num_pending = request.num_pending_tokens
            if request.status is not Status.RUNNING:
                # preempted for an earlier one in this very loop
                continue
            if num_pending > 1:
                begun.append(request)
            # in most steps the last block has room
            elif (
                num_pending
                and step.room(request)
                and (
                    request.num_computed_tokens < len(request.blocks) * size or self._preemption.keep(request, 1, step)
                )
            ):
                step.take_part(request, 1)
        return begun

    def _take_turns(self, step: Step, begun: Sequence[Request]) -> None:
        # In a step that preempts for lack of blocks nobody is admitted.
        is_admitting = not step.is_short and (
            len(self._running) < step.num_places or self._preemption.has_place_to_give()
        )
        if not begun and not is_admitting:
            return
        turns = Turns(
            self._line,
            begun,
            step.scheduled,
            now_s=step.now_s,
            is_admitting=is_admitting,
            is_closed=self._adapters.is_line_closed,
        )
        for request in turns:
            count = min(request.num_pending_tokens, self._room(request, step))
            if count == 0 and request.is_internal and step.budget:
                # the others of its tenant don't wait for it; an adapter that has just come for it would be gone by the next step. None is asked for: its load would be beside prompts
                if request.status is not Status.RUNNING and request.adapter_wait_started_s is not None:
                    self._has_adapter(request, step)
                continue
            if count == 0:
                turns.end_turn()
                if step.budget == 0:
                    turns.end()
            elif request.status is not Status.RUNNING:
                self._admit(request, step, turns)
            elif self._preemption.keep(request, count, step):
                step.take_part(request, count)
            if step.is_short:
                turns.is_admitting = False

    def _room(self, request: Request, step: Step) -> int:
        """How many tokens of a prompt the step has room for."""
        room = step.room(request)
        if request.is_internal or request.is_urgent or not self._accounts.is_ahead(request.share.account, step.now_s):
            return room
        return min(room, max(0, -(-self._token_budget // AHEAD_DIVISOR) - step.num_prompt_tokens))

    def _admit(self, request: Request, step: Step, turns: Turns) -> None:
        """The request begins, if it can: otherwise it waits on, and so does whoever would be in its way."""
        account = request.share.account
        is_full = len(self._running) >= step.num_places
        if is_full and not request.is_urgent and not self._holdings.lacks_places(account):
            turns.end_turn(owed=self._most_owed if self._holdings.has_its_places(account) else math.inf)
            return
        if any(request is other for other in step.preempted):
            # Not in this step: so the last token of whom it preempted in flight is known when they come back.
            return
        if not self._has_adapter(request, step):
            turns.pass_share()
            return
        if is_full and not request.is_urgent and not self._preemption.has_place_for(request):
            # nor is there one for those that had more
            turns.is_admitting = False
            return
        if request.can_use_prefix_cache:
            self._holdings.take_prefix(request)
        count = min(request.num_pending_tokens, self._room(request, step))
        if self._holdings.exceeds_share(request, count):
            self._holdings.drop_blocks(request, is_use=False)
            turns.end_turn(owed=0.0)
            return
        # Who was put back for want of blocks waits for all that it needs: begun with a part of them, it would be put back again.
        has_blocks = (not request.num_preemptions or self._holdings.fits_whole(request)) and self._holdings.reserve(
            request, count
        )
        while not has_blocks and self._holdings.is_below_share(request):
            if not self._preemption.take_blocks(step):
                break
            has_blocks = self._holdings.reserve(request, count)
        if has_blocks and len(self._running) >= step.num_places:
            self._preemption.take_place_for(request, step)
        if not has_blocks or len(self._running) >= step.num_places:
            # In order: a later, shorter request must not starve this one of blocks.
            self._holdings.drop_blocks(request, is_use=False)
            turns.is_admitting = False
            return
        self._begin(request, count, step)

    def _begin(self, request: Request, count: int, step: Step) -> None:
        """A request that waited, and has what it needs, takes its part in the step."""
        self._leave_line(request)
        request.status = Status.RUNNING
        # scores of an earlier start, which it doesn't go on from
        request.prompt_logprobs.clear()
        # what was found needn't be computed: also that of others which was computed while it was put back
        request.num_charged_tokens = max(request.num_charged_tokens, request.num_computed_tokens)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self._clock()
            request.num_cached_tokens = request.num_computed_tokens
            if request.can_use_prefix_cache:
                self._kv.note_lookup(request.num_tokens, request.num_cached_tokens)
            if request.adapter is not None:
                self.base_prefix_tokens_hit += min(request.num_cached_tokens, request.num_base_tokens)
        insort(self._running, request, key=_ORDER)
        request.share.account.num_running += 1
        step.take_part(request, count)

    # what requests end of before they have their part

    def _end_overdue(self, now: float) -> None:
        """End the requests whose own time is over, with what there is."""
        for request in self._timeouts.take_over(now):
            self.num_timeouts += 1
            if request.num_output_tokens:
                self._end(request)
                output = TokenOutput(
                    request_id=request.request_id, finish_reason=FinishReason.LENGTH, stop_reason=TIMEOUT
                )
            else:
                output = self.fail(request, timeout_error(request.timeout_s or 0.0))
            self._failed.append(output)

    def _fail_overdue(self, now: float) -> None:
        """End the requests that have waited for their adapter up to the deadline. Its load goes on, for whoever asks next."""
        for request in self._waits.overdue(now):
            if request.adapter is None:
                continue
            state = self._adapters.request(request.adapter)
            if state in (Residency.LOADING, Residency.WAITING_FOR_SPACE):
                self._failed.append(self.fail(request, overdue_error(request, state, self._waits.deadline_s)))
            elif state is Residency.RESIDENT:
                # it is there, and the request waits for a place in a step: that has its own bound
                self._waits.end(request)
                self._accounts.away.wake(request.share)
            else:
                self._fail_load(request, request.adapter)

    def _fail_load(self, request: Request, adapter: AdapterRef) -> None:
        error = self._adapters.error(adapter.digest)
        self._failed.append(self.fail(request, error or LoraserveError("the adapter could not be loaded")))

    # adapters

    def _has_adapter(self, request: Request, step: Step) -> bool:
        """Whether the request may run as far as its adapter goes; starts the load, or fails the request, if not."""
        if request.pin is not None:
            return True
        if self._adapters.is_line_closed and request.adapter_wait_started_s is None:
            # An adapter waits for what those that run hold. Who has a pin holds some of it, and goes on; and so does whose adapter has just
            # got its place: it would lose it again to the one that waits now, and so on in turn.
            return False
        if request.adapter is None:
            return True
        # once in a step for all that wait for it
        state = Residency.LOADING if request.share in step.away else self._adapters.request(request.adapter)
        match state:
            case Residency.RESIDENT:
                # Pinned before any KV block is taken, and kept across preemption: a request that holds KV can always run.
                digest = request.adapter.digest
                request.pin = self._adapters.pin(digest, is_use=not request.is_internal)
                invocation_token_ids = self._adapters.facts(digest).invocation_token_ids
                # in the prompt alone: neither an answer, nor what of it came before a crash, moves it
                request.activation = find_activation(digest, invocation_token_ids, request.prompt_token_ids)
                self._waits.end(request)
                if request.is_fair_queued:
                    request.share.num_pinned += 1
                if not request.is_internal:
                    self.adapter_wait_s.add(request.adapter_wait_s)
                return True
            case Residency.FAILED:
                self._fail_load(request, request.adapter)
                return False
            case _:
                step.away.add(request.share)
                if request.adapter_wait_started_s is None:
                    self._waits.begin(request, request.adapter.digest)
                return False

    def _leave_line(self, request: Request) -> None:
        self._line.remove(request)

    # update

    def update(self, scheduled: Sequence[ScheduledRequest], results: Sequence[StepResult]) -> list[TokenOutput]:
        """Give every request of a step what was computed and sampled; return what its client gets."""
        outputs = []
        for entry, result in zip(scheduled, results, strict=True):
            output = self._advance(entry, result)
            if output is not None:
                outputs.append(output)
        return outputs

    def forget(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """The step was not computed: its requests stand where it found them, but for the blocks that they were given."""
        for entry in scheduled:
            entry.request.num_in_flight_tokens -= entry.num_sampled_tokens
            if entry.is_current:
                entry.request.num_computed_tokens = entry.start

    def _advance(self, entry: ScheduledRequest, result: StepResult) -> TokenOutput | None:
        request = entry.request
        request.num_in_flight_tokens -= entry.num_sampled_tokens
        if request.status is Status.FINISHED:
            # ended while the step was in flight, by an earlier token or by its client: nothing of it is sent, counted or published
            return None
        if not result.is_finite:
            return self.fail(request, numerics_error(request))
        output = self._outcomes.take(entry, result)
        if output is not None and output.finish_reason is not None:
            self._end(request)
        return output

    # check

    def check(self, in_flight: Sequence[ScheduledRequest] = ()) -> list[str]:
        """Return every broken invariant, in words. ``in_flight``: what was scheduled and not updated yet."""
        return broken_invariants(
            list(self._requests.values()),
            self._running,
            self._accounts,
            in_flight,
            num_waiting=len(self._line),
            block_size=self._kv.block_size,
        )

    def _end(self, request: Request) -> None:
        """Every ending passes here: blocks, pin and place are given back, once."""
        del self._requests[request.request_id]
        if request.status is Status.RUNNING:
            self._running.remove(request)
            request.share.account.num_running -= 1
        else:
            self._leave_line(request)
        request.status = Status.FINISHED
        self._holdings.drop_blocks(request)
        self._waits.end(request)
        self._accounts.close(request.share)
        if request.pin is None and request.adapter_wait_s > 0 and not request.is_internal:
            self.adapter_wait_s.add(request.adapter_wait_s)
        pin, request.pin = request.pin, None
        if pin is not None:
            try:
                pin.release()
            except InvariantViolation:
                # our own bug, and counted by the pool; it must not end everybody's requests
                logger.exception("request %s doesn't hold the pin that it should", request.request_id)
