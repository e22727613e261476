"""Adapters, their versions, and the memory that a version is in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.api import scopes
from loraserve.api.http.request_path import NAME
from loraserve.api.management.payloads.multipart import multipart_boundary, read_upload
from loraserve.api.management.payloads.resources import (
    adapter_of,
    page_of,
    version_of,
)
from loraserve.api.management.payloads.responses import adapter_path, answer, answer_once, encode, rendered
from loraserve.api.management.uploads import content_of, declared_bytes, is_json, publish_stored, sender_of
from loraserve.api.services import Services, services_of
from loraserve.contract.adapter import Action, Adapter, Version
from loraserve.contract.result import Page
from loraserve.errors import InvalidRequest
from loraserve.registry.health.checks import quarantine_error
from loraserve.registry.records import QUARANTINED, Published, VersionRecord
from loraserve.tenancy.idempotency import Once, StoredResponse
from loraserve.tenancy.identity.auth import Caller

router = APIRouter(prefix="/adapters")

_reader = scopes.require(scopes.ADAPTERS_READ)
_writer = scopes.require(scopes.ADAPTERS_WRITE)
_admin = scopes.require(scopes.ADMIN)

WARM_WAIT_S = 30.0
"""Seconds that a call waits for the weights; the load continues after it."""


@router.post(f"/{NAME}/versions", status_code=201, response_model=Version)
async def publish_version(
    name: str, request: Request, dry_run: bool = False, promote: bool = True, caller: Caller = Depends(_writer)
) -> Response:
    """Publish the uploaded files: multipart, or as JSON a config and the digest of an upload.

    Both ways take a version's extra files too: ``chat_template``, ``generation_config``,
    ``tool_parser``, ``reasoning_parser`` and ``chat_template_kwargs``.

    201 with a new version, 200 with the version that has these bytes or with a dry run's findings.

    A version that failed its certificate is published as ``quarantined``, and no alias moves to it.
    """
    services = services_of(request)
    services.check_open()
    # A misspelt ?dry-run=true would otherwise publish.
    check_query(request, "dry_run", "promote")
    uploads, publisher = services.registry.uploads, services.registry.publisher
    services.registry.inspector.check_name(name)
    if is_json(request):
        return await publish_stored(
            request, caller, name, _published_on(services), is_promoting=promote, is_dry_run=dry_run
        )
    boundary = multipart_boundary(request)
    staged = await uploads.stage(caller.tenant, sender_of(request), expected_bytes=declared_bytes(request))
    try:
        config, extras = await read_upload(request, boundary, staged, uploads.throttle)
        content = content_of(config, staged.digest, extras)

        async def work(once: Once[Published] | None) -> Published:
            return await publisher.publish(
                caller.tenant,
                name,
                config,
                staged,
                actor=caller.key_id,
                extras=extras,
                is_promoting=promote,
                is_dry_run=dry_run,
                once=once,
                on_stored=lambda: uploads.end_arrival(caller.tenant, staged),
            )

        return await answer_once(request, caller, content, work, _published_on(services))
    finally:
        await uploads.release(caller.tenant, staged)


def _published_on(services: Services) -> Callable[[Published], StoredResponse]:
    def render(published: Published) -> StoredResponse:
        version = published.version
        resource = version_of(version, services.registry.served_base.digest)
        if version.version is None:
            return rendered(resource)
        location = f"{adapter_path(version.name)}/versions/{version.version}"
        return rendered(resource, status=201 if published.is_new else 200, location=location)

    return render


@router.get("", response_model=Page[Adapter])
async def list_adapters(
    request: Request,
    limit: int = 50,
    cursor: str | None = None,
    include: str | None = None,
    caller: Caller = Depends(_reader),
) -> Response:
    """List the tenant's adapters by name, with their notes if ``include`` is ``notes``."""
    registry = services_of(request).registry
    page = await registry.list(caller.tenant, limit=limit, cursor=cursor, with_notes=_includes_notes(include))
    show = partial(adapter_of, served=registry.served_base.digest)
    return answer(request, page_of(page, show))


def _includes_notes(include: str | None) -> bool:
    """Return whether a list has notes, which may be most of its bytes.

    Raises:
        InvalidRequest: `include` is something else.
    """
    if include not in (None, "", "notes"):
        raise InvalidRequest("The parameter include should be notes, or absent.", param="include")
    return bool(include)


@router.get(f"/{NAME}", response_model=Adapter)
async def get_adapter(name: str, request: Request, caller: Caller = Depends(_reader)) -> Response:
    registry = services_of(request).registry
    return answer(request, adapter_of(await registry.get(caller.tenant, name), registry.served_base.digest))


@router.delete(f"/{NAME}", status_code=204)
async def delete_adapter(name: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Delete the adapter.

    Its name no longer resolves; running requests finish on the version they began with.
    """
    await services_of(request).registry.delete(caller.tenant, name, actor=caller.key_id)
    return Response(status_code=204)


@router.get(f"/{NAME}/versions", response_model=Page[Version])
async def list_versions(
    name: str,
    request: Request,
    limit: int = 50,
    cursor: str | None = None,
    include: str | None = None,
    caller: Caller = Depends(_reader),
) -> Response:
    """List the adapter's versions, newest first, with their notes if ``include`` is ``notes``."""
    registry = services_of(request).registry
    page = await registry.list_versions(
        caller.tenant, name, limit=limit, cursor=cursor, with_notes=_includes_notes(include)
    )
    show = partial(version_of, served=registry.served_base.digest)
    return answer(request, page_of(page, show))


@router.get(f"/{NAME}/versions/{{number}}", response_model=Version)
async def get_version(name: str, number: int, request: Request, caller: Caller = Depends(_reader)) -> Response:
    registry = services_of(request).registry
    version = await registry.get_version(caller.tenant, name, number)
    return answer(request, version_of(version, registry.served_base.digest))


@router.delete(f"/{NAME}/versions/{{number}}", status_code=204)
async def delete_version(name: str, number: int, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Delete the version, which no longer resolves. 409 while an alias names it."""
    await services_of(request).registry.delete_version(caller.tenant, name, number, actor=caller.key_id)
    return Response(status_code=204)


@router.post(f"/{NAME}/versions/{{number}}/verify", response_model=Version)
async def verify_version(
    name: str, number: int, request: Request, rebase: bool = False, caller: Caller = Depends(_writer)
) -> Response:
    """Compare the version's answers with the reference's anew.

    200 with the version as it is then: ready, or in quarantine.

    A version that was made for another base is refused with 409 ``adapter_base_mismatch``. With
    ``rebase`` it becomes one of this server's base where its shapes allow and its certificate
    passes, and is served on the other one no more; otherwise 422, and nothing is changed.
    """
    services = services_of(request)
    services.check_open()
    # A misspelt ?rebased=true would otherwise be answered as if it hadn't been said.
    check_query(request, "rebase")

    async def work(once: Once[VersionRecord] | None) -> VersionRecord:
        return await services.registry.certificates.verify(
            caller.tenant, name, number, actor=caller.key_id, is_rebasing=rebase, once=once
        )

    def render(version: VersionRecord) -> StoredResponse:
        return rendered(version_of(version, services.registry.served_base.digest))

    return await answer_once(request, caller, b"", work, render)


@router.post(f"/{NAME}/versions/{{number}}/warm", response_model=Action)
async def warm_version(name: str, number: int, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Bring the weights to the device before the first request asks for them."""
    services = services_of(request)
    services.check_open()
    registry, engine = services.registry, services.engine
    version = await registry.get_version(caller.tenant, name, number)
    name = version.name
    registry.served_base.check(name, number, version.base_digest, version.checks)
    if version.state == QUARANTINED:
        raise quarantine_error(name, number, version.checks)

    async def work(once: Once[bool] | None) -> bool:
        await registry.check_once(once)
        registry.last_used.touch(caller.tenant, version.ref)
        is_done = await _within(WARM_WAIT_S, engine.warm(version.ref))
        await registry.record_action(
            caller.tenant, "version.warm", f"{name}@{number}", actor=caller.key_id, once=once, result=is_done
        )
        return is_done

    return await answer_once(request, caller, b"", work, lambda is_done: _acted(version, number, "warm", is_done))


@router.post(f"/{NAME}/versions/{{number}}/pin", response_model=Action)
async def pin_version(name: str, number: int, request: Request, caller: Caller = Depends(_admin)) -> Response:
    """Keep the weights on the device, on every server and after every start, until unpinned.

    Takes memory from every tenant, so it needs an admin key.
    """
    services = services_of(request)
    services.check_open()
    pins = services.registry.pins
    version = await services.registry.get_version(caller.tenant, name, number)
    services.registry.last_used.touch(caller.tenant, version.ref)

    async def work(once: Once[bool] | None) -> bool:
        return await pins.pin(caller.tenant, name, number, actor=caller.key_id, once=once, wait_s=WARM_WAIT_S)

    return await answer_once(request, caller, b"", work, lambda is_done: _acted(version, number, "pin", is_done))


@router.post(f"/{NAME}/versions/{{number}}/unpin", response_model=Action)
async def unpin_version(name: str, number: int, request: Request, caller: Caller = Depends(_admin)) -> Response:
    """Let the weights be evicted again when they are idle."""
    services = services_of(request)
    services.check_open()
    pins = services.registry.pins
    version = await services.registry.get_version(caller.tenant, name, number)

    async def work(once: Once[bool] | None) -> bool:
        return await pins.unpin(caller.tenant, name, number, actor=caller.key_id, once=once, wait_s=WARM_WAIT_S)

    return await answer_once(request, caller, b"", work, lambda is_done: _acted(version, number, "unpin", is_done))


def check_query(request: Request, *known: str) -> None:
    """Check that the query has no other parameter than these.

    Raises:
        InvalidRequest: it has one.
    """
    if unknown := sorted(set(request.query_params) - set(known)):
        plain = unknown[0] if len(unknown) == 1 and unknown[0].isidentifier() else None
        raise InvalidRequest(
            "The query has an unknown parameter.", param=plain, hint=f"Known parameters: {', '.join(known)}."
        )


async def _within(seconds: float, step: Awaitable[None]) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await step
    except TimeoutError:
        return False
    return True


def _acted(version: VersionRecord, number: int, action: str, is_done: bool) -> StoredResponse:
    resource = Action(name=version.name, version=number, digest=version.digest, action=action, is_done=is_done)
    return StoredResponse(200 if is_done else 202, {}, encode(resource))
