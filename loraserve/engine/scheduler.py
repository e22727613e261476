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
from array import array
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from loraserve.engine.activation import find_activation
from loraserve.engine.request import Pin, Request, Status
from loraserve.errors import AdapterNotReady, AdapterNumerics, EngineError, InvariantViolation, LoraserveError
from loraserve.limits import LIMITS
from loraserve.memory.facts import AdapterFacts
from loraserve.memory.kv_cache import BlockId, KVCache
from loraserve.memory.pager import Residency
from loraserve.memory.timings import Timings
from loraserve.types import AdapterRef, Digest, FinishReason, RequestId, TokenLogprobs, TokenOutput

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_ORDER = attrgetter("order")

LOOK_AHEAD = 16
"""Of the requests that wait, so many of the first have their adapters read while they wait for a place in a step."""


class AdapterSource(Protocol):
    """What the scheduler asks of the pager. None of the calls blocks."""

    @property
    def is_line_closed(self) -> bool: ...
    def request(self, ref: AdapterRef) -> Residency: ...
    def error(self, digest: Digest) -> LoraserveError | None: ...
    def pin(self, digest: Digest) -> Pin: ...
    def facts(self, digest: Digest) -> AdapterFacts: ...
    def prefetch(self, refs: Sequence[AdapterRef]) -> None: ...


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's part in one step: tokens ``[start, end)`` are computed.

    It says what was so when the step was scheduled: the request may move on while the step runs.
    """

    request: Request
    start: int
    num_tokens: int
    is_sampled: bool
    """Whether the step reaches the request's last token, so that its next one, at position `end`, can be chosen."""
    is_scored: bool
    """Whether the prompt tokens that its rows predict are scored."""
    epoch: int
    """How often the request had been preempted."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_base_tokens(self) -> int:
        """How many of its tokens, from the first, no adapter acts on."""
        activation = self.request.activation
        if activation is None:
            return self.num_tokens
        # of nearly all
        if activation.start <= self.start:
            return 0
        return min(activation.start - self.start, self.num_tokens)

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.is_sampled and self.request.params.max_tokens > 0)

    @property
    def is_current(self) -> bool:
        """Whether the request still runs on the blocks that it had: it hasn't ended, nor started over since."""
        return self.request.status is Status.RUNNING and self.request.num_preemptions == self.epoch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the sampler made of one scheduled request.

    `token_id` is None when the request isn't at its last token yet, or asked for no tokens.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    is_finite: bool = True
    logits: Tensor | None = None
    """Of a probe's rows, [num_rows, vocab_size] float32 in the host's memory; they end with the entry's last."""


class Scheduler:
    """Holds every live request; each is in `_waiting` or in `_running`, and ends through `_end` alone."""

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
        self.num_preemptions = 0
        self.base_prefix_tokens_hit = 0
        self.adapter_wait_s = Timings()
        """What each request for an adapter waited for it, probes left out: counted when the wait is over, however it ended."""
        self._kv = kv
        self._adapters = adapters
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._adapter_deadline_s = adapter_deadline_s
        # no request's wait for its adapter is over its deadline before this
        self._next_deadline_s = math.inf
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._requests: dict[RequestId, Request] = {}
        self._waiting: list[Request] = []  # sorted by order
        self._running: list[Request] = []  # sorted by order
        self._failed: list[TokenOutput] = []
        # of those that wait, probes that are to have a step of their own
        self._apart: list[Request] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_serving(self) -> bool:
        """Whether somebody's request takes part in steps: one that isn't a probe."""
        return any(request.probe is None for request in self._running)

    @property
    def num_waiting_for_adapter(self) -> int:
        return sum(1 for request in self._waiting if request.adapter_wait_started_s is not None)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=_ORDER)
        if request.probe is not None and request.probe.has_own_step:
            self._apart.append(request)

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

    def schedule(self) -> list[ScheduledRequest]:
        """Choose the next step's requests within the token budget, and reserve the KV blocks they need.

        Running requests come first, those one token short before those with a longer way to go, so that a long prompt
        takes only what decoding leaves. Then waiting requests are admitted in order; one whose adapter is still loading
        is passed over and holds up nobody. Those whose adapters are there thus go first, and none of them goes before a cold one for longer than
        its adapter takes: once that is there, the request has its place in the order again, and the next sequence to begin is its own, unless others
        came before it or have a better priority. How long the adapter takes is bounded by the pager's turns and patience, and by the deadline.
        """
        self._fail_overdue()
        budget = self._token_budget
        scheduled: list[ScheduledRequest] = []
        if self._apart:
            self._admit(self._apart, scheduled, budget, self._max_num_seqs)
            if scheduled:
                return scheduled
        preempted = False
        # those whose last token is in flight have no part in this step, and keep no place in it from others
        running = [(request.num_pending_tokens, request) for request in self._running]
        max_running = self._max_num_seqs + sum(1 for num_pending, _ in running if num_pending == 0)
        for num_pending, request in sorted(running, key=lambda entry: entry[0] > 1):
            if budget == 0:
                break
            # preempted for an earlier one in this very loop, or with nothing left to compute
            if request.status is not Status.RUNNING or num_pending == 0:
                continue
            count = min(num_pending, budget)
            while not self._reserve(request, count):
                preempted = True
                victim = self._choose_victim(scheduled)
                self._preempt(victim)
                if victim is request:
                    break
            if request.status is Status.RUNNING:
                scheduled.append(_take_part(request, count))
                budget -= count
        # In a step that preempts nobody is admitted; so the last token of whom it preempted in flight is known when they come back.
        if not preempted:
            waiting = (
                [request for request in self._waiting if request not in self._apart] if self._apart else self._waiting
            )
            self._admit(waiting, scheduled, budget, max_running)
        self._keep_asking()
        if self._waiting:
            ahead = [r.adapter for r in self._waiting[:LOOK_AHEAD] if r.adapter is not None and r.pin is None]
            if ahead:
                self._adapters.prefetch(ahead)
        return scheduled

    def _admit(
        self, waiting: Sequence[Request], scheduled: list[ScheduledRequest], budget: int, max_running: int
    ) -> None:
        for request in list(waiting):
            if budget == 0 or len(self._running) >= max_running:
                return
            if not self._has_adapter(request):
                continue
            if not request.wants_prompt_logprobs and request.probe is None:
                self._take_prefix(request)
            count = min(request.num_pending_tokens, budget)
            if not self._reserve(request, count):
                # In order: a later, shorter request must not starve this one of blocks.
                self._drop_blocks(request, is_use=False)
                return
            self._leave_line(request)
            request.status = Status.RUNNING
            # scores of an earlier start, which it doesn't go on from
            request.prompt_logprobs.clear()
            if request.first_scheduled_s is None:
                request.first_scheduled_s = self._clock()
                request.num_cached_tokens = request.num_computed_tokens
                if request.adapter is not None:
                    self.base_prefix_tokens_hit += min(request.num_cached_tokens, request.num_base_tokens)
            insort(self._running, request, key=_ORDER)
            scheduled.append(_take_part(request, count))
            budget -= count

    def _fail_overdue(self) -> None:
        """End the requests that have waited for their adapter up to the deadline. Its load goes on, for whoever asks next."""
        now = self._clock()
        if now < self._next_deadline_s:
            return
        self._next_deadline_s = math.inf
        for request in list(self._waiting):
            if request.adapter is None or request.adapter_wait_started_s is None:
                continue
            deadline_s = request.adapter_wait_started_s + self._adapter_deadline_s
            if now < deadline_s:
                self._next_deadline_s = min(self._next_deadline_s, deadline_s)
                continue
            state = self._adapters.request(request.adapter)
            if state in (Residency.LOADING, Residency.WAITING_FOR_SPACE):
                self._failed.append(self.fail(request, _overdue_error(request, state, self._adapter_deadline_s)))
            elif state is Residency.RESIDENT:
                # it is there, and the request waits for a place in a step: that has its own bound
                self._end_adapter_wait(request)
            else:
                self._fail_load(request, request.adapter)

    def _fail_load(self, request: Request, adapter: AdapterRef) -> None:
        error = self._adapters.error(adapter.digest)
        self._failed.append(self.fail(request, error or LoraserveError("the adapter could not be loaded")))

    def _end_adapter_wait(self, request: Request) -> None:
        if request.adapter_wait_started_s is not None:
            request.adapter_wait_s += self._clock() - request.adapter_wait_started_s
            request.adapter_wait_started_s = None

    def _keep_asking(self) -> None:
        """Ask on for the first request that waits for its adapter, also in steps that can admit nobody.

        The pager forgets who doesn't ask, and evicts what isn't used: the first in line could lose its adapter again and again while the
        places go to others. Only the first: two that wait for one place would evict each other.
        """
        for request in self._waiting:
            if request.adapter is not None and request.adapter_wait_started_s is not None:
                self._adapters.request(request.adapter)
                return

    def _has_adapter(self, request: Request) -> bool:
        """Whether the request may run as far as its adapter goes; starts the load, or fails the request, if not."""
        if request.pin is not None:
            return True
        if self._adapters.is_line_closed and request.adapter_wait_started_s is None:
            # An adapter waits for what those that run hold. Who has a pin holds some of it, and goes on; and so does whose adapter has just
            # got its place: it would lose it again to the one that waits now, and so on in turn.
            return False
        if request.adapter is None:
            return True
        match self._adapters.request(request.adapter):
            case Residency.RESIDENT:
                # Pinned before any KV block is taken, and kept across preemption: a request that holds KV can always run.
                digest = request.adapter.digest
                request.pin = self._adapters.pin(digest)
                invocation_token_ids = self._adapters.facts(digest).invocation_token_ids
                # in the prompt alone: neither an answer, nor what of it came before a crash, moves it
                request.activation = find_activation(digest, invocation_token_ids, request.prompt_token_ids)
                self._end_adapter_wait(request)
                if request.probe is None:
                    self.adapter_wait_s.add(request.adapter_wait_s)
                return True
            case Residency.FAILED:
                self._fail_load(request, request.adapter)
                return False
            case _:
                if request.adapter_wait_started_s is None:
                    now = request.adapter_wait_started_s = self._clock()
                    self._next_deadline_s = min(self._next_deadline_s, now + self._adapter_deadline_s)
                return False

    def _take_prefix(self, request: Request) -> None:
        # The last token is always computed: its logits are what the step is for.
        blocks, keys = self._kv.match_prefix(
            request.prefix_root, request.token_ids, request.num_tokens - 1, request.activation
        )
        request.blocks, request.block_keys = array("i", blocks), keys
        request.num_computed_tokens = len(blocks) * self._kv.block_size

    def _reserve(self, request: Request, count: int) -> bool:
        """Give the request the blocks that its next ``count`` tokens need."""
        needed = -(-(request.num_computed_tokens + count) // self._kv.block_size) - len(request.blocks)
        if needed <= 0:
            return True
        blocks = self._kv.allocate(needed)
        if blocks is None:
            return False
        request.blocks.extend(blocks)
        return True

    def _choose_victim(self, scheduled: Sequence[ScheduledRequest]) -> Request:
        """The running request that loses least: one that only waits for its last token, else the lowest priority, then the youngest.

        One already in this step is left alone.
        """
        taken = {id(entry.request) for entry in scheduled}
        candidates = [request for request in reversed(self._running) if id(request) not in taken]
        return min(candidates, key=lambda request: request.num_pending_tokens > 0)

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks and let it start over later; its tokens, its adapter's pin and its place stay."""
        self._running.remove(request)
        self._drop_blocks(request, is_use=False)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, request, key=_ORDER)

    def _drop_blocks(self, request: Request, *, is_use: bool = True) -> None:
        self._kv.release([BlockId(block) for block in request.blocks], is_use=is_use)
        request.blocks = array("i")
        request.block_keys = []
        request.num_computed_tokens = 0

    def _leave_line(self, request: Request) -> None:
        self._waiting.remove(request)
        if request in self._apart:
            self._apart.remove(request)

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
            return self.fail(request, _numerics_error(request))
        request.prompt_logprobs.extend(result.prompt_logprobs)
        if request.probe is not None and result.logits is not None:
            request.probe.capture(entry.end, result.logits)
        if not entry.is_sampled:
            return None
        # Only now are the blocks offered to others: logits were finite, so the KV that led to them is sound. Only up to this step's
        # end: what a later one computes isn't known to be. And not after a preemption: the blocks were given away, the token is good.
        if entry.is_current and request.probe is None:
            self._publish(request, entry.end)
        is_first = request.num_output_tokens == 0
        if result.token_id is not None:
            request.token_ids.append(result.token_id)
        reason, stop_reason = self._finish_reason(request, result.token_id)
        output = TokenOutput(
            request_id=request.request_id,
            token_ids=() if result.token_id is None else (result.token_id,),
            logprobs=None if result.logprobs is None else (result.logprobs,),
            prompt_logprobs=(None, *request.prompt_logprobs)
            if is_first and request.params.prompt_logprobs is not None
            else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            **self._first_token_facts(request) if is_first else {},
        )
        if reason is not None:
            self._end(request)
        return output

    def _publish(self, request: Request, num_tokens: int) -> None:
        size = self._kv.block_size
        for index in range(len(request.block_keys), num_tokens // size):
            parent = self._kv.parent_key(request.prefix_root, request.activation, request.block_keys, index)
            content = request.token_ids[index * size : (index + 1) * size]
            request.block_keys.append(self._kv.publish(BlockId(request.blocks[index]), parent, content))

    def _finish_reason(self, request: Request, token_id: int | None) -> tuple[FinishReason | None, int | None]:
        params = request.params
        if token_id is not None and request.num_output_tokens >= params.min_tokens:
            if token_id in params.stop_token_ids:
                return FinishReason.STOP, token_id
            if token_id in self._eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP, None
        if request.num_output_tokens >= params.max_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def _first_token_facts(self, request: Request) -> dict[str, Any]:
        now = self._clock()
        started = now if request.first_scheduled_s is None else request.first_scheduled_s
        return {
            "num_cached_tokens": request.num_cached_tokens,
            "queue_s": max(0.0, started - request.arrival_s - request.adapter_wait_s),
            "adapter_s": request.adapter_wait_s,
            "prefill_s": now - started,
        }

    # check

    def check(self, in_flight: Sequence[ScheduledRequest] = ()) -> list[str]:
        """Return every broken invariant, in words. ``in_flight``: what was scheduled and not updated yet."""
        problems = []
        sampled = Counter(id(entry.request) for entry in in_flight if entry.num_sampled_tokens)
        for request in self._requests.values():
            capacity = len(request.blocks) * self._kv.block_size
            facts = (
                (
                    request.num_in_flight_tokens == sampled[id(request)],
                    f"{request.num_in_flight_tokens} tokens in flight",
                ),
                (request.num_computed_tokens <= request.num_tokens, "more computed tokens than tokens"),
                (request.num_computed_tokens <= capacity, f"{request.num_computed_tokens} tokens in {capacity} slots"),
                (request.status is Status.RUNNING or not request.blocks, "blocks without running"),
                (len(request.block_keys) <= len(request.blocks), "published more blocks than it holds"),
            )
            problems += [f"request {request.request_id}: {what}" for is_so, what in facts if not is_so]
        if len(self._waiting) + len(self._running) != len(self._requests):
            problems.append("a request is neither waiting nor running")
        return problems

    def _end(self, request: Request) -> None:
        """Every ending passes here: blocks, pin and place are given back, once."""
        del self._requests[request.request_id]
        if request.status is Status.RUNNING:
            self._running.remove(request)
        else:
            self._leave_line(request)
        request.status = Status.FINISHED
        self._drop_blocks(request)
        self._end_adapter_wait(request)
        if request.pin is None and request.adapter_wait_s > 0 and request.probe is None:
            self.adapter_wait_s.add(request.adapter_wait_s)
        pin, request.pin = request.pin, None
        if pin is not None:
            try:
                pin.release()
            except InvariantViolation:
                # our own bug, and counted by the pool; it must not end everybody's requests
                logger.exception("request %s doesn't hold the pin that it should", request.request_id)


def _take_part(request: Request, count: int) -> ScheduledRequest:
    """The request's next ``count`` tokens are computed by the step, and so is the one after them, if they are its last."""
    entry = ScheduledRequest(
        request,
        start=request.num_computed_tokens,
        num_tokens=count,
        is_sampled=count == request.num_pending_tokens,
        is_scored=request.wants_prompt_logprobs,
        epoch=request.num_preemptions,
    )
    request.num_computed_tokens = entry.end
    request.num_in_flight_tokens += entry.num_sampled_tokens
    return entry


def _overdue_error(request: Request, state: Residency, deadline_s: float) -> LoraserveError:
    adapter = request.adapter
    if adapter is None:
        raise InvariantViolation(f"request {request.request_id} waits for an adapter and has none")
    why = (
        "everything on the device is in use"
        if state is Residency.WAITING_FOR_SPACE
        else "it is still being read, or waits for its turn"
    )
    name = adapter.name if adapter.parts else f"{adapter.name}@{adapter.version}"
    return AdapterNotReady(
        f'The adapter "{name}" was not on the device within {deadline_s:g} s: {why}.',
        hint="Try again shortly: it may be there by then.",
    )


def _numerics_error(request: Request) -> LoraserveError:
    if request.adapter is None or request.activation is None:
        return EngineError("The base model's logits for this request were not finite.")
    return AdapterNumerics(
        f'The logits of adapter "{request.adapter.name}@{request.adapter.version}" for this request were not finite.',
        hint="Check the adapter's weights; other requests were not touched.",
    )
