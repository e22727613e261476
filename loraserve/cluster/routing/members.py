"""The replicas as one ingress sees them: what they report, and what was sent to them since."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial

import msgspec

from loraserve.cluster.placement import Placement, ReplicaView
from loraserve.cluster.placement.views import spare_places
from loraserve.cluster.routing.routed_request import RoutedRequest
from loraserve.types import Digest, EngineStats, RequestId, Struct, Tier

REPORT = "report"
"""Key of a replica's report in its routing statistics."""
MAX_REPORTED_ADAPTERS = 8192
"""Cap on the adapters that a report names, those used last first."""
_ASSUMED_S = 10.0
"""Seconds that an adapter is taken to be on its way to a replica to which its request was sent."""


class ReplicaReport(Struct, frozen=True):
    """A replica's own account of itself.

    Attributes:
        node_id: machine of the cluster.
        pid, engine_pid: its processes.
        status: why its engine computes nothing now; None: it does.
        ttft_s: mean seconds to the first token of late.
        device, host: digests of the adapters that it has there, those used last first.
    """

    node_id: str
    pid: int
    engine_pid: int | None
    status: str | None
    num_restarts: int
    num_hangs: int
    num_slots: int
    ttft_s: float
    stats: EngineStats
    device: tuple[Digest, ...] = ()
    host: tuple[Digest, ...] = ()


encode_report = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(ReplicaReport).decode


@dataclass(slots=True)
class Member:
    """A running replica.

    Attributes:
        sent: adapters whose requests were sent to it, by the time of the last.
        num_open: requests that this ingress has there.
        num_unreported: requests sent to it since its last report, less those that ended since.
    """

    id: str
    report: ReplicaReport | None = None
    residency: dict[Digest, Tier] = field(default_factory=dict)
    sent: dict[Digest, float] = field(default_factory=dict)
    num_open: int = 0
    num_unreported: int = 0
    encoded: bytes = b""

    def take(self, encoded: bytes) -> bool:
        """Take a report, and return whether it is a new one; no-op if it is the last one again."""
        if encoded == self.encoded:
            return False
        self.encoded = encoded
        self.report = report = decode_report(encoded)
        self.residency = dict.fromkeys(report.host, Tier.HOST) | dict.fromkeys(report.device, Tier.DEVICE)
        self.num_unreported = 0
        return True

    @property
    def num_places(self) -> int:
        """Adapters of the mean size of those in its memory that this holds; 0: unknown."""
        if self.report is None or not self.report.stats.max_device_adapters:
            return 0
        stats = self.report.stats
        mean = (stats.device_adapter_bytes + stats.host_adapter_bytes) / (stats.device_adapters + stats.host_adapters)
        return stats.max_device_adapters + int(stats.host_adapter_budget_bytes / mean)

    @property
    def is_away(self) -> bool:
        """Whether its engine computes nothing now."""
        return self.report is not None and self.report.status is not None

    def is_on(self, node_id: str | None) -> bool:
        """Check whether it is on a machine, as far as that is required."""
        return node_id is None or (self.report is not None and self.report.node_id == node_id)

    def tier(self, digest: Digest, now_s: float) -> Tier:
        """Find the tier in which it has an adapter, counting loads just sent to it."""
        found = self.residency.get(digest)
        if found is not None:
            return found
        return Tier.LOADING if now_s - self.sent.get(digest, -_ASSUMED_S) < _ASSUMED_S else Tier.DISK

    def note_sent(self, digest: Digest | None, now_s: float) -> None:
        """Note a request that was sent to it."""
        self.num_open += 1
        self.num_unreported += 1
        if digest is None:
            return
        self.sent.pop(digest, None)
        self.sent[digest] = now_s
        while self.sent and now_s - next(iter(self.sent.values())) > _ASSUMED_S:
            del self.sent[next(iter(self.sent))]


class Members:
    """The running replicas, and where each request was sent.

    One per process: Serve makes the router, which fills it, and the ingress reads it. Both are on
    the ingress' event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_routed: Counter[str] = Counter(resident=0, prefix=0, hash=0, load=0)
        """Requests sent, by reason: resident, prefix, hash, load."""
        self.on_change: Callable[[frozenset[str], frozenset[str]], object] | None = None
        """Called with the ids of replicas that came, and of those that left."""
        self.on_routed: Callable[[RequestId, str], object] | None = None
        """Called with a request, and the replica that accepted it."""
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._excluded: set[str] = set()
        self._places: dict[RequestId, str] = {}
        self._placement = Placement()
        self._spare: dict[str, int] = {}
        """Room of each for adapters, as of the last reports; empty: not counted since."""

    @property
    def ids(self) -> frozenset[str]:
        """Ids of the replicas that take requests."""
        return frozenset(self._members)

    @property
    def reports(self) -> Mapping[str, ReplicaReport]:
        """The last report of each replica that takes requests."""
        return {one.id: one.report for one in self._members.values() if one.report is not None}

    @property
    def num_hot_versions(self) -> int:
        """Versions whose share of the requests puts them on several replicas."""
        return len(self._placement.hot_versions)

    def num_open(self, replica_id: str) -> int:
        """Count this ingress' requests at a replica."""
        member = self._members.get(replica_id)
        return 0 if member is None else member.num_open

    def update(self, replicas: Iterable[tuple[str, Mapping[str, object]]]) -> None:
        """Take the running replicas, each with its routing statistics."""
        listed = dict(replicas)
        self._excluded &= listed.keys()
        found = {replica_id: stats for replica_id, stats in listed.items() if replica_id not in self._excluded}
        came, left = found.keys() - self._members.keys(), self._members.keys() - found.keys()
        for replica_id in left:
            del self._members[replica_id]
        for replica_id, stats in found.items():
            member = self._members.setdefault(replica_id, Member(replica_id))
            encoded = stats.get(REPORT)
            if isinstance(encoded, bytes) and member.take(encoded):
                self._spare.clear()
        self._tell(frozenset(came), frozenset(left))

    def remove(self, replica_id: str) -> None:
        """Send nothing to a replica any more: it died, or isn't like the others.

        Serve may list a dead one for a while.
        """
        self._excluded.add(replica_id)
        if self._members.pop(replica_id, None) is not None:
            self._tell(frozenset(), frozenset({replica_id}))

    def _tell(self, came: frozenset[str], left: frozenset[str]) -> None:
        if left:
            self._spare.clear()
        if self.on_change is not None and (came or left):
            self.on_change(came, left)

    def order(self, request: RoutedRequest) -> list[str]:
        """Rank the ids of the replicas to try for a request, the best first."""
        if request.target is not None:
            return [request.target] if request.target in self._members else []
        now_s = self._clock()
        members = [one for one in self._members.values() if one.is_on(request.node_id)]
        views = [self._view(member, request, now_s) for member in members]
        order = self._placement.rank(request.placement, views, now_s)
        # stable: those whose engine is being replaced keep their order, behind the others
        return sorted(order, key=lambda one: self._members[one].is_away)

    def note_routed(self, request: RoutedRequest, replica_id: str) -> None:
        """Note that a replica accepted a request."""
        if request.target is not None:
            return
        member = self._members.get(replica_id)
        # one that has left meanwhile has the request all the same
        if member is not None:
            now_s = self._clock()
            self.num_routed[self._reason(request, member, now_s)] += 1
            self._placement.record(request.placement, replica_id, self._idle_views(), now_s)
            member.note_sent(request.digest, now_s)
        self._places[request.request_id] = replica_id
        if self.on_routed is not None:
            self.on_routed(request.request_id, replica_id)

    def place(self, request_id: RequestId) -> str | None:
        """Look up the replica that a request was sent to."""
        return self._places.get(request_id)

    def note_ended(self, request_id: RequestId) -> None:
        """Note that a request has ended, or left its replica."""
        member = self._members.get(self._places.pop(request_id, ""))
        if member is not None:
            member.num_open -= 1
            member.num_unreported -= 1

    def _view(self, member: Member, request: RoutedRequest, now_s: float) -> ReplicaView:
        stats = EngineStats() if member.report is None else member.report.stats
        tier = Tier.DISK if request.digest is None else member.tier(request.digest, now_s)
        return ReplicaView(
            member.id,
            residency={} if request.digest is None or tier is Tier.DISK else {request.digest: tier},
            # other ingresses' requests are in the report alone, and what happened since in none
            running=max(member.num_open, stats.num_running + stats.num_waiting + member.num_unreported),
            count_spare=partial(self._count_spare, member.id),
        )

    def _count_spare(self, replica_id: str) -> int:
        if replica_id not in self._spare:
            self._spare = spare_places({one.id: (one.residency, one.num_places) for one in self._members.values()})
        return self._spare[replica_id]

    def _idle_views(self) -> list[ReplicaView]:
        return [ReplicaView(member.id, num_places=member.num_places) for member in self._members.values()]

    def _reason(self, request: RoutedRequest, member: Member, now_s: float) -> str:
        if request.digest is not None and member.tier(request.digest, now_s) is not Tier.DISK:
            return "resident"
        if self._placement.home(request.placement, self._idle_views()) != member.id:
            return "load"
        return "prefix" if request.digest is None and request.prefixes else "hash"


@cache
def members() -> Members:
    return Members()
