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
from loraserve.api.management.payloads.resources import PageResource, Resource, page_of
from loraserve.api.management.payloads.responses import answer
from loraserve.api.metrics.durations import quantile
from loraserve.api.metrics.version_traffic import Role, TrafficTally, VersionKey
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.auth import Caller

if TYPE_CHECKING:
    from loraserve.registry.catalog.shadow_hours import ShadowHourRecord

router = APIRouter(prefix=f"/adapters/{NAME}")

_reader = scopes.require(scopes.ADAPTERS_READ)

_MIN_MINUTES = int(2 * LIMITS.traffic_slot_s / 60)
_MAX_MINUTES = int(LIMITS.traffic_s / 60)


class DurationsResource(Resource):
    """Percentiles of durations in seconds, each at most 25 % too long."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of_counts(cls, counts: list[int]) -> DurationsResource | None:
        """Return the percentiles; None without a duration."""
        p50, p95, p99 = (quantile(counts, part) for part in (0.5, 0.95, 0.99))
        return None if p50 is None or p95 is None or p99 is None else cls(p50=p50, p95=p95, p99=p99)


class VersionTrafficResource(Resource):
    """Requests that a version answered, or as a shadow ran copies of."""

    version: int
    digest: str
    """Identity of the version: a deleted adapter's name and numbers may be used again."""
    role: Role
    """answer, or shadow."""
    num_requests: int
    """Choices that ended; for a shadow, copies that were compared or failed."""
    num_failed: int
    """Number of them that ended by an error."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_s: DurationsResource | None
    """Time to the first token; a shadow's from the start of its copy. null: none was measured."""
    per_token_s: DurationsResource | None
    """Mean time between tokens, after the first."""

    @classmethod
    def of_tally(cls, key: VersionKey, tally: TrafficTally) -> VersionTrafficResource:
        """Return the resource of a version's sum."""
        return cls(
            version=key.version,
            digest=key.digest,
            role=key.role,
            num_requests=tally.num_requests,
            num_failed=tally.num_failed,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=tally.cached_tokens,
            completion_tokens=tally.completion_tokens,
            first_token_s=DurationsResource.of_counts(tally.first_token_counts),
            per_token_s=DurationsResource.of_counts(tally.per_token_counts),
        )


class TrafficResource(Resource):
    since: datetime
    """Instant from which requests are counted: the beginning of a five-minute slot."""
    at: datetime
    data: list[VersionTrafficResource]
    """Versions with requests, by number."""


@router.get("/traffic", response_model=TrafficResource)
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
        TrafficResource(
            since=datetime.fromtimestamp(traffic.since(60 * minutes), UTC),
            at=datetime.fromtimestamp(services.clock(), UTC),
            data=[VersionTrafficResource.of_tally(key, tally) for key, tally in sums.items()],
        ),
    )


class ShadowHourResource(Resource):
    hour: datetime
    """Its first instant."""
    version: int
    """Version that answered."""
    shadow_version: int
    num_requests: int
    num_failed: int
    """Number of requests that the shadow failed to answer."""
    num_equal: int
    """Number of requests with equal tokens from both."""
    num_tokens: int
    """The answers', of those that the shadow answered too."""
    num_agreed_tokens: int
    """Number of tokens before the first that differs."""
    live_ms: int
    shadow_ms: int
    """Milliseconds from the request to the last token, summed over the requests that both answered.
    """

    @classmethod
    def of_hour(cls, record: ShadowHourRecord) -> ShadowHourResource:
        """Return the resource of an hour, with the fields of its tally."""
        return cls(
            hour=record.hour,
            version=record.version,
            shadow_version=record.shadow_version,
            **asdict(record.tally),
        )


@router.get("/aliases/{alias}/shadow", response_model=PageResource[ShadowHourResource])
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
    return answer(request, page_of(page, ShadowHourResource.of_hour))
