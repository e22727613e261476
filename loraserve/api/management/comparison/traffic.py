"""Compare versions of an adapter by the requests that each answered, and by copies on a shadow."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.http.request_path import NAME
from loraserve.api.management.adapters import check_query
from loraserve.api.management.payloads.resources import page_of, resource_of
from loraserve.api.management.payloads.responses import answer
from loraserve.api.metrics.durations import quantile
from loraserve.api.metrics.version_traffic import TrafficTally, VersionKey
from loraserve.api.services import services_of
from loraserve.contract.alias import ShadowHour
from loraserve.contract.result import Page
from loraserve.contract.traffic import Durations, Traffic, VersionTraffic
from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.auth import Caller

if TYPE_CHECKING:
    from loraserve.registry.catalog.shadow_hours import ShadowHourRecord

router = APIRouter(prefix=f"/adapters/{NAME}")

_reader = scopes.require(scopes.ADAPTERS_READ)

_MIN_MINUTES = int(2 * LIMITS.traffic_slot_s / 60)
_MAX_MINUTES = int(LIMITS.traffic_s / 60)


@router.get("/traffic", response_model=Traffic)
async def get_traffic(
    name: str,
    request: Request,
    minutes: int = _MAX_MINUTES,
    caller: Caller = Depends(_reader),
) -> Response:
    """Sum the requests of the last minutes (10 to 60) by the version that answered them.

    The tenant's own requests alone are counted, by this server, since it started. Sums of adapters
    count for none.
    """
    check_query(request, "minutes")
    if not _MIN_MINUTES <= minutes <= _MAX_MINUTES:
        raise InvalidRequest(f"minutes should be between {_MIN_MINUTES} and {_MAX_MINUTES}.", param="minutes")
    services = services_of(request)
    adapter = await services.registry.get(caller.tenant, name)
    traffic = services.metrics.activity.traffic
    sums = traffic.of(caller.tenant, adapter.name, 60 * minutes)
    return answer(
        request,
        Traffic(
            since=datetime.fromtimestamp(traffic.since(60 * minutes), UTC),
            at=datetime.fromtimestamp(services.clock(), UTC),
            data=[_version_traffic(key, tally) for key, tally in sums.items()],
        ),
    )


@router.get("/aliases/{alias}/shadow", response_model=Page[ShadowHour])
async def list_shadow_hours(
    name: str,
    alias: str,
    request: Request,
    limit: int = 50,
    cursor: str | None = None,
    caller: Caller = Depends(_reader),
) -> Response:
    """List the hours in which copies ran on the alias's shadow version, newest first."""
    page = await services_of(request).registry.shadow_hours.list(caller.tenant, name, alias, limit=limit, cursor=cursor)
    return answer(request, page_of(page, _shadow_hour))


def _version_traffic(key: VersionKey, tally: TrafficTally) -> VersionTraffic:
    return resource_of(
        VersionTraffic,
        tally,
        version=key.version,
        digest=key.digest,
        role=key.role,
        first_token_s=_durations(tally.first_token_counts),
        per_token_s=_durations(tally.per_token_counts),
    )


def _durations(counts: list[int]) -> Durations | None:
    """Compute the percentiles; None without a duration."""
    p50, p95, p99 = (quantile(counts, part) for part in (0.5, 0.95, 0.99))
    return None if p50 is None or p95 is None or p99 is None else Durations(p50=p50, p95=p95, p99=p99)


def _shadow_hour(record: ShadowHourRecord) -> ShadowHour:
    return ShadowHour(
        hour=record.hour, version=record.version, shadow_version=record.shadow_version, **asdict(record.tally)
    )
