"""Requests of the last hour by the version that answered them, so that versions can be compared."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from loraserve.api.metrics.durations import bucket, empty_counts
from loraserve.limits import LIMITS, Limits
from loraserve.types import AdapterRef, Digest, TenantId


class Role(StrEnum):
    """Part that a version had in a request."""

    ANSWER = "answer"
    SHADOW = "shadow"


class VersionKey(NamedTuple):
    """Version of an adapter in one role.

    The digest distinguishes it from the version of an adapter of that name that was deleted.
    """

    name: str
    version: int
    digest: Digest
    role: Role


@dataclass(slots=True)
class TrafficTally:
    """Sum of requests that ended."""

    num_requests: int = 0
    num_failed: int = 0
    """Number of them that ended by an error."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_counts: list[int] = field(default_factory=empty_counts)
    """Requests by their time to the first token."""
    per_token_counts: list[int] = field(default_factory=empty_counts)
    """Requests by their mean time between tokens, after the first."""

    def add(self, ended: EndedRequest) -> None:
        """Count a request."""
        self.num_requests += 1
        self.num_failed += ended.is_failure
        self.prompt_tokens += ended.prompt_tokens
        self.cached_tokens += ended.cached_tokens
        self.completion_tokens += ended.completion_tokens
        if ended.first_token_s is not None:
            self.first_token_counts[bucket(ended.first_token_s)] += 1
        if ended.per_token_s is not None:
            self.per_token_counts[bucket(ended.per_token_s)] += 1

    def merge(self, other: TrafficTally) -> None:
        """Add another sum to this one."""
        for name in ("num_requests", "num_failed", "prompt_tokens", "cached_tokens", "completion_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("first_token_counts", "per_token_counts"):
            pairs = zip(getattr(self, name), getattr(other, name), strict=True)
            setattr(self, name, [mine + theirs for mine, theirs in pairs])


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """Choice of a request, at its end."""

    is_failure: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_s: float | None
    """Seconds until the first token; None: none came, or no client waited for it."""
    per_token_s: float | None
    """Mean seconds between tokens, after the first; None: there were no two."""


class VersionTraffic:
    """Sums by version and by slots of some minutes, of the last hour.

    An owner's own requests alone are counted: those of a tenant with a grant are that tenant's
    affair. Of more versions than `Limits.max_traffic_versions`, the tenant that has the most loses
    the one that it used longest ago, so that none pushes out another's.
    """

    def __init__(self, *, limits: Limits = LIMITS, clock: Callable[[], float] = time.time) -> None:
        self._limits = limits
        self._clock = clock
        # of each tenant, the version used last comes last; slot number → sum, the oldest first
        self._tenants: dict[TenantId, OrderedDict[VersionKey, OrderedDict[int, TrafficTally]]] = {}
        self._num_versions = 0

    def add(self, tenant: TenantId, adapter: AdapterRef | None, role: Role, ended: EndedRequest) -> None:
        """Count a request for a version; no-op for the base, sums, and what isn't a version."""
        if adapter is None or adapter.parts or adapter.is_ephemeral or adapter.tenant != tenant:
            return
        versions = self._tenants.setdefault(tenant, OrderedDict())
        key = VersionKey(adapter.name, adapter.version, adapter.digest, role)
        slots = versions.get(key)
        if slots is None:
            slots = versions[key] = OrderedDict()
            self._num_versions += 1
        versions.move_to_end(key)
        slot = int(self._clock() // self._limits.traffic_slot_s)
        slots.setdefault(slot, TrafficTally()).add(ended)
        self._forget(slots, self._first_slot(self._limits.traffic_s))
        while self._num_versions > self._limits.max_traffic_versions:
            self._drop_one()

    def since(self, seconds: float) -> float:
        """Compute the beginning of the oldest slot that `of` counts, in seconds since 1970."""
        return self._first_slot(seconds) * self._limits.traffic_slot_s

    def of(self, tenant: TenantId, name: str, seconds: float) -> dict[VersionKey, TrafficTally]:
        """Sum the adapter's versions: over the slots of that many seconds, and this."""
        first = self._first_slot(seconds)
        sums: dict[VersionKey, TrafficTally] = {}
        for key, slots in self._tenants.get(tenant, {}).items():
            if key.name != name:
                continue
            for slot, tally in slots.items():
                if slot >= first:
                    sums.setdefault(key, TrafficTally()).merge(tally)
        return dict(sorted(sums.items()))

    def _first_slot(self, seconds: float) -> int:
        return int((self._clock() - seconds) // self._limits.traffic_slot_s) + 1

    @staticmethod
    def _forget(slots: OrderedDict[int, TrafficTally], first: int) -> None:
        """Drop the slots before `first`."""
        while slots and next(iter(slots)) < first:
            slots.popitem(last=False)

    def _drop_one(self) -> None:
        tenant = max(self._tenants, key=lambda one: len(self._tenants[one]))
        self._tenants[tenant].popitem(last=False)
        self._num_versions -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]
