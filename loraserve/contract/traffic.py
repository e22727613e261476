"""Requests of late: by version, running now, and slow."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from loraserve.contract.residency import Memory
from loraserve.contract.result import Result, one_of


class Durations(Result):
    """Percentiles of durations in seconds, each at most 25 % too long."""

    p50: float
    p95: float
    p99: float


class VersionTraffic(Result):
    """Requests that a version answered, or as a shadow ran copies of."""

    version: int
    digest: str
    """Identity of the version: a deleted adapter's name and numbers may be used again."""
    role: Annotated[str, one_of("answer", "shadow")]
    num_requests: int
    """Choices that ended; for a shadow, copies that were compared or failed."""
    num_failed: int
    """Number of them that ended by an error."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_s: Durations | None
    """Time to the first token; a shadow's from the start of its copy. None: none was measured."""
    per_token_s: Durations | None
    """Mean time between tokens, after the first."""


class Traffic(Result):
    """An adapter's requests by the version that answered, of the tenant's own and one server."""

    since: datetime
    """Instant from which requests are counted: the beginning of a five-minute slot."""
    at: datetime
    data: list[VersionTraffic]
    """Versions with requests, by number."""


class EngineFigures(Result):
    """The engine's load by its last heartbeat, of all tenants together."""

    num_running: int
    num_waiting: int
    num_waiting_for_adapter: int
    num_kv_blocks: int
    num_kv_blocks_used: int
    num_kv_blocks_cached: int
    num_steps: int
    step_s: float
    num_preemptions: int
    adapter_loads: int
    device_evictions: int
    num_restarts: int
    max_num_seqs: int
    memory: Memory


class LiveFigures(Result):
    """Requests of the caller's tenant, or of all; all but the first five only rise.

    They start at 0 with the server.
    """

    at: datetime
    is_ready: bool
    status: str | None
    """Reason why nothing is computed, or the thing that is waited for; None: none."""
    num_waiting: int
    """Requests before their first token."""
    num_running: int
    num_ended: int
    num_failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    bounds_s: list[float]
    """Upper bounds of the buckets in the next two fields, which have one more: the rest."""
    first_token_counts: list[int]
    """Requests by their time to the first token."""
    per_token_counts: list[int]
    """Answers by their mean time between tokens, after the first."""
    engine: EngineFigures | None
    """None for a tenant's key: it would reveal what other tenants do."""


class LivePoint(Result):
    """Requests of the caller's tenant, or of all, until an instant of the last hour."""

    at: datetime
    tokens_per_s: float | None
    """None: there is no point before."""
    requests_per_minute: float | None
    """Requests that ended in the last minute."""
    num_waiting: int
    num_running: int
    first_token_s: Durations | None
    """Time to the first token over the last minute; None: no request had one."""
    per_token_s: Durations | None
    """Mean time between tokens, likewise."""
    kv_share: float | None
    """Part of the device's memory that keys and values take; None for a tenant's key."""
    adapters_share: float | None


class LiveHistory(Result):
    """The last hour, or the time since the server started, oldest first."""

    interval_s: float
    """Seconds between two points."""
    data: list[LivePoint]


class SlowRequest(Result):
    """A request that took long, and the times of its parts."""

    id: str
    """Id of the answer, as its body had it."""
    tenant: str
    started_at: datetime
    asked: str
    """Model that was asked for."""
    answered_by: str
    """Version that answered, or the base."""
    outcome: str
    """stop, length, abort (the client disconnected), or the code of an error."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    """Seconds in the queue, as in ``Server-Timing``."""
    adapter_s: float
    """Seconds of waiting for the adapter's weights."""
    adapter_tier: str
    """Tier of the weights when the request came (device, host, disk); empty: unknown, or none."""
    adapter_read_s: float
    """Part of `adapter_s` in which its files were read, checked and packed."""
    prefill_s: float
    """Seconds of computing the prompt."""
    first_token_s: float | None
    """Seconds until the first token; None: none came."""
    duration_s: float


class SlowRequests(Result):
    data: list[SlowRequest]
