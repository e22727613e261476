"""Show what runs now, and what was slow: a tenant's own requests, or for an admin all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.errors import problem
from loraserve.api.http.sse import EventSource, EventStream, named_event
from loraserve.api.management.adapters import check_query
from loraserve.api.management.payloads.resources import Resource
from loraserve.api.management.payloads.responses import answer, header_list
from loraserve.api.management.residency import MemoryResource
from loraserve.api.metrics.durations import DURATION_BOUNDS_S
from loraserve.api.metrics.slow_requests import DURATION, ORDERS
from loraserve.api.services import Services, services_of
from loraserve.errors import InvalidRequest, LoraserveError
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_reader = scopes.require(scopes.ADAPTERS_READ)
_EVENTS = "text/event-stream"


class EngineFiguresResource(Resource):
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
    memory: MemoryResource


class LiveResource(Resource):
    """Requests of the caller's tenant, or of all; all but the first five only rise.

    They start at 0 with the server.
    """

    at: datetime
    is_ready: bool
    status: str | None
    """Reason why nothing is computed, or the thing that is waited for; null: none."""
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
    engine: EngineFiguresResource | None
    """null for a tenant's key: it would reveal what other tenants do."""


class SlowRequestResource(Resource):
    id: str
    """Id of the answer, as its body had it."""
    tenant: str = Field(validation_alias="tenant_name")
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
    """Seconds until the first token; null: none came."""
    duration_s: float


class SlowRequestsResource(Resource):
    data: list[SlowRequestResource]


@router.get("/live", response_model=LiveResource)
async def get_live(
    request: Request, interval_s: float = 2.0, once: bool = False, caller: Caller = Depends(_reader)
) -> Response:
    """Return figures of the running requests: a tenant's own, or for an admin of all.

    With ``Accept: text/event-stream``, one event ``figures`` each `interval_s` seconds. The stream
    ends with the event ``end``: after a quarter of an hour, or as the server shuts down; and with
    ``error`` once the key is valid no more. ``?once=true``: the JSON, whatever is accepted.
    """
    check_query(request, "interval_s", "once")
    if not LIMITS.min_live_interval_s <= interval_s <= LIMITS.max_live_interval_s:
        raise InvalidRequest(
            f"interval_s should be between {LIMITS.min_live_interval_s:g} and {LIMITS.max_live_interval_s:g}.",
            param="interval_s",
        )
    services = services_of(request)
    if once or _EVENTS not in (header_list(request, "accept") or ""):
        return answer(request, _figures(services, caller))

    return EventStream(_LiveFigures(request, services, caller, interval_s), {})


class _LiveFigures(EventSource):
    """Figures of the running requests, each few seconds until there is a reason to end."""

    ending = b""

    def __init__(self, request: Request, services: Services, caller: Caller, interval_s: float) -> None:
        self._request, self._services, self._caller, self._interval_s = request, services, caller, interval_s

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the figures.

        Raises:
            AuthenticationError, PermissionDenied, TenantNotFound: the key, or what it sees, is
                gone.
        """
        services, caller = self._services, self._caller
        ends = time.monotonic() + LIMITS.max_live_stream_s
        while True:
            yield named_event("figures", _figures(services, caller).model_dump(mode="json"))
            await asyncio.sleep(self._interval_s)
            if services.is_draining or time.monotonic() > ends:
                yield named_event("end", {"is_draining": services.is_draining})
                return
            caller = await _reader(self._request)

    def failure(self, error: LoraserveError) -> bytes:
        return named_event("error", {"error": problem(error, self._request.state.request_id)})


def _figures(services: Services, caller: Caller) -> LiveResource:
    tally = services.metrics.activity.of(None if caller.sees_all else caller.tenant)
    engine = services.engine
    return LiveResource(
        at=datetime.fromtimestamp(services.clock(), UTC),
        is_ready=engine.is_ready and not services.is_draining,
        status=engine.status,
        num_waiting=tally.num_waiting,
        num_running=tally.num_running,
        num_ended=tally.num_ended,
        num_failed=tally.num_failed,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        completion_tokens=tally.completion_tokens,
        bounds_s=list(DURATION_BOUNDS_S),
        first_token_counts=tally.first_token_counts,
        per_token_counts=tally.per_token_counts,
        engine=_engine_figures(services) if caller.is_operator else None,
    )


def _engine_figures(services: Services) -> EngineFiguresResource:
    stats = services.engine.stats
    own = {"num_restarts", "max_num_seqs", "memory"}
    shared: dict[str, Any] = {name: getattr(stats, name) for name in EngineFiguresResource.model_fields.keys() - own}
    return EngineFiguresResource(
        **shared,
        num_restarts=services.engine.num_restarts,
        max_num_seqs=services.settings.max_num_seqs,
        memory=MemoryResource.of(stats),
    )


@router.get("/requests/slow", response_model=SlowRequestsResource)
async def list_slow_requests(
    request: Request, by: str = DURATION, limit: int = 50, caller: Caller = Depends(_reader)
) -> Response:
    """List the slowest requests of the last hour, slowest first: a tenant's own, or all.

    They are compared `by` ``duration``, or by ``first_token``. Each has the time that it spent in
    the queue, on its adapter and on its prompt. Eight of each minute are kept, on this server
    alone, since it started.
    """
    check_query(request, "by", "limit")
    if by not in ORDERS:
        raise InvalidRequest(f"by should be one of {', '.join(ORDERS)}.", param="by")
    if not 1 <= limit <= LIMITS.max_page_size:
        raise InvalidRequest(f"limit should be between 1 and {LIMITS.max_page_size}.", param="limit")
    slow = services_of(request).metrics.activity.slow
    found = slow.slowest(None if caller.sees_all else caller.tenant, order=by, limit=limit)
    return answer(request, SlowRequestsResource(data=[SlowRequestResource.of(one) for one in found]))
