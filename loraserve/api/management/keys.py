"""Keys of tenants: of any, for admins, and its own, for a tenant's key with ``keys:write``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

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
from loraserve.contract.tenant import Key, NewKey
from loraserve.tenancy.idempotency import Once
from loraserve.tenancy.identity.auth import Caller
from loraserve.tenancy.identity.keys import IssuedKey
from loraserve.types import TenantId

router = APIRouter()

_admin = scopes.require(scopes.ADMIN)
_operator = scopes.require(scopes.OPERATOR_READ)
_own = scopes.require(scopes.KEYS_WRITE)


class KeyCreate(Body):
    name: str = "key"
    scopes: list[str] | None = Field(default=None, max_length=16)
    # JSON has no instants: text is taken, in ISO 8601 with an offset.
    expires_at: AwareDatetime | None = Field(default=None, strict=False)


@router.post("/tenants/{tenant}/keys", status_code=201, response_model=NewKey)
async def create_key(tenant: str, request: Request, caller: Caller = Depends(_admin)) -> Response:
    """Create a key with a tenant's three usual scopes, or those named.

    ``metrics:read`` stands alone. The secret is in this answer and nowhere else.
    """
    return await _create(request, caller, await _tenant_of(request, tenant), f"{ROOT}/tenants/{tenant}/keys")


@router.get("/tenants/{tenant}/keys", response_model=Page[Key])
async def list_keys(
    tenant: str, request: Request, limit: int = 50, cursor: str | None = None, caller: Caller = Depends(_operator)
) -> Response:
    """List the tenant's keys in the order of their creation, including revoked ones.

    Secrets aren't shown.
    """
    return await _list(request, await _tenant_of(request, tenant), limit, cursor)


@router.post("/tenants/{tenant}/keys/{key_id}/rotate", status_code=201, response_model=NewKey)
async def rotate_key(tenant: str, key_id: str, request: Request, caller: Caller = Depends(_admin)) -> Response:
    """Create a key of the same name, scopes and end; the old one ends, after ``overlap_s``."""
    return await _rotate(request, caller, await _tenant_of(request, tenant), key_id, f"{ROOT}/tenants/{tenant}/keys")


@router.delete("/tenants/{tenant}/keys/{key_id}", status_code=204)
async def revoke_key(tenant: str, key_id: str, request: Request, caller: Caller = Depends(_admin)) -> Response:
    """Revoke the key: here at once, within seconds in other processes."""
    return await _revoke(request, caller, await _tenant_of(request, tenant), key_id)


@router.post("/keys", status_code=201, response_model=NewKey)
async def create_own_key(request: Request, caller: Caller = Depends(_own)) -> Response:
    """Create a key of the caller's tenant, with no scope that the caller lacks.

    It ends with the caller's key at the latest. Without ``scopes`` it has those of the three usual
    ones that the caller has. The secret is in this answer and nowhere else.
    """
    return await _create(request, caller, caller.tenant, f"{ROOT}/keys")


@router.get("/keys", response_model=Page[Key])
async def list_own_keys(
    request: Request, limit: int = 50, cursor: str | None = None, caller: Caller = Depends(_own)
) -> Response:
    """List the keys of the caller's tenant in the order of their creation, with revoked ones.

    Secrets aren't shown.
    """
    return await _list(request, caller.tenant, limit, cursor)


@router.post("/keys/{key_id}/rotate", status_code=201, response_model=NewKey)
async def rotate_own_key(key_id: str, request: Request, caller: Caller = Depends(_own)) -> Response:
    """Create a key of the same name, scopes and end; the old one ends, after ``overlap_s``.

    403 if the key has a scope that the caller lacks, or outlasts the caller's.
    """
    return await _rotate(request, caller, caller.tenant, key_id, f"{ROOT}/keys")


@router.delete("/keys/{key_id}", status_code=204)
async def revoke_own_key(key_id: str, request: Request, caller: Caller = Depends(_own)) -> Response:
    """Revoke a key of the caller's tenant, also the caller's own: within seconds everywhere.

    403 if it has a scope that the caller lacks.
    """
    return await _revoke(request, caller, caller.tenant, key_id)


async def _tenant_of(request: Request, name: str) -> TenantId:
    return (await services_of(request).authenticator.tenants.get(name)).id


def _maker(caller: Caller) -> str | None:
    """Return the key within whose bounds the caller acts: an admin's has none."""
    return None if caller.is_admin else caller.key_id


async def _create(request: Request, caller: Caller, owner: TenantId, place: str) -> Response:
    body = await read_body(request, KeyCreate)
    keys = services_of(request).authenticator.keys

    async def work(once: Once[IssuedKey] | None) -> IssuedKey:
        return await keys.create(
            owner,
            name=body.name,
            actor=caller.key_id,
            scopes=body.scopes,
            expires_at=body.expires_at,
            maker=_maker(caller),
            once=once,
        )

    return await _answer(request, caller, work, place)


async def _list(request: Request, owner: TenantId, limit: int, cursor: str | None) -> Response:
    page = await services_of(request).authenticator.keys.list(owner, limit=limit, cursor=cursor)
    return answer(request, page_of(page, partial(resource_of, Key)))


async def _rotate(request: Request, caller: Caller, owner: TenantId, key_id: str, place: str) -> Response:
    body = await read_body(request, KeyRotation)
    keys = services_of(request).authenticator.keys

    async def work(once: Once[IssuedKey] | None) -> IssuedKey:
        return await keys.rotate(
            owner, key_id, overlap=body.overlap, actor=caller.key_id, maker=_maker(caller), once=once
        )

    return await _answer(request, caller, work, place)


async def _answer(
    request: Request, caller: Caller, work: Callable[[Once[IssuedKey] | None], Awaitable[IssuedKey]], place: str
) -> Response:
    return await answer_new_key(
        request,
        caller,
        work,
        location=lambda record: f"{place}/{record.id}",
        resource=partial(resource_of, Key),
        with_secret=_with_secret,
    )


async def _revoke(request: Request, caller: Caller, owner: TenantId, key_id: str) -> Response:
    keys = services_of(request).authenticator.keys
    await keys.revoke(owner, key_id, actor=caller.key_id, maker=_maker(caller))
    return Response(status_code=204)


def _with_secret(key: Key, secret: str) -> NewKey:
    return NewKey(**key.model_dump(), key=secret)
