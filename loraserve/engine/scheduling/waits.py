"""Waits of requests beside their turn: for their adapters, and until their own timeouts."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from loraserve.engine.request import AdapterPin, Request, RequestStatus
from loraserve.engine.scheduling.fair_queue import PROMPT_COST
from loraserve.engine.scheduling.queue import WaitingQueue
from loraserve.errors import LoraserveError
from loraserve.types import AdapterRef, Digest, RequestId, Residency

if TYPE_CHECKING:
    from loraserve.memory.eviction import CostEstimate
    from loraserve.memory.loading.adapter_metadata import AdapterMetadata

PREFETCH_DEPTH = 16
"""Number of requests, of those that run next, that have their adapters read ahead."""
REFRESH_STEPS = 16
"""Steps after which these requests are looked up again, if none of them has started before."""


class AdapterSource(Protocol):
    """Calls that the scheduler makes to the pager, none of which blocks."""

    @property
    def is_admission_paused(self) -> bool: ...
    @property
    def mean_load_s(self) -> float: ...
    def request(self, ref: AdapterRef) -> Residency: ...
    def error(self, digest: Digest) -> LoraserveError | None: ...
    def pin(self, digest: Digest, *, is_use: bool = True) -> AdapterPin: ...
    def metadata(self, digest: Digest) -> AdapterMetadata: ...
    def memory_share(self, digest: Digest) -> float: ...
    def prefetch(self, refs: Sequence[AdapterRef]) -> None: ...


class AdapterWaits:
    """Requests that wait for an adapter that isn't resident, the longest wait first.

    Args:
        prefill_cost: seconds per token: a load is charged as the tokens that could have been
            computed meanwhile.
        max_load_cost: cap on that charge.
        deadline_s: seconds after which such a request fails.
    """

    def __init__(
        self,
        adapters: AdapterSource,
        queue: WaitingQueue,
        prefill_cost: CostEstimate,
        *,
        max_load_cost: float,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.deadline_s = deadline_s
        self._adapters, self._queue, self._prefill_pace = adapters, queue, prefill_cost
        self._max_load_cost, self._clock = max_load_cost, clock
        self._blocked: OrderedDict[RequestId, Request] = OrderedDict()
        self._num_blocked: Counter[Digest] = Counter()

    def __len__(self) -> int:
        return len(self._blocked)

    def overdue(self, now_s: float) -> list[Request]:
        """Return the requests that have waited up to the deadline."""
        return list(takewhile(lambda request: self._is_overdue(request, now_s), self._blocked.values()))

    def _is_overdue(self, request: Request, now_s: float) -> bool:
        started_s = request.adapter_wait_started_s
        return started_s is not None and now_s >= started_s + self.deadline_s

    def begin(self, request: Request, digest: Digest) -> None:
        """Let a request wait for its adapter. The first one that does is charged for the load."""
        request.adapter_wait_started_s = self._clock()
        self._blocked[request.request_id] = request
        self._num_blocked[digest] += 1
        fair_queue = self._queue.fair_queue
        if request.is_fair_queued:
            fair_queue.block(request)
        if self._num_blocked[digest] == 1:
            num_tokens = self._adapters.mean_load_s / self._prefill_pace.seconds_per_unit
            fair_queue.flow(request).charge(min(num_tokens * PROMPT_COST, self._max_load_cost))

    def end(self, request: Request) -> None:
        """Let a request wait for its adapter no more; no-op if it doesn't."""
        if request.adapter is not None and request.adapter_wait_started_s is not None:
            request.adapter_wait_s += self._clock() - request.adapter_wait_started_s
            request.adapter_wait_started_s = None
            del self._blocked[request.request_id]
            if request.is_fair_queued and request.status is RequestStatus.WAITING:
                self._queue.fair_queue.unblock(request)
            self._num_blocked[request.adapter.digest] -= 1
            if not self._num_blocked[request.adapter.digest]:
                del self._num_blocked[request.adapter.digest]

    def renew(self) -> None:
        """Ask again for the adapter that was asked for first, also in steps that can admit nothing.

        The pager forgets an adapter that isn't asked for, and evicts one that isn't used: it could
        lose this one again and again while others take the slots. Only this one: two that wait for
        the same memory would evict each other.
        """
        if not self._blocked:
            return
        request = next(iter(self._blocked.values()))
        if self._queue.urgent:
            request = next((other for other in self._queue.urgent if other.request_id in self._blocked), request)
        if request.adapter is not None:
            self._adapters.request(request.adapter)


class AdapterPrefetch:
    """Tell the pager, once a step, which adapters to read ahead: those of the next requests."""

    def __init__(self, adapters: AdapterSource, queue: WaitingQueue) -> None:
        self._adapters, self._queue = adapters, queue
        self._next: list[Request] = []
        self._version = -1
        self._num_steps = 0

    def update(self) -> None:
        """Tell the pager what is read ahead now."""
        following = self._next
        is_old = (
            self._num_steps >= REFRESH_STEPS
            or len(following) < PREFETCH_DEPTH
            or following[-1].status is not RequestStatus.WAITING
        )
        if is_old and self._version != self._queue.version:
            self._version, self._num_steps = self._queue.version, 0
            following = self._next = self._queue.peek(PREFETCH_DEPTH) if self._queue.has_shared else []
        else:
            self._num_steps += 1
        adapters = [
            request.adapter
            for request in following
            if request.adapter is not None
            and request.pin is None
            and request.status is RequestStatus.WAITING
            # theirs are asked for in steps that have room for them
            and not request.is_internal
        ]
        if adapters:
            self._adapters.prefetch(adapters)


class RequestDeadlines:
    """Requests with a timeout, by when it is over; those that ended are dropped by and by."""

    def __init__(self) -> None:
        # (deadline, sequence number, request)
        self._entries: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, deadline_s: float, *, num_live: int) -> None:
        """Note when the request's time is over.

        Args:
            num_live: live requests, which bound how many are remembered.
        """
        if len(self._entries) > 2 * num_live + 64:
            self._entries = [entry for entry in self._entries if entry[2].status is not RequestStatus.FINISHED]
            heapq.heapify(self._entries)
        heapq.heappush(self._entries, (deadline_s, request.sequence_number, request))

    def pop_overdue(self, now_s: float) -> Iterator[Request]:
        """Return the live requests that are out of time, once each."""
        while self._entries and self._entries[0][0] <= now_s:
            _, _, request = heapq.heappop(self._entries)
            if request.status is not RequestStatus.FINISHED:
                yield request
