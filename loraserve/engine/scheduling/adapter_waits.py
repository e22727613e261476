"""Requests that wait for their adapter: since when, what they ask of the pager, and who is charged."""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Protocol

from loraserve.engine.request import Pin, Request, Status
from loraserve.engine.scheduling.fair_queue import PROMPT_COST
from loraserve.errors import LoraserveError
from loraserve.memory.cost_estimate import Pace
from loraserve.memory.loading.adapter_metadata import AdapterFacts
from loraserve.memory.residency.pager import Residency
from loraserve.types import AdapterRef, Digest, RequestId

_ORDER = attrgetter("order")


class AdapterSource(Protocol):
    """What the scheduler asks of the pager. None of the calls blocks."""

    @property
    def is_line_closed(self) -> bool: ...
    @property
    def mean_load_s(self) -> float: ...
    def request(self, ref: AdapterRef) -> Residency: ...
    def error(self, digest: Digest) -> LoraserveError | None: ...
    def pin(self, digest: Digest, *, is_use: bool = True) -> Pin: ...
    def facts(self, digest: Digest) -> AdapterFacts: ...
    def prefetch(self, refs: Sequence[AdapterRef]) -> None: ...


class AdapterWaits:
    """Of the requests that wait for a place in a step, those whose adapter isn't there, in the order in which they began to wait for it.

    Args:
        prefill_pace: seconds per token: what a load took of the engine is charged as the tokens that could have been computed meanwhile.
        max_load_cost: what a load is charged at most.
        deadline_s: for so long a request waits.
    """

    def __init__(
        self,
        adapters: AdapterSource,
        prefill_pace: Pace,
        *,
        max_load_cost: float,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.deadline_s = deadline_s
        self._adapters, self._prefill_pace, self._max_load_cost, self._clock = (
            adapters,
            prefill_pace,
            max_load_cost,
            clock,
        )
        self._cold: OrderedDict[RequestId, Request] = OrderedDict()
        self._num_cold: Counter[Digest] = Counter()

    def __len__(self) -> int:
        return len(self._cold)

    def overdue(self, now_s: float) -> list[Request]:
        """Those that have waited up to the deadline."""
        return list(takewhile(lambda request: self._is_overdue(request, now_s), self._cold.values()))

    def _is_overdue(self, request: Request, now_s: float) -> bool:
        started_s = request.adapter_wait_started_s
        return started_s is not None and now_s >= started_s + self.deadline_s

    def begin(self, request: Request, digest: Digest) -> None:
        """It waits for its adapter; whoever is the first that wants it has it brought, and is charged for the load."""
        request.adapter_wait_started_s = self._clock()
        self._cold[request.request_id] = request
        self._num_cold[digest] += 1
        if request.is_fair_queued:
            request.share.fresh.remove(request)
        if self._num_cold[digest] == 1:
            num_tokens = self._adapters.mean_load_s / self._prefill_pace.seconds_per_unit
            request.share.charge(min(num_tokens * PROMPT_COST, self._max_load_cost))

    def end(self, request: Request) -> None:
        """It doesn't, if it did."""
        if request.adapter is not None and request.adapter_wait_started_s is not None:
            request.adapter_wait_s += self._clock() - request.adapter_wait_started_s
            request.adapter_wait_started_s = None
            del self._cold[request.request_id]
            if request.is_fair_queued and request.status is Status.WAITING:
                insort(request.share.fresh, request, key=_ORDER)
            self._num_cold[request.adapter.digest] -= 1
            if not self._num_cold[request.adapter.digest]:
                del self._num_cold[request.adapter.digest]

    def keep_asking(self, express: Sequence[Request]) -> None:
        """Ask on for the request that has waited longest for its adapter, also in steps that can admit nobody.

        The pager forgets who doesn't ask, and evicts what isn't used: it could lose its adapter again and again while the places go to others. Only that one: two
        that wait for one place would evict each other.
        """
        if not self._cold:
            return
        request = next(iter(self._cold.values()))
        if express:
            request = next((other for other in express if other.request_id in self._cold), request)
        if request.adapter is not None:
            self._adapters.request(request.adapter)
