"""Compare an alias's shadow with the version that answers."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.management.payloads.resources import PageResource, Resource, page_of
from loraserve.api.management.payloads.responses import answer
from loraserve.api.services import services_of
from loraserve.tenancy.identity.auth import Caller

if TYPE_CHECKING:
    from loraserve.registry.catalog.shadow_hours import ShadowHourRecord

router = APIRouter(prefix="/adapters/{name}/aliases/{alias}")

_reader = scopes.require(scopes.ADAPTERS_READ)


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


@router.get("/shadow", response_model=PageResource[ShadowHourResource])
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
