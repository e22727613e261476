"""Slowest requests of the last hour, each with the time that every stage of it took."""

from __future__ import annotations

import bisect
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from loraserve.limits import LIMITS, Limits
from loraserve.types import TenantId

FIRST_TOKEN, DURATION = "first_token", "duration"
ORDERS = (DURATION, FIRST_TOKEN)
"""Orders that requests can be compared by."""
_MINUTE_S = 60


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """Ended choice of a request."""

    id: str
    """Id of the answer, as its body has it."""
    tenant: TenantId
    tenant_name: str
    started_at: datetime
    asked: str
    """Model that was requested."""
    answered_by: str
    """Version that answered, or the base's id."""
    outcome: str
    """Reason of the end: stop, length, abort (the client left), or an error's code."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    adapter_s: float
    prefill_s: float
    first_token_s: float | None
    """Seconds until the first token; None: none came."""
    duration_s: float
    adapter_tier: str = ""
    """Tier of the adapter when the request came: device, host or disk; empty: unknown, or none."""
    adapter_read_s: float = 0.0
    """Part of `adapter_s` in which its files were read, checked and packed."""

    def seconds_by(self, order: str) -> float:
        if order == FIRST_TOKEN:
            return self.duration_s if self.first_token_s is None else self.first_token_s
        return self.duration_s


@dataclass(slots=True)
class _Minute:
    """Slowest requests of one tenant that ended in one minute, fastest first, by each order."""

    slowest: dict[str, list[SlowRequest]] = field(default_factory=lambda: {order: [] for order in ORDERS})


class SlowRequests:
    """Keep the slowest requests of each minute of the last hour, for each tenant.

    A tenant's requests push out none of another's but those of minutes that are kept no longer.
    """

    def __init__(self, *, limits: Limits = LIMITS, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        # the oldest minute first
        self._minutes: OrderedDict[tuple[int, TenantId], _Minute] = OrderedDict()

    def add(self, request: SlowRequest) -> None:
        """Keep the request if it is among the slowest of its tenant's minute."""
        self._forget()
        minute = self._minutes.setdefault((int(self._clock() // _MINUTE_S), request.tenant), _Minute())
        for order, slowest in minute.slowest.items():
            if len(slowest) == self._limits.max_slow_requests_per_minute:
                if request.seconds_by(order) <= slowest[0].seconds_by(order):
                    continue
                del slowest[0]
            bisect.insort(slowest, request, key=lambda one, order=order: one.seconds_by(order))  # type: ignore[misc]
        while len(self._minutes) > self._limits.max_slow_request_minutes:
            self._minutes.popitem(last=False)

    def slowest(self, tenant: TenantId | None, *, order: str, limit: int) -> list[SlowRequest]:
        """List the tenant's slowest, or with None those of all tenants, the slowest first."""
        self._forget()
        kept = (
            one
            for (_, owner), minute in self._minutes.items()
            if tenant in (None, owner)
            for one in minute.slowest[order]
        )
        return heapq.nlargest(limit, kept, key=lambda one: one.seconds_by(order))

    def _forget(self) -> None:
        """Drop minutes that began more than an hour ago."""
        first = (self._clock() - self._limits.slow_requests_s) // _MINUTE_S
        while self._minutes and next(iter(self._minutes))[0] < first:
            self._minutes.popitem(last=False)
