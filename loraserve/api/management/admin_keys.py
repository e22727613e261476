"""Operators' keys and their roles. For admins; an operator who only reads sees the list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Depends, Request
from pydantic import AwareDatetime, Field
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.management.payloads.bodies import Body, read_body
from loraserve.api.management.payloads.new_keys import KeyRotation, answer_new_key
from loraserve.api.management.payloads.resources import page_of, resource_of
from loraserve.api.management.payloads.responses import ROOT, answer
from loraserve.api.services import services_of
from loraserve.contract.result import Page
from loraserve.contract.tenant import AdminKey, NewAdminKey
from loraserve.tenancy.idempotency import Once
from loraserve.tenancy.identity.auth import Caller
from loraserve.tenancy.identity.keys import IssuedKey, KeyRecord

router = APIRouter(prefix="/admin-keys")

_admin = scopes.require(scopes.ADMIN)
_operator = scopes.require(scopes.OPERATOR_READ)


class AdminKeyCreate(Body):
    name: str = "key"
    role: str
    """``admin``, ``operator:read`` (everything but secrets and tenants' files, nothing is changed)
    or ``metrics:read``."""
    # JSON has no instants: text is taken, in ISO 8601 with an offset.
    expires_at: AwareDatetime | None = Field(default=None, strict=False)


@router.post("", status_code=201, response_model=NewAdminKey)
async def create_admin_key(request: Request, caller: Caller = Depends(_admin)) -> Response:
    """Create a key with a role. The secret is in this answer and nowhere else."""
    body = await read_body(request, AdminKeyCreate)
    keys = services_of(request).authenticator.admin_keys

    async def work(once: Once[IssuedKey] | None) -> IssuedKey:
        return await keys.create(
            name=body.name, role=body.role, actor=caller.key_id, expires_at=body.expires_at, once=once
        )

    return await _answer_new(request, caller, work)


@router.get("", response_model=Page[AdminKey])
async def list_admin_keys(
    request: Request, limit: int = 50, cursor: str | None = None, caller: Caller = Depends(_operator)
) -> Response:
    """List operators' keys in the order of their creation, including revoked ones.

    Secrets aren't shown, nor is LORASERVE_ADMIN_KEY, which is no row.
    """
    page = await services_of(request).authenticator.admin_keys.list(limit=limit, cursor=cursor)
    return answer(request, page_of(page, _resource))


@router.post("/{admin_key_id}/rotate", status_code=201, response_model=NewAdminKey)
async def rotate_admin_key(admin_key_id: str, request: Request, caller: Caller = Depends(_admin)) -> Response:
    """Create a key of the same name, role and end; the old one ends now, or after ``overlap_s``."""
    body = await read_body(request, KeyRotation)
    keys = services_of(request).authenticator.admin_keys

    async def work(once: Once[IssuedKey] | None) -> IssuedKey:
        return await keys.rotate(admin_key_id, overlap=body.overlap, actor=caller.key_id, once=once)

    return await _answer_new(request, caller, work)


@router.delete("/{admin_key_id}", status_code=204)
async def revoke_admin_key(admin_key_id: str, request: Request, caller: Caller = Depends(_admin)) -> Response:
    """Revoke the key: here at once, within seconds in other processes. Not the last admin key."""
    await services_of(request).authenticator.admin_keys.revoke(admin_key_id, actor=caller.key_id)
    return Response(status_code=204)


def _resource(record: KeyRecord) -> AdminKey:
    return resource_of(AdminKey, record)


async def _answer_new(
    request: Request, caller: Caller, work: Callable[[Once[IssuedKey] | None], Awaitable[IssuedKey]]
) -> Response:
    return await answer_new_key(
        request,
        caller,
        work,
        location=lambda record: f"{ROOT}/admin-keys/{record.id}",
        resource=_resource,
        with_secret=lambda key, secret: NewAdminKey(**key.model_dump(), key=secret),
    )
