"""Bounds on live requests, in all and per tenant, applied before they reach the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from loraserve.engine_client.messages import GenerateRequest
from loraserve.errors import Overloaded, RateLimited
from loraserve.types import TenantId

MAX_OVERFILL = 2
"""Multiple of the bound up to which tenants with less than their part are admitted."""
_SMOOTHING = 0.3
_FIRST_INTERVAL_S = 1.0
_INTERVALS_S = (0.05, 60.0)
"""Smallest and largest delay after which a refused client may retry."""


@dataclass(slots=True)
class _Tenant:
    """Live requests of a tenant.

    Attributes:
        num_waiting: requests without a first token.
        last_began_s: time of the last first token.
        interval_s: seconds between two first tokens while others wait, smoothed.
    """

    num_alive: int = 0
    num_waiting: int = 0
    last_began_s: float | None = None
    interval_s: float = _FIRST_INTERVAL_S


class QueueBounds:
    """Count live requests by tenant.

    Args:
        num_slots: sequences that run at once: as long as no more are alive, none queues.
        max_live: bound on requests of all tenants.
    """

    def __init__(self, num_slots: int, max_live: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_live = max_live
        self.num_alive = 0
        self.num_waiting = 0
        """Requests without a first token."""
        self._num_slots = num_slots
        self._clock = clock
        self._tenants: dict[TenantId, _Tenant] = {}

    def resize(self, num_slots: int, max_live: int) -> None:
        """Take other bounds, as those of more engines or fewer; requests that are alive stay."""
        self._num_slots, self.max_live = num_slots, max_live

    def enter(self, request: GenerateRequest) -> None:
        """Admit a request.

        Raises:
            RateLimited: its tenant has as many waiting as it may.
            Overloaded: too many are alive, and its tenant has its part of them.
        """
        tenant = self._tenants.get(request.tenant) or _Tenant()
        if request.max_queued and self.num_alive >= self._num_slots and tenant.num_waiting >= request.max_queued:
            raise RateLimited(
                f"{tenant.num_waiting} of the tenant's requests are in the queue, before their first token; at most"
                f" {request.max_queued} are allowed.",
                retry_after_s=min(max(tenant.interval_s, _INTERVALS_S[0]), _INTERVALS_S[1]),
            )
        if self.num_alive >= self.max_live and not self._has_part_left(request.tenant, tenant):
            raise Overloaded(
                f"The server has {self.num_alive} live requests, the maximum.", hint="Try again when some have ended."
            )
        self._tenants[request.tenant] = tenant
        tenant.num_alive += 1
        tenant.num_waiting += 1
        self.num_alive += 1
        self.num_waiting += 1

    def note_began(self, tenant_id: TenantId) -> None:
        """Note the first token of one of the tenant's requests."""
        tenant, now = self._tenants[tenant_id], self._clock()
        tenant.num_waiting -= 1
        self.num_waiting -= 1
        if tenant.num_waiting and tenant.last_began_s is not None:
            tenant.interval_s += _SMOOTHING * (now - tenant.last_began_s - tenant.interval_s)
        tenant.last_began_s = now

    def leave(self, tenant_id: TenantId, *, has_begun: bool) -> None:
        """Note the end of one of the tenant's requests."""
        tenant = self._tenants[tenant_id]
        tenant.num_alive -= 1
        tenant.num_waiting -= not has_begun
        self.num_waiting -= not has_begun
        self.num_alive -= 1
        if not tenant.num_alive:
            del self._tenants[tenant_id]

    def _has_part_left(self, tenant_id: TenantId, tenant: _Tenant) -> bool:
        num_tenants = len(self._tenants) + (tenant_id not in self._tenants)
        return tenant.num_alive < self.max_live // num_tenants and self.num_alive < MAX_OVERFILL * self.max_live
