"""Order tenants, and each tenant's adapters, by virtual token counters (VTC).

A flow's counter is what was computed for it, in prompt tokens; a tenant's is divided by its weight.
The flow with the lowest counter is next. A flow that comes back with nothing waiting is advanced to
the lowest counter of those that wait, a tenant's less a few steps' worth (`max_credit`): time spent
idle earns no more credit than two or three requests that come close together need. What a tenant
gets is divided among its adapters in the same way, so that ten adapters have one tenant's share.

One thread at a time. Nothing here knows of memory, of steps, or of adapters that aren't resident.

Source: Sheng et al., Fairness in Serving Large Language Models (arXiv:2401.00588).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from loraserve.engine.request import Request
from loraserve.engine.scheduling.lazy_heap import Key, LazyHeap
from loraserve.types import Digest, RequestId, TenantId

_ORDER = attrgetter("order")

PROMPT_COST = 1.0
"""Cost of a computed prompt token; one that is found in the prefix cache costs nothing."""
OUTPUT_COST = 2.0
"""Cost of a sampled token: a row of its own, in a step that reads all weights for few rows."""
MAX_REMEMBERED = 4096
"""Cap on idle flows that keep their counters, beside as many as are live."""
RECENT_S = 10.0
"""Seconds for which service counts as recent, and up to twice as long."""
MAX_LIGHT_REQUESTS = 8
"""Waiting requests at which a tenant's queue isn't short any more."""
AVERAGED_S = 0.1
"""Seconds between two averages of all tenants' recent service."""


@dataclass(slots=True, eq=False)
class ParkedCounter:
    """A counter that several parked flows share (`blocked.ParkedFlows`)."""

    virtual_counter: float


@dataclass(slots=True, eq=False)
class AdapterFlow:
    """A tenant's requests for one adapter: what was computed for them, and those that wait.

    Attributes:
        adapter: digest of the adapter; None is the base.
        own_counter: the counter, unless the flow is parked.
        waiting: waiting requests, sorted by `Request.order`.
        unblocked: those of `waiting` that don't wait for their adapter.
        num_live: waiting and running requests.
        num_pinned: waiting requests that hold their adapter's pin.
        num_pins: waiting and running ones that do.
        memory_share: part of the device's memory that the pinned adapter takes.
        rank: key in `TenantFlow.waiting_flows`.
        parked: the counter that the flow shares while it is parked.
        passed_at: sequence number of the request at which a pass skips the flow while it is parked.
    """

    tenant: TenantFlow
    adapter: Digest | None
    own_counter: float = 0.0
    waiting: list[Request] = field(default_factory=list, repr=False)
    unblocked: list[Request] = field(default_factory=list, repr=False)
    num_live: int = 0
    num_pinned: int = 0
    num_pins: int = 0
    memory_share: float = 0.0
    rank: Key | None = None
    parked: ParkedCounter | None = field(default=None, repr=False)
    passed_at: int = 0

    @property
    def virtual_counter(self) -> float:
        """Service of the adapter in prompt tokens, as advanced over time spent idle or blocked."""
        return self.own_counter if self.parked is None else self.parked.virtual_counter

    @virtual_counter.setter
    def virtual_counter(self, virtual_counter: float) -> None:
        self.own_counter = virtual_counter

    @property
    def num_blocked(self) -> int:
        """Number of requests that wait for their adapter."""
        return len(self.waiting) - len(self.unblocked)

    def charge(self, cost: float) -> None:
        """Add a cost to the counters of the adapter and of its tenant.

        It is negative for a token that isn't computed after all.
        """
        tenant = self.tenant
        weighted = cost / tenant.weight
        self.own_counter = self.virtual_counter + cost
        tenant.virtual_counter += weighted
        tenant.total_service += weighted


@dataclass(slots=True, eq=False)
class TenantFlow:
    """A tenant's service by its weight, and what its requests hold.

    Attributes:
        kv_share: part of the memory for KV blocks and adapters that the tenant may hold.
        virtual_counter: weighted service, as advanced over time spent idle or blocked.
        total_service: weighted service, never advanced.
        flows: flows by adapter.
        waiting_flows: flows with a waiting request, except those of the present pass and parked
            ones.
        num_blocks: KV blocks of the tenant's requests; one that several share is counted for each.
        adapter_share: part of the device's memory that its requests' pinned adapters take.
        is_recent: whether the tenant had a request lately.
        is_internal: whether these are the engine's own requests, which are queued like a tenant's
            and have no quota.
        last_counter: counter of the adapter that was the last to have a request waiting.
        span_service: total service at the start of the present span of `RECENT_S`.
        service_before: total service at the start of the span before.
    """

    tenant_id: TenantId
    weight: float = 1.0
    kv_share: float = 1.0
    virtual_counter: float = 0.0
    total_service: float = 0.0
    flows: dict[Digest | None, AdapterFlow] = field(default_factory=dict, repr=False)
    num_live: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    adapter_share: float = 0.0
    is_recent: bool = False
    is_internal: bool = False
    waiting_flows: LazyHeap[AdapterFlow] = field(default_factory=lambda: LazyHeap(_adapter_key), repr=False)
    rank: Key | None = None
    last_counter: float = 0.0
    span_service: float = 0.0
    service_before: float = 0.0

    @property
    def recent_service(self) -> float:
        """Weighted service of the last `RECENT_S` to twice that."""
        return self.total_service - self.service_before


def flow_key(flow: AdapterFlow) -> Key | None:
    """Return a flow's place in its tenant's order: by priority, then counter, then age."""
    if not flow.waiting:
        return None
    first = flow.waiting[0]
    return first.priority, flow.virtual_counter, first.sequence_number


def _adapter_key(flow: AdapterFlow) -> Key | None:
    return None if flow.parked is not None else flow_key(flow)


def _tenant_key(tenant: TenantFlow) -> Key | None:
    """Return a tenant's place: least counter, then fewest running requests by its weight."""
    if not tenant.num_waiting:
        return None
    return tenant.virtual_counter, tenant.num_running / tenant.weight, 0


class FairQueue:
    """Tenants with a live request, and idle ones that may come back.

    Attributes:
        waiting_tenants: tenants with a waiting request, except those of the present pass.
        num_tenants: tenants with a live request.
        total_weight: weights of these, summed.
    """

    def __init__(self, max_credit: float) -> None:
        """Make an empty queue.

        Args:
            max_credit: cost by which a tenant that comes back may have had less than the least of
                the others.
        """
        self.waiting_tenants: LazyHeap[TenantFlow] = LazyHeap(_tenant_key)
        self.num_tenants = 0
        self.total_weight = 0.0
        self._max_credit = max_credit
        self._tenants: dict[TenantId, TenantFlow] = {}
        self._flows: dict[RequestId, AdapterFlow] = {}
        # counter of the tenant that was the last to have a request waiting
        self._last_counter = 0.0
        self._num_recent = 0
        self._aged_at_s = -math.inf
        self._averaged_at_s = -math.inf
        self._mean_recent_service = 0.0
        self._num_light = 0

    def flow(self, request: Request) -> AdapterFlow:
        """Return the flow of a live request."""
        return self._flows[request.request_id]

    def tenant(self, request: Request) -> TenantFlow:
        """Return the tenant of a live request."""
        return self._flows[request.request_id].tenant

    def tenants(self, requests: Iterable[Request]) -> set[TenantFlow]:
        """Return the tenants of live requests."""
        return {self._flows[request.request_id].tenant for request in requests}

    @property
    def flows(self) -> Iterator[AdapterFlow]:
        """Flows of all tenants."""
        for tenant in self._tenants.values():
            yield from tenant.flows.values()

    def open(self, request: Request) -> AdapterFlow:
        """Count a new request in its flow until `close`, and return the flow.

        The request's weight and KV share are its tenant's from now on.
        """
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            if len(self._tenants) >= 2 * self.num_tenants + MAX_REMEMBERED:
                self._tenants = {key: kept for key, kept in self._tenants.items() if kept.num_live}
                self._num_recent = sum(kept.is_recent for kept in self._tenants.values())
            tenant = self._tenants[request.tenant] = TenantFlow(request.tenant, is_internal=request.is_internal)
        if not tenant.is_internal:
            self._count_tenant(tenant, request.weight, request.kv_share)
        adapter = None if request.adapter is None else request.adapter.digest
        flow = tenant.flows.get(adapter)
        if flow is None:
            if len(tenant.flows) >= 2 * tenant.num_live + MAX_REMEMBERED:
                tenant.flows = {key: kept for key, kept in tenant.flows.items() if kept.num_live}
            flow = tenant.flows[adapter] = AdapterFlow(tenant, adapter)
        self._flows[request.request_id] = flow
        tenant.num_live += 1
        flow.num_live += 1
        if request.pin is not None:
            # a probe's, which has no share
            self._count_pin(flow, 0.0)
        return flow

    def _count_tenant(self, tenant: TenantFlow, weight: float, kv_share: float) -> None:
        if tenant.num_live:
            self.total_weight -= tenant.weight
        else:
            self.num_tenants += 1
        if not tenant.is_recent:
            tenant.is_recent = True
            self._num_recent += 1
        tenant.weight, tenant.kv_share = weight, kv_share
        self.total_weight += weight

    def note_pinned(self, request: Request, memory_share: float) -> None:
        """Count the pin that a waiting request has taken on its adapter, until `close`.

        Args:
            memory_share: part of the device's memory that the adapter takes.
        """
        flow = self.flow(request)
        flow.num_pinned += request.is_fair_queued
        self._count_pin(flow, memory_share)

    def _count_pin(self, flow: AdapterFlow, memory_share: float) -> None:
        flow.num_pins += 1
        if flow.num_pins == 1:
            flow.memory_share = memory_share
            flow.tenant.adapter_share += memory_share

    def _discount_pin(self, flow: AdapterFlow) -> None:
        flow.num_pins -= 1
        if flow.num_pins == 0:
            flow.tenant.adapter_share -= flow.memory_share

    def close(self, request: Request) -> None:
        """Drop a request that has ended, while it still has its pin.

        Counters of a tenant's adapters are reset once it is idle, those of tenants once all are.
        """
        flow = self._flows.pop(request.request_id)
        tenant = flow.tenant
        tenant.num_live -= 1
        flow.num_live -= 1
        if request.pin is not None:
            self._discount_pin(flow)
        if tenant.num_live == 0:
            if not tenant.is_internal:
                self.num_tenants -= 1
                self.total_weight -= tenant.weight
            tenant.flows.clear()
            tenant.waiting_flows.clear()
            # also drops the rounding errors of the sum
            tenant.last_counter = tenant.adapter_share = 0.0
        if not self._flows:
            # also drops the rounding errors of the sum
            self.total_weight = self._last_counter = 0.0
            self.waiting_tenants.clear()
            for idle in self._tenants.values():
                idle.virtual_counter = 0.0

    def add(self, request: Request) -> None:
        """Let a request wait."""
        flow = self.flow(request)
        tenant = flow.tenant
        if not tenant.num_waiting:
            least = self.waiting_tenants.peek()
            reached = self._last_counter if least is None else least.virtual_counter
            tenant.virtual_counter = max(tenant.virtual_counter, reached - self._max_credit)
        if not flow.waiting:
            others = (other.virtual_counter for other in tenant.flows.values() if other.waiting)
            flow.virtual_counter = max(flow.virtual_counter, min(others, default=tenant.last_counter))
        insort(flow.waiting, request, key=_ORDER)
        insort(flow.unblocked, request, key=_ORDER)
        flow.num_pinned += request.pin is not None
        tenant.num_waiting += 1
        tenant.waiting_flows.push(flow)
        self.waiting_tenants.push(tenant)

    def remove(self, request: Request) -> None:
        """Take out a waiting request."""
        flow = self.flow(request)
        tenant = flow.tenant
        flow.waiting.remove(request)
        if request.adapter_wait_started_s is None:
            flow.unblocked.remove(request)
        flow.num_pinned -= request.pin is not None
        tenant.num_waiting -= 1
        if not flow.waiting:
            tenant.last_counter = flow.virtual_counter
        if not tenant.num_waiting:
            self._last_counter = tenant.virtual_counter

    def block(self, request: Request) -> None:
        """Note that a waiting request waits for its adapter."""
        self.flow(request).unblocked.remove(request)

    def unblock(self, request: Request) -> None:
        """Note that a waiting request doesn't wait for its adapter any more."""
        insort(self.flow(request).unblocked, request, key=_ORDER)

    def is_over_share(self, tenant: TenantFlow, now_s: float) -> bool:
        """Return whether a tenant had more than others lately, and one of these has few requests.

        That is: its recent service is above the mean, and that of a tenant with a short queue is
        below half of it. Requests of the latter may come at any moment, and shouldn't find a step
        full of the former's prompts.
        """
        if self._num_recent < 2:
            return False
        if now_s - self._averaged_at_s >= AVERAGED_S:
            self._averaged_at_s = now_s
            recent = [one for one in self._tenants.values() if one.is_recent]
            total = sum(one.recent_service * one.weight for one in recent)
            self._mean_recent_service = total / sum(one.weight for one in recent)
            low = self._mean_recent_service / 2
            self._num_light = sum(one.num_waiting < MAX_LIGHT_REQUESTS and one.recent_service < low for one in recent)
        return tenant.recent_service > self._mean_recent_service and self._num_light > 0

    def age(self, now_s: float) -> None:
        """Begin another span of recent service once the present one is `RECENT_S` old."""
        if now_s - self._aged_at_s < RECENT_S:
            return
        self._aged_at_s = now_s
        for tenant in self._tenants.values():
            tenant.service_before, tenant.span_service = tenant.span_service, tenant.total_service
            tenant.is_recent = not tenant.is_internal and (tenant.num_live > 0 or tenant.recent_service > 0.0)
        self._num_recent = sum(tenant.is_recent for tenant in self._tenants.values())

    def check(self) -> list[str]:
        """Return every broken invariant, in words."""
        problems = [problem for tenant in self._tenants.values() for problem in _check_tenant(tenant)]
        live = [tenant for tenant in self._tenants.values() if tenant.num_live]
        tenants = [tenant for tenant in live if not tenant.is_internal]
        if len(tenants) != self.num_tenants or sum(one.num_live for one in live) != len(self._flows):
            problems.append("tenants with live requests are miscounted")
        if not math.isclose(sum(one.weight for one in tenants), self.total_weight, abs_tol=1e-6):
            problems.append(f"weights add up to {self.total_weight}")
        return problems


def _check_tenant(tenant: TenantFlow) -> list[str]:
    flows = tenant.flows.values()
    counts = (
        (tenant.num_live, sum(flow.num_live for flow in flows), "live requests"),
        (tenant.num_waiting, sum(len(flow.waiting) for flow in flows), "waiting requests"),
    )
    name = f"tenant {tenant.tenant_id}"
    problems = [f"{name}: {what}: {a} and {b}" for a, b, what in counts if a != b]
    ranks = [tenant.rank] if tenant.num_waiting else []
    ranks += [flow.rank for flow in flows if flow.waiting and flow.parked is None]
    if None in ranks:
        problems.append(f"{name} waits and is in no heap")
    for flow in flows:
        unblocked = [request for request in flow.waiting if request.adapter_wait_started_s is None]
        if unblocked != flow.unblocked or flow.num_pinned != sum(one.pin is not None for one in unblocked):
            problems.append(f"{name}: unblocked or pinned requests of {flow.adapter} are miscounted")
        if flow.parked is not None and (not flow.waiting or flow.num_live > len(flow.waiting)):
            problems.append(f"{name}: a parked flow has nothing waiting, or something running")
    share = sum(flow.memory_share for flow in flows if flow.num_pins)
    if not math.isclose(share, tenant.adapter_share, abs_tol=1e-6):
        problems.append(f"{name}: pinned adapters take {share:g}, counted as {tenant.adapter_share:g}")
    if not tenant.num_live and (tenant.num_blocks or tenant.num_running):
        problems.append(f"{name} has no request and holds something")
    return problems
