"""GET and DELETE /v1/responses/{response_id}, and the list of its input items."""

from __future__ import annotations

from typing import Any, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.http.request_path import RESPONSE
from loraserve.api.services import services_of
from loraserve.contract.response import DeletedResponse, InputItems
from loraserve.conversations.stored_responses import StoredResponses, response_not_found
from loraserve.errors import InvalidRequest, UnsupportedParameter
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_require_inference = scopes.require(scopes.INFERENCE)
_MAX_PAGE = 100


@router.get(f"/responses/{RESPONSE}", response_model=None)
async def get_response(
    request: Request, response_id: str, stream: bool = False, caller: Caller = Depends(_require_inference)
) -> Response:
    """Return a stored response as it was answered, without log probabilities.

    Raises:
        ResponseNotFound: the tenant has no such response, or its time is over.
        UnsupportedParameter: it should be a stream.
    """
    if stream:
        raise UnsupportedParameter(
            "stream: a response that is complete can't be streamed again.",
            param="stream",
            hint="Send the request without it.",
        )
    response = await _store_of(request).get(caller.tenant, response_id)
    return Response(response.answer, media_type="application/json")


@router.delete(f"/responses/{RESPONSE}")
async def delete_response(
    request: Request, response_id: str, caller: Caller = Depends(_require_inference)
) -> DeletedResponse:
    """Delete a stored response. Responses that continue it can't be continued any more.

    Raises:
        ResponseNotFound: the tenant has no such response.
    """
    await _store_of(request).delete(caller.tenant, response_id)
    return DeletedResponse(id=response_id, object="response", deleted=True)


@router.get(f"/responses/{RESPONSE}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    limit: int = Query(default=20, ge=1, le=_MAX_PAGE),
    order: Literal["asc", "desc"] = "desc",
    after: str | None = Query(default=None, max_length=256),
    caller: Caller = Depends(_require_inference),
) -> InputItems:
    """Return the response's own input items, the last ones first unless the order says otherwise.

    Raises:
        ResponseNotFound: the tenant has no such response.
        InvalidRequest: it has no item with the id in `after`.
    """
    response = await _store_of(request).get(caller.tenant, response_id)
    items: list[dict[str, Any]] = orjson.loads(response.input)
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequest("after isn't the id of an item of this response.", param="after")
        start = ids.index(after) + 1
    page = items[start : start + limit]
    return InputItems(
        object="list",
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=start + limit < len(items),
    )


def _store_of(request: Request) -> StoredResponses:
    store = services_of(request).responses
    if store is None:
        raise response_not_found()
    return store
