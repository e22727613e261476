"""GET /api/v1/openapi.json: every route with its body, answers, errors and scope."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.management.payloads.responses import content_etag, header_list, names_etag
from loraserve.api.openapi.document import describe
from loraserve.tenancy.identity.auth import Caller

router = APIRouter(prefix="/api/v1")


@router.get("/openapi.json", response_model=dict[str, Any])
async def get_openapi(request: Request, caller: Caller = Depends(scopes.require(scopes.ADAPTERS_READ))) -> Response:
    """Return this description, as OpenAPI 3.1.

    It's the same for every key, until the server is upgraded.
    """
    state = request.app.state
    if not hasattr(state, "openapi"):
        state.openapi = orjson.dumps(describe(request.app))
    body: bytes = state.openapi
    etag = content_etag(body)
    known = header_list(request, "if-none-match")
    if known is not None and names_etag(known, etag):
        return Response(status_code=304, headers={"ETag": etag})
    return Response(body, headers={"ETag": etag}, media_type="application/json")


__all__ = ["router"]
