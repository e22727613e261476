"""Park the flows that can start no request, so that steps don't look at them until that changes.

A flow is parked while all of its requests wait for its adapter, or while admission is paused; it
has nothing running. It is unparked when the pager says that its adapter has changed, when a request
of it comes or goes, when admission is resumed, and every `RETRY_S`, since the pager forgets an
adapter that isn't asked for.

Time spent parked earns no credit: the flow's counter rises as if every pass had visited and skipped
it. Parked flows with the same priority and counter form a group with one counter, which makes a
thousand of them as cheap as one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from loraserve.engine.request import Request
from loraserve.engine.scheduling.fair_queue import AdapterFlow, ParkedCounter, TenantFlow
from loraserve.engine.scheduling.lazy_heap import Key
from loraserve.types import Digest

RETRY_S = 1.0
"""Seconds after which the pager is asked again for the adapter of a parked flow."""
MAX_RETRIES = 16
"""Cap on flows that a step unparks for that, which spreads those of a burst over several steps."""
MAX_PARKED_S = 2.5
"""Seconds after which a flow is unparked whatever the cap;
well below the pager's `STALE_AFTER_S`.
"""


@dataclass(slots=True, eq=False)
class _Group(ParkedCounter):
    """Parked flows of a tenant with one counter.

    Attributes:
        priority: priority of the requests at which a pass skips the flows.
        members: (sequence number of that request, flow), sorted.
        num_pass: the last pass that advanced the counter.
    """

    priority: int = 0
    members: list[tuple[int, AdapterFlow]] = field(default_factory=list)
    num_pass: int = 0

    def split(self, sequence_number: int) -> _Group | None:
        """Keep the members that a pass skips before this request; return the others."""
        index = bisect_left(self.members, (sequence_number,))
        if index == len(self.members):
            return None
        later = _Group(self.virtual_counter, self.priority, self.members[index:], self.num_pass)
        del self.members[index:]
        for _, flow in later.members:
            flow.parked = later
        return later


def _key(group: _Group) -> tuple[int, float]:
    return group.priority, group.virtual_counter


class ParkedFlows:
    """Parked flows of a tenant, as a pass would skip them: by priority, then by counter."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._num_passes = 0

    def __iter__(self) -> Iterator[AdapterFlow]:
        for group in self._groups:
            for _, flow in group.members:
                yield flow

    def __bool__(self) -> bool:
        return bool(self._groups)

    def begin_pass(self) -> None:
        """Let `advance` raise every group's counter once more: a pass skips a flow once."""
        self._num_passes += 1

    def add(self, flow: AdapterFlow, last: Request) -> None:
        """Park a flow that a pass has skipped once it has come to the flow's request ``last``."""
        key = (last.priority, flow.virtual_counter)
        index = bisect_left(self._groups, key, key=_key)
        if index == len(self._groups) or _key(self._groups[index]) != key:
            self._groups.insert(index, _Group(flow.virtual_counter, last.priority))
        group = flow.parked = self._groups[index]
        flow.passed_at = last.sequence_number
        insort(group.members, (last.sequence_number, flow))

    def remove(self, flow: AdapterFlow) -> None:
        """Unpark a flow; it keeps the counter that it was advanced to."""
        group = flow.parked
        if not isinstance(group, _Group):
            return
        del group.members[bisect_left(group.members, (flow.passed_at,))]
        if not group.members:
            index = bisect_left(self._groups, _key(group), key=_key)
            while self._groups[index] is not group:
                index += 1
            del self._groups[index]
        flow.parked = None
        flow.virtual_counter = group.virtual_counter

    def advance(self, key: Key, virtual_counter: float) -> None:
        """Raise the counters of flows that a pass skipped before it served a request.

        Args:
            key: place of that request (`fair_queue.flow_key`).
            virtual_counter: counter of its flow before it was served.
        """
        priority, reached, sequence_number = key
        end = bisect_right(self._groups, (priority, reached), key=_key)
        kept: list[_Group] = []
        advanced: dict[int, _Group] = {}
        for group in self._groups[:end]:
            if group.num_pass == self._num_passes:
                kept.append(group)
                continue
            if _key(group) == (priority, reached):
                later = group.split(int(sequence_number))
                kept += [] if later is None else [later]
                if not group.members:
                    continue
            group.num_pass = self._num_passes
            if group.virtual_counter >= virtual_counter:
                kept.append(group)
            else:
                other = advanced.get(group.priority)
                advanced[group.priority] = group if other is None else _merge(other, group)
        for group in advanced.values():
            group.virtual_counter = virtual_counter
        self._groups[:end] = sorted([*kept, *advanced.values()], key=_key)
        if virtual_counter > reached:
            # the served flow's counter rose after it was given its place in the pass
            self._groups.sort(key=_key)


def _merge(one: _Group, other: _Group) -> _Group:
    if len(one.members) < len(other.members):
        one, other = other, one
    for _, flow in other.members:
        flow.parked = one
    one.members += other.members
    # sequence numbers are unique: flows are never compared
    one.members.sort(key=_sequence_number)
    return one


def _sequence_number(member: tuple[int, AdapterFlow]) -> int:
    return member[0]


class ParkedFlowIndex:
    """Parked flows of all tenants, and what unparks each."""

    def __init__(self) -> None:
        self._parked: dict[TenantFlow, ParkedFlows] = {}
        # when the pager was last asked for their adapters, the longest ago first
        self._asked_s: OrderedDict[AdapterFlow, float] = OrderedDict()
        self._by_adapter: dict[Digest, dict[AdapterFlow, None]] = {}
        self._awaiting_admission: dict[AdapterFlow, None] = {}

    def parked(self, tenant: TenantFlow) -> ParkedFlows:
        """Return a tenant's parked flows."""
        return self._parked.get(tenant) or ParkedFlows()

    def park(self, flow: AdapterFlow, last: Request, now_s: float, *, awaits_admission: bool = False) -> None:
        """Hide a flow from steps until `unpark`.

        Args:
            last: a pass has skipped the flow once it has come to this request of it.
            awaits_admission: whether some of its requests could start if admission weren't paused.
        """
        self._parked.setdefault(flow.tenant, ParkedFlows()).add(flow, last)
        if awaits_admission:
            self._awaiting_admission[flow] = None
        if flow.num_blocked and flow.adapter is not None:
            self._asked_s[flow] = now_s
            self._by_adapter.setdefault(flow.adapter, {})[flow] = None

    def unpark(self, flow: AdapterFlow) -> None:
        """Put a flow back among its tenant's waiting ones; no-op if it isn't parked."""
        if flow.parked is None:
            return
        parked = self._parked[flow.tenant]
        parked.remove(flow)
        if not parked:
            del self._parked[flow.tenant]
        self._awaiting_admission.pop(flow, None)
        if self._asked_s.pop(flow, None) is not None and flow.adapter is not None:
            sharers = self._by_adapter[flow.adapter]
            del sharers[flow]
            if not sharers:
                del self._by_adapter[flow.adapter]
        flow.tenant.waiting_flows.push(flow)

    def unpark_ready(self, changed: Iterable[Digest], now_s: float, *, is_admission_paused: bool) -> None:
        """Unpark the flows that may be able to start a request now.

        Args:
            changed: adapters that arrived, couldn't be loaded or aren't queued for a load any more.
        """
        for adapter in changed:
            for flow in list(self._by_adapter.get(adapter, ())):
                self.unpark(flow)
        self._unpark_for_retry(now_s)
        if not is_admission_paused:
            for flow in list(self._awaiting_admission):
                self.unpark(flow)

    def _unpark_for_retry(self, now_s: float) -> None:
        num_unparked = 0
        while self._asked_s:
            flow, asked_s = next(iter(self._asked_s.items()))
            age_s = now_s - asked_s
            if age_s < RETRY_S or (num_unparked >= MAX_RETRIES and age_s < MAX_PARKED_S):
                return
            self.unpark(flow)
            num_unparked += 1

    def check(self, flows: Iterable[AdapterFlow]) -> list[str]:
        """Return every broken invariant, in words. ``flows``: those of all tenants."""
        parked = {id(flow) for group in self._parked.values() for flow in group}
        if parked != {id(flow) for flow in flows if flow.parked is not None}:
            return ["parked flows are in no group, or groups have flows that aren't parked"]
        return []
