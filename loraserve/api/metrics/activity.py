"""Counts of each tenant's requests as they run, which its own key may be shown."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from loraserve.api.metrics.durations import bucket, empty_counts
from loraserve.api.metrics.slow_requests import SlowRequest, SlowRequests
from loraserve.api.metrics.version_traffic import EndedRequest, Role, VersionTraffic
from loraserve.engine_client.messages import GenerateRequest
from loraserve.engine_client.output import Chunk
from loraserve.limits import LIMITS, Limits
from loraserve.types import TenantId


@dataclass(slots=True)
class RequestTally:
    """Counts of one tenant's requests, or of all; they only rise, but for the first two."""

    num_waiting: int = 0
    """Requests that wait for their first token now."""
    num_running: int = 0
    """Requests past their first token that continue now."""
    num_ended: int = 0
    num_failed: int = 0
    """Number of them that ended by an error."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_counts: list[int] = field(default_factory=empty_counts)
    per_token_counts: list[int] = field(default_factory=empty_counts)


class Activity:
    """RequestTally the requests of each tenant and of all together, and keep the slowest.

    Requests that no client waits for aren't timed: they come after all others on purpose.
    """

    def __init__(
        self,
        *,
        limits: Limits = LIMITS,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_tenants = limits.max_tallied_tenants
        self._monotonic = monotonic
        self._clock = clock
        self._total = RequestTally()
        self.slow = SlowRequests(limits=limits, clock=monotonic)
        self.traffic = VersionTraffic(limits=limits, clock=clock)
        # the last active last; a request holds its own, so that one that is dropped meanwhile is
        # counted to its end
        self._tallies: OrderedDict[TenantId, RequestTally] = OrderedDict()
        self._live: set[RequestTimer] = set()
        """Timers that haven't ended; some have tokens that no tally has."""

    def of(self, tenant: TenantId | None) -> RequestTally:
        """Look up the tenant's tally, or with None that of all."""
        self._settle()
        return self._total if tenant is None else self._tallies.get(tenant) or RequestTally()

    def tallies(self) -> Iterator[tuple[TenantId | None, RequestTally]]:
        """Yield the tally of all, with None, and those of the tenants."""
        self._settle()
        yield None, self._total
        yield from self._tallies.items()

    def _settle(self) -> None:
        for timer in self._live:
            timer.settle()

    def begin(self, request: GenerateRequest, *, tenant_name: str, asked: str) -> RequestTimer:
        """Count a request as waiting; `RequestTimer.end` must follow."""
        tally = self._tallies.setdefault(request.tenant, RequestTally())
        self._tallies.move_to_end(request.tenant)
        while len(self._tallies) > self._max_tenants:
            self._tallies.popitem(last=False)
        slow = None if request.is_background else self.slow
        now = datetime.fromtimestamp(self._clock(), UTC)
        tallies = tally, self._total
        return RequestTimer(tallies, self._live, request, tenant_name, asked, now, self._monotonic, slow, self.traffic)


class RequestTimer:
    """Times of one request, from its arrival to its end.

    Args:
        live: timers that haven't ended, with this one until it ends.

    Attributes:
        num_tokens: tokens of the answer so far, which the tallies have after `settle`.
    """

    def __init__(
        self,
        tallies: tuple[RequestTally, ...],
        live: set[RequestTimer],
        request: GenerateRequest,
        tenant_name: str,
        asked: str,
        started_at: datetime,
        clock: Callable[[], float],
        slow: SlowRequests | None,
        traffic: VersionTraffic,
    ) -> None:
        self._tallies, self._live = tallies, live
        self._request = request
        self._tenant_name = tenant_name
        self._asked = asked
        self._started_at = started_at
        self._clock = clock
        self._slow = slow
        self._traffic = traffic
        self._started_s = clock()
        self._first: Chunk | None = None
        self._first_s: float | None = None
        self.num_tokens = self._num_settled = 0
        self._has_ended = False
        live.add(self)
        for tally in tallies:
            tally.num_waiting += 1

    @property
    def has_begun(self) -> bool:
        return self._first is not None

    def settle(self) -> None:
        """Add the tokens that have come since the last call to the tallies."""
        num_new, self._num_settled = self.num_tokens - self._num_settled, self.num_tokens
        for tally in self._tallies:
            tally.completion_tokens += num_new

    def begin(self, chunk: Chunk) -> None:
        """Note the first chunk of the answer, which has come now."""
        self._first, self._first_s = chunk, self._clock() - self._started_s
        for tally in self._tallies:
            tally.num_waiting -= 1
            tally.num_running += 1
            tally.prompt_tokens += len(self._request.prompt_token_ids)
            tally.cached_tokens += chunk.num_cached_tokens
            if self._slow is not None:
                tally.first_token_counts[bucket(self._first_s)] += 1

    def end(self, outcome: str, *, answered_by: str, is_failure: bool) -> None:
        """Count the request no more; no-op when called again."""
        if self._has_ended:
            return
        self._has_ended = True
        self.settle()
        self._live.discard(self)
        duration_s, first = self._clock() - self._started_s, self._first
        per_token_s = None
        if self._first_s is not None and self.num_tokens > 1:
            per_token_s = (duration_s - self._first_s) / (self.num_tokens - 1)
        for tally in self._tallies:
            if first is None:
                tally.num_waiting -= 1
            else:
                tally.num_running -= 1
            tally.num_ended += 1
            tally.num_failed += is_failure
            if self._slow is not None and per_token_s is not None:
                tally.per_token_counts[bucket(per_token_s)] += 1
        is_timed = self._slow is not None
        self._traffic.add(
            self._request.tenant,
            self._request.adapter,
            Role.ANSWER,
            EndedRequest(
                is_failure=is_failure,
                prompt_tokens=0 if first is None else len(self._request.prompt_token_ids),
                cached_tokens=0 if first is None else first.num_cached_tokens,
                completion_tokens=self.num_tokens,
                first_token_s=self._first_s if is_timed else None,
                per_token_s=per_token_s if is_timed else None,
            ),
        )
        if self._slow is None:
            return
        self._slow.add(
            SlowRequest(
                id=_answer_id(self._request.request_id),
                tenant=self._request.tenant,
                tenant_name=self._tenant_name,
                started_at=self._started_at,
                asked=self._asked,
                answered_by=answered_by,
                outcome=outcome,
                prompt_tokens=len(self._request.prompt_token_ids),
                cached_tokens=0 if first is None else first.num_cached_tokens,
                completion_tokens=self.num_tokens,
                queue_s=0.0 if first is None else first.queue_s,
                adapter_s=0.0 if first is None else first.adapter_s,
                prefill_s=0.0 if first is None else first.prefill_s,
                first_token_s=self._first_s,
                duration_s=duration_s,
                adapter_tier="" if first is None else first.adapter_tier,
                adapter_read_s=0.0 if first is None else first.adapter_read_s,
            )
        )


def _answer_id(request_id: str) -> str:
    """Extract the answer's id, of which the engine's requests have one number each."""
    return request_id.removesuffix("-fallback").rpartition("-")[0]
