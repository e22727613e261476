"""/v1/batches: requests in a file, computed when no client waits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request

from loraserve.api import scopes
from loraserve.api.batch_lines import ENDPOINTS
from loraserve.api.management.adapters import check_query
from loraserve.api.management.payloads.bodies import Body, read_body
from loraserve.api.openai.files import check_ttl
from loraserve.api.services import services_of
from loraserve.batches.records import BatchRecord, NewBatch
from loraserve.contract.batch import Batch
from loraserve.contract.result import IdPage
from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS
from loraserve.tenancy.identity.auth import Caller

router = APIRouter()

_user = scopes.require(scopes.INFERENCE)
_WINDOW = "24h"


class OutputExpiry(Body):
    anchor: Literal["created_at"]
    seconds: int


class BatchCreate(Body):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None


@router.post("/batches")
async def create_batch(request: Request, caller: Caller = Depends(_user)) -> Batch:
    """Make a batch of a file's requests. It is checked next, and computed within a day.

    Raises:
        InvalidRequest: a field is wrong or unknown; `param` names it.
        FileNotFound: the tenant has no such file.
        QuotaExceeded: too many of the tenant's batches haven't ended.
    """
    services = services_of(request)
    services.check_open()
    body = await read_body(request, BatchCreate)
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint should be one of {', '.join(ENDPOINTS)}.", param="endpoint")
    if body.completion_window != _WINDOW:
        raise InvalidRequest(f'completion_window should be "{_WINDOW}".', param="completion_window")
    _check_metadata(body.metadata)
    expiry = body.output_expires_after
    new = NewBatch(
        body.input_file_id,
        body.endpoint,
        body.completion_window,
        body.metadata,
        None if expiry is None else check_ttl(expiry.seconds, "output_expires_after.seconds"),
    )
    return _batch(await services.batches.create(caller.tenant, new, actor=caller.key_id))


@router.get("/batches")
async def list_batches(
    request: Request,
    caller: Caller = Depends(_user),
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> IdPage[Batch]:
    """List the tenant's batches, the newest first."""
    check_query(request, "limit", "after")
    found = await services_of(request).batches.list(caller.tenant, limit=limit, after=after)
    data = [_batch(record) for record in found.items]
    return IdPage[Batch](
        object="list",
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=found.has_more,
    )


@router.get("/batches/{batch_id}")
async def get_batch(batch_id: str, request: Request, caller: Caller = Depends(_user)) -> Batch:
    """Return how far the batch has come."""
    return _batch(await services_of(request).batches.get(caller.tenant, batch_id))


@router.post("/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, request: Request, caller: Caller = Depends(_user)) -> Batch:
    """Cancel the batch. What is done by then is in its output file.

    Raises:
        BatchNotFound: the tenant has no such batch.
        Conflict: it has ended.
    """
    batch = await services_of(request).batches.cancel(caller.tenant, batch_id, actor=caller.key_id)
    return _batch(batch)


def _check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > LIMITS.max_metadata_pairs:
        raise InvalidRequest(f"metadata should have at most {LIMITS.max_metadata_pairs} pairs.", param="metadata")
    for key, value in metadata.items():
        if len(key) > LIMITS.max_metadata_key_length or len(value) > LIMITS.max_metadata_value_length:
            raise InvalidRequest(
                f"A key of metadata should have at most {LIMITS.max_metadata_key_length} characters, "
                f"a value {LIMITS.max_metadata_value_length}.",
                param="metadata",
            )


def _batch(record: BatchRecord) -> Batch:
    states = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    fields: dict[str, Any] = {f"{state}_at": record.times.get(state) for state in states}
    return Batch.model_validate(
        fields
        | {
            "id": record.id,
            "object": "batch",
            "endpoint": record.endpoint,
            "errors": None if record.errors is None else {"object": "list", "data": record.errors},
            "input_file_id": record.input_file_id,
            "completion_window": record.completion_window,
            "status": record.state,
            "output_file_id": record.output_file_id,
            "error_file_id": record.error_file_id,
            "created_at": int(record.created_at.timestamp()),
            "expires_at": int(record.expires_at.timestamp()),
            "request_counts": {
                "total": record.num_lines,
                "completed": record.num_completed,
                "failed": record.num_failed,
            },
            "usage": _tokens(record),
            "metadata": record.metadata,
        },
        extra="forbid",
    )


def _tokens(record: BatchRecord) -> dict[str, Any]:
    prompt, completion = record.usage.get("prompt_tokens", 0), record.usage.get("completion_tokens", 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": record.usage.get("cached_tokens", 0)},
        "output_tokens": completion,
        # of a batch they aren't counted apart
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
