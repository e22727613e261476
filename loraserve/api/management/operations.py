"""Operations, and the pulls that are some."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.http.request_path import NAME
from loraserve.api.management.payloads.bodies import Body, read_body
from loraserve.api.management.payloads.resources import page_of, resource_of
from loraserve.api.management.payloads.responses import ROOT, answer, answer_once, rendered, respond
from loraserve.api.services import services_of
from loraserve.contract.operation import Operation
from loraserve.contract.result import Page
from loraserve.registry.operations import OperationRecord
from loraserve.tenancy.idempotency import Once, StoredResponse
from loraserve.tenancy.identity.auth import Caller
from loraserve.types import TenantId

router = APIRouter()

_reader = scopes.require(scopes.ADAPTERS_READ)
_writer = scopes.require(scopes.ADAPTERS_WRITE)
_admin = scopes.require(scopes.ADMIN)


class PullCreate(Body):
    source: str
    promote: bool = True


@router.post(f"/adapters/{NAME}/pulls", status_code=202, response_model=Operation)
async def pull_adapter(name: str, request: Request, caller: Caller = Depends(_admin)) -> Response:
    """Have the server fetch an adapter from an allowed hub or bucket, and publish it.

    202 with the operation.
    """
    services = services_of(request)
    services.check_open()
    body = await read_body(request, PullCreate)
    content = f"{body.source}:{body.promote}".encode()

    async def work(once: Once[OperationRecord] | None) -> OperationRecord:
        return await services.registry.pulls.begin(
            caller.tenant, name, body.source, actor=caller.key_id, is_promoting=body.promote, once=once
        )

    return await answer_once(request, caller, content, work, _begun)


def _operation(record: OperationRecord) -> Operation:
    progress = {"bytes_done": record.bytes_done, "bytes_total": record.bytes_total}
    return resource_of(Operation, record, progress=progress)


def _begun(record: OperationRecord) -> StoredResponse:
    return rendered(_operation(record), status=202, location=f"{ROOT}/operations/{record.id}")


@router.get("/operations", response_model=Page[Operation])
async def list_operations(
    request: Request, limit: int = 50, cursor: str | None = None, caller: Caller = Depends(_reader)
) -> Response:
    """List the tenant's operations, newest first.

    An admin key that names no tenant gets those of all.
    """
    page = await services_of(request).registry.operations.list(_visible_tenant(caller), limit=limit, cursor=cursor)
    return answer(request, page_of(page, _operation))


@router.get("/operations/{operation_id}", response_model=Operation)
async def get_operation(operation_id: str, request: Request, caller: Caller = Depends(_reader)) -> Response:
    record = await services_of(request).registry.operations.get(_visible_tenant(caller), operation_id)
    return answer(request, _operation(record))


@router.delete("/operations/{operation_id}", status_code=202, response_model=Operation)
async def cancel_operation(operation_id: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Cancel it: it ends soon, whichever server does it.

    One that has ended stays as it is. 202 with the operation.
    """
    operations = services_of(request).registry.operations
    record = await operations.cancel(_visible_tenant(caller), operation_id, actor=caller.key_id)
    return respond(rendered(_operation(record), status=202))


def _visible_tenant(caller: Caller) -> TenantId | None:
    return None if caller.sees_all else caller.tenant
