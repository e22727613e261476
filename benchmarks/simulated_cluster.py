"""A cluster of replicas as a discrete-event simulation: the same requests, costs and policy give
the same numbers, whatever the machine does meanwhile.

A replica has slots for sequences that run in steps, memory for adapters in two tiers (what falls
off the device goes to the host, what falls off the host is gone), two threads that load, and a
prefix cache. A step takes what a step of so many sequences was measured to take, and what its
prompts take. A router sees residency as it was reported last, and loads as they are: it sent the
requests itself.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from benchmarks.placement_costs import Costs
from loraserve.cluster.placement import PlacementRequest, ReplicaView
from loraserve.cluster.placement.views import spare_places
from loraserve.types import Digest, TenantId, Tier

REPORT_S = 1.0
"""Seconds between two reports of what a replica holds."""
NUM_LOADERS = 2
MAX_STEP_TOKENS = 512
"""Prompt tokens of one step; a longer prompt has a step of its own."""
PREFIXES = 512
"""Prefixes that a replica's cache holds."""


class Policy(Protocol):
    """A way to choose a replica: ours, and those it is compared with."""

    def choose(self, request: SimulatedRequest, replicas: Sequence[SimulatedReplica], now_s: float) -> int:
        """Return the position of the replica that gets the request."""
        ...


@dataclass(slots=True)
class SimulatedRequest:
    number: int
    at_s: float
    adapter: int
    prefix: int
    prefix_tokens: int
    own_tokens: int
    output_tokens: int
    placement: PlacementRequest = field(repr=False)
    tier: str = ""
    """Where its adapter was when it came to its replica: device, host, or disk."""
    is_prefix_hit: bool = False
    replica: int = -1
    first_token_s: float = math.nan
    finished_s: float = math.nan
    num_finishes: int = 0


@dataclass(slots=True)
class SimulatedReplica:
    """One replica's state."""

    number: int
    costs: Costs
    device_slots: int
    host_slots: int
    view: ReplicaView
    device: OrderedDict[int, None] = field(default_factory=OrderedDict)
    host: OrderedDict[int, None] = field(default_factory=OrderedDict)
    reported: dict[Digest, Tier] = field(default_factory=dict)
    """What the view shows: as of the last report."""
    changed: set[int] = field(default_factory=set)
    pins: dict[int, int] = field(default_factory=dict)
    loading: dict[int, list[SimulatedRequest]] = field(default_factory=dict)
    load_queue: deque[tuple[int, float]] = field(default_factory=deque)
    busy_loaders: int = 0
    ready: deque[SimulatedRequest] = field(default_factory=deque)
    running: list[tuple[int, int, SimulatedRequest]] = field(default_factory=list)
    """A heap by the step after which each ends."""
    prefixes: OrderedDict[tuple[int, int], None] = field(default_factory=OrderedDict)
    steps: int = 0
    boundary_s: float = 0.0
    """When step `steps` ended: steps since then take the same time each."""
    step_s: float = 0.0
    event: int = 0
    """Number of the event that is due; older ones are void."""
    is_present: bool = True
    work_s: float = 0.0
    """Seconds of steps that its requests take: each one's part of a full step, and its prompt."""
    pending_tokens: int = 0
    """Prompt tokens of requests whose prompt isn't computed."""
    context_tokens: int = 0
    """Tokens of requests that it has, prompts and answers so far as they were asked for."""
    outstanding_s: float = 0.0
    """Integral of its requests over time."""
    changed_s: float = 0.0

    @property
    def load(self) -> int:
        return self.view.running + self.view.waiting

    def tier_of(self, adapter: int) -> str:
        return "device" if adapter in self.device else "host" if adapter in self.host else "disk"

    def count_time(self, now_s: float) -> None:
        """Add up its requests since the last change; call before they change."""
        self.outstanding_s += self.load * (now_s - self.changed_s)
        self.changed_s = now_s

    def report(self) -> None:
        for adapter in self.changed:
            name = digest_of(adapter)
            tier = self.tier_of(adapter)
            if tier == "disk":
                self.reported.pop(name, None)
            else:
                self.reported[name] = Tier(tier)
        self.changed.clear()

    def put(self, adapter: int) -> None:
        """Put the adapter on the device; what isn't used and longest unused goes to the host."""
        self.host.pop(adapter, None)
        self.device[adapter] = None
        self.device.move_to_end(adapter)
        self.changed.add(adapter)
        if len(self.device) > self.device_slots:
            idle = next((other for other in self.device if not self.pins.get(other) and other != adapter), None)
            if idle is not None:
                del self.device[idle]
                self.host[idle] = None
                self.changed.add(idle)
                if len(self.host) > self.host_slots:
                    self.changed.add(self.host.popitem(last=False)[0])


_DIGESTS: dict[int, Digest] = {}


def digest_of(adapter: int) -> Digest:
    """Return the adapter's digest: any distinct text does."""
    found = _DIGESTS.get(adapter)
    if found is None:
        found = _DIGESTS[adapter] = Digest(f"{adapter:064x}")
    return found


def request_of(adapter: int, prefix: int, adapter_bytes: int) -> PlacementRequest:
    """Return what a placement sees of a request: ten adapters are a tenant's."""
    return PlacementRequest(TenantId(f"tenant-{adapter // 10}"), digest_of(adapter), adapter_bytes, str(prefix))


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A replica that is lost, or one that is added, at a moment."""

    at_s: float
    is_loss: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """State of the present replicas at a moment."""

    at_s: float
    members: tuple[int, ...]
    loads: list[float]
    """Integral of each one's requests since the sample before."""
    work_s: list[float]
    """Work that each was given since it began."""


class Cluster:
    """Replicas, the policy that chooses among them, and what happened."""

    def __init__(
        self,
        num_replicas: int,
        policy: Policy,
        costs: Costs,
        *,
        device_bytes: int,
        host_bytes: int,
        changes: Sequence[MembershipChange] = (),
    ) -> None:
        self.policy = policy
        self.costs = costs
        self.device_slots = max(costs.max_num_seqs + 1, device_bytes // costs.adapter_bytes)
        self.host_slots = host_bytes // costs.adapter_bytes
        self.replicas: list[SimulatedReplica] = []
        self.present: list[SimulatedReplica] = []
        self.now_s = 0.0
        self.loads: list[tuple[float, int, int]] = []
        """Reads of an adapter from the store: when, which adapter, which replica."""
        self.num_promotions = 0
        self.samples: list[Sample] = []
        self.held_at_change: dict[int, set[int]] = {}
        """Replicas that held each adapter when one was lost or added."""
        self.first_after: dict[int, int] = {}
        """Replica of each adapter's first request after that."""
        self.change_s = math.inf
        self.num_resent = 0
        self._events: list[tuple[float, int, str, int, int]] = []
        self._sequence = 0
        self._next_report_s = 0.0
        self._spare: dict[str, int] = {}
        """Room of each for adapters, as of the last reports; empty: not counted since."""
        self._changes = sorted(changes, key=lambda change: change.at_s)
        for _ in range(num_replicas):
            self._add_replica()

    def warm(self, num_adapters: int) -> None:
        """Give each adapter a first load, the least popular first, where an idle cluster's policy
        puts it.

        A measured run then has no load but repeated ones.
        """
        for adapter in reversed(range(num_adapters)):
            request = SimulatedRequest(-1, 0.0, adapter, 0, 0, 0, 0, request_of(adapter, 0, self.costs.adapter_bytes))
            replica = self.present[self.policy.choose(request, self.present, self.now_s)]
            replica.put(adapter)
        for replica in self.present:
            replica.report()

    def run(self, requests: Sequence[SimulatedRequest], sample_s: float = 60.0) -> None:
        """Serve all requests, to the end of the last one."""
        next_sample_s = sample_s
        arrivals = iter(requests)
        arrival = next(arrivals, None)
        while arrival is not None or self._events:
            at_s = min(
                arrival.at_s if arrival is not None else math.inf, self._events[0][0] if self._events else math.inf
            )
            while next_sample_s <= at_s and arrival is not None:
                self._sample(next_sample_s)
                next_sample_s += sample_s
            if self._changes and self._changes[0].at_s <= at_s:
                self.now_s = self._changes[0].at_s
                self._change(self._changes.pop(0))
                continue
            self.now_s = at_s
            if arrival is not None and arrival.at_s == at_s:
                self.send(arrival)
                arrival = next(arrivals, None)
            else:
                self._handle(*heapq.heappop(self._events))

    def send(self, request: SimulatedRequest) -> None:
        """Let the policy choose among the replicas that are there, and give it the request."""
        if self.now_s >= self._next_report_s:
            for replica in self.present:
                replica.report()
            self._spare.clear()
            self._next_report_s = self.now_s + REPORT_S
        replica = self.present[self.policy.choose(request, self.present, self.now_s)]
        adapter = request.adapter
        if self.now_s >= self.change_s and adapter in self.held_at_change:
            self.first_after.setdefault(adapter, replica.number)
        replica.count_time(self.now_s)
        replica.view.waiting += 1
        replica.pending_tokens += request.prefix_tokens + request.own_tokens
        replica.context_tokens += request.prefix_tokens + request.own_tokens + request.output_tokens
        replica.pins[adapter] = replica.pins.get(adapter, 0) + 1
        request.replica = replica.number
        request.tier = "loading" if adapter in replica.loading else replica.tier_of(adapter)
        if request.tier == "device":
            replica.device.move_to_end(adapter)
            replica.ready.append(request)
            self._poke(replica)
        elif request.tier == "loading":
            request.tier = "disk"
            replica.loading[adapter].append(request)
        else:
            replica.loading[adapter] = [request]
            seconds = self.costs.load_s if request.tier == "disk" else self.costs.promote_s
            if request.tier == "disk":
                self.loads.append((self.now_s, adapter, replica.number))
            else:
                self.num_promotions += 1
            replica.load_queue.append((adapter, seconds))
            self._start_loads(replica)

    def _add_replica(self) -> None:
        number = len(self.replicas)
        num_places = self.device_slots + self.host_slots
        view = ReplicaView(
            f"replica-{number}", capacity_bytes=num_places * self.costs.adapter_bytes, num_places=num_places
        )
        replica = SimulatedReplica(number, self.costs, self.device_slots, self.host_slots, view)
        view.residency = replica.reported
        view.count_spare = partial(self._count_spare, view.replica_id)
        replica.changed_s = replica.boundary_s = self.now_s
        self.replicas.append(replica)
        self.present.append(replica)

    def _count_spare(self, replica_id: str) -> int:
        """Return what `ReplicaView.count_spare` does, as of the last report."""
        if replica_id not in self._spare:
            self._spare = spare_places(
                {one.view.replica_id: (one.reported, one.view.num_places) for one in self.present}
            )
        return self._spare[replica_id]

    def _change(self, change: MembershipChange) -> None:
        for replica in self.present:
            for adapter in (*replica.device, *replica.host):
                self.held_at_change.setdefault(adapter, set()).add(replica.number)
        self.change_s = change.at_s
        if not change.is_loss:
            self._add_replica()
            return
        lost = self.present.pop(len(self.present) // 2)
        lost.is_present = False
        lost.count_time(self.now_s)
        orphans = [request for waiting in lost.loading.values() for request in waiting]
        orphans += [*lost.ready, *(request for _, _, request in lost.running)]
        for emptied in (lost.loading, lost.ready, lost.running):
            emptied.clear()
        for request in sorted(orphans, key=lambda one: one.number):
            self.num_resent += 1
            self.send(request)
        lost.view.running = lost.view.waiting = 0

    def _sample(self, at_s: float) -> None:
        """Note what each present replica had on average since the last sample."""
        loads = []
        for replica in self.present:
            replica.count_time(at_s)
            loads.append(replica.outstanding_s)
            replica.outstanding_s = 0.0
        members = tuple(replica.number for replica in self.present)
        self.samples.append(Sample(at_s, members, loads, [replica.work_s for replica in self.present]))

    def _push(self, at_s: float, kind: str, replica: SimulatedReplica, value: int) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at_s, self._sequence, kind, replica.number, value))

    def _handle(self, at_s: float, _: int, kind: str, number: int, value: int) -> None:
        replica = self.replicas[number]
        if not replica.is_present:
            return
        if kind == "loaded":
            replica.busy_loaders -= 1
            replica.put(value)
            replica.ready.extend(replica.loading.pop(value))
            self._start_loads(replica)
            self._poke(replica)
        elif value == replica.event:
            self._step(replica, at_s)

    def _start_loads(self, replica: SimulatedReplica) -> None:
        while replica.load_queue and replica.busy_loaders < NUM_LOADERS:
            adapter, seconds = replica.load_queue.popleft()
            replica.busy_loaders += 1
            self._push(self.now_s + seconds, "loaded", replica, adapter)

    def _poke(self, replica: SimulatedReplica) -> None:
        """Let the replica look at its queue at the end of the step that runs."""
        if not replica.running:
            self._schedule(replica, self.now_s)
        elif len(replica.running) < self.costs.max_num_seqs:
            begun = max(0.0, self.now_s - replica.boundary_s) / replica.step_s
            # a queue that is looked at right at a boundary waits for no step
            self._schedule(replica, replica.boundary_s + math.ceil(begun - 1e-9) * replica.step_s)

    def _schedule(self, replica: SimulatedReplica, at_s: float) -> None:
        replica.event += 1
        self._push(max(at_s, self.now_s), "step", replica, replica.event)

    def _step(self, replica: SimulatedReplica, at_s: float) -> None:
        """End sequences that are complete, start what waits, and foresee the next change."""
        if replica.running:
            replica.steps += max(0, round((at_s - replica.boundary_s) / replica.step_s))
        replica.boundary_s = at_s
        if (replica.running and replica.running[0][0] <= replica.steps) or replica.ready:
            replica.count_time(at_s)
        while replica.running and replica.running[0][0] <= replica.steps:
            self._finish(replica, heapq.heappop(replica.running)[2], at_s)
        tokens, started = 0, []
        while replica.ready and len(replica.running) + len(started) < self.costs.max_num_seqs:
            request = replica.ready[0]
            key = (request.adapter, request.prefix)
            new_tokens = request.own_tokens + (0 if key in replica.prefixes else request.prefix_tokens)
            if started and tokens + new_tokens > MAX_STEP_TOKENS:
                break
            replica.ready.popleft()
            request.is_prefix_hit = key in replica.prefixes
            replica.prefixes[key] = None
            replica.prefixes.move_to_end(key)
            if len(replica.prefixes) > PREFIXES:
                replica.prefixes.popitem(last=False)
            tokens += new_tokens
            replica.device.move_to_end(request.adapter)
            started.append(request)
        if started:
            self._start(replica, started, tokens, at_s)
        elif replica.running:
            replica.step_s = self.costs.step_s(len(replica.running))
            self._schedule(replica, at_s + (replica.running[0][0] - replica.steps) * replica.step_s)

    def _start(self, replica: SimulatedReplica, started: list[SimulatedRequest], tokens: int, at_s: float) -> None:
        """Compute one step with the prompts; each of them has its first token after it."""
        num_running = len(replica.running) + len(started)
        end_s = at_s + self.costs.step_s(num_running) + tokens * self.costs.prefill_s
        full_step_s = self.costs.step_s(self.costs.max_num_seqs) / self.costs.max_num_seqs
        for request in started:
            if math.isnan(request.first_token_s):
                request.first_token_s = end_s
            heapq.heappush(replica.running, (replica.steps + request.output_tokens, request.number, request))
            replica.pending_tokens -= request.prefix_tokens + request.own_tokens
            replica.work_s += request.output_tokens * full_step_s
        replica.work_s += tokens * self.costs.prefill_s
        replica.view.waiting -= len(started)
        replica.view.running += len(started)
        replica.steps += 1
        replica.boundary_s = end_s
        replica.step_s = self.costs.step_s(num_running)
        if replica.ready and num_running < self.costs.max_num_seqs:
            self._schedule(replica, end_s)
        else:
            left = replica.running[0][0] - replica.steps
            self._schedule(replica, end_s + max(0, left) * replica.step_s)

    def _finish(self, replica: SimulatedReplica, request: SimulatedRequest, at_s: float) -> None:
        request.finished_s = at_s
        request.num_finishes += 1
        replica.view.running -= 1
        replica.context_tokens -= request.prefix_tokens + request.own_tokens + request.output_tokens
        pins = replica.pins[request.adapter] - 1
        if pins:
            replica.pins[request.adapter] = pins
        else:
            del replica.pins[request.adapter]
