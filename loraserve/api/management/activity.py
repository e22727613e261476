"""Show what runs now, and what was slow: a tenant's own requests, or for an admin all."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.errors import problem
from loraserve.api.http.sse import EventSource, EventStream, named_event
from loraserve.api.management.adapters import check_query
from loraserve.api.management.payloads.resources import resource_of
from loraserve.api.management.payloads.responses import answer, header_list
from loraserve.api.management.residency import memory_of
from loraserve.api.metrics.durations import DURATION_BOUNDS_S
from loraserve.api.metrics.history import HistoryPoint
from loraserve.api.metrics.slow_requests import DURATION, ORDERS
from loraserve.api.services import Services, services_of
from loraserve.contract.traffic import (
    Durations,
    EngineFigures,
    LiveFigures,
    LiveHistory,
    LivePoint,
    SlowRequest,
    SlowRequests,
)
from loraserve.errors import InvalidRequest, LoraserveError
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_reader = scopes.require(scopes.ADAPTERS_READ)
_EVENTS = "text/event-stream"


@router.get("/live", response_model=LiveFigures)
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


@router.get("/live/history", response_model=LiveHistory)
async def get_live_history(request: Request, caller: Caller = Depends(_reader)) -> Response:
    """Return the last hour's figures: a tenant's own, or for an admin of all.

    They begin with the server, and are its own.
    """
    check_query(request)
    services = services_of(request)
    points = services.history.of(None if caller.sees_all else caller.tenant)
    data = [_live_point(at, point, is_operator=caller.is_operator) for at, point in points]
    return answer(request, LiveHistory(interval_s=LIMITS.history_interval_s, data=data))


def _live_point(at_s: float, point: HistoryPoint, *, is_operator: bool) -> LivePoint:
    return LivePoint(
        at=datetime.fromtimestamp(at_s, UTC),
        tokens_per_s=_figure(point.tokens_per_s),
        requests_per_minute=_figure(point.requests_per_minute),
        num_waiting=round(point.num_waiting),
        num_running=round(point.num_running),
        first_token_s=_durations(point.first_p50, point.first_p95, point.first_p99),
        per_token_s=_durations(point.token_p50, point.token_p95, point.token_p99),
        kv_share=_figure(point.kv_share) if is_operator else None,
        adapters_share=_figure(point.adapters_share) if is_operator else None,
    )


def _figure(number: float) -> float | None:
    """Return a number with four digits, as charts need them, or None where there is none."""
    return None if math.isnan(number) else float(f"{number:.4g}")


def _durations(p50: float, p95: float, p99: float) -> Durations | None:
    if math.isnan(p50):
        return None
    return Durations(p50=float(f"{p50:.4g}"), p95=float(f"{p95:.4g}"), p99=float(f"{p99:.4g}"))


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


def _figures(services: Services, caller: Caller) -> LiveFigures:
    tally = services.metrics.activity.of(None if caller.sees_all else caller.tenant)
    engine = services.engine
    return LiveFigures(
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


def _engine_figures(services: Services) -> EngineFigures:
    stats = services.engine.stats
    return resource_of(
        EngineFigures,
        stats,
        num_restarts=services.engine.num_restarts,
        max_num_seqs=services.settings.max_num_seqs,
        memory=memory_of(stats),
    )


@router.get("/requests/slow", response_model=SlowRequests)
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
    return answer(request, SlowRequests(data=[resource_of(SlowRequest, one, tenant=one.tenant_name) for one in found]))
