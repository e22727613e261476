"""Resumable uploads: announced, sent in pieces, and published by their digest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraserve.adapters.digest import version_digest
from loraserve.adapters.extra_files import FILE_NAMES, INDEX, ExtraFiles
from loraserve.api import scopes
from loraserve.api.http.json_body import parse_json
from loraserve.api.management.payloads.bodies import Body, read_body
from loraserve.api.management.payloads.resources import resource_of
from loraserve.api.management.payloads.responses import ROOT, answer, answer_once, rendered, respond
from loraserve.api.services import services_of
from loraserve.contract.operation import Upload
from loraserve.errors import InvalidRequest, PayloadTooLarge
from loraserve.limits import LIMITS
from loraserve.registry.records import Published
from loraserve.registry.uploads.chunks import BytesLost
from loraserve.registry.uploads.concurrency_limiter import Sender
from loraserve.registry.uploads.resumable import UploadRecord
from loraserve.tenancy.idempotency import Once, StoredResponse
from loraserve.tenancy.identity.auth import Caller
from loraserve.types import Digest

router = APIRouter(prefix="/uploads")

_reader = scopes.require(scopes.ADAPTERS_READ)
_writer = scopes.require(scopes.ADAPTERS_WRITE)

_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})")


class UploadCreate(Body):
    sha256: str
    size: int


@router.post("", status_code=201, response_model=Upload)
async def create_upload(request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Announce a blob.

    201 with a new upload, 200 with the one of these bytes that was begun: it goes on where it
    stopped.
    """
    services = services_of(request)
    services.check_open()
    body = await read_body(request, UploadCreate)
    content = f"{body.sha256}:{body.size}".encode()

    async def work(once: Once[tuple[UploadRecord, bool]] | None) -> tuple[UploadRecord, bool]:
        return await services.registry.uploads.resumable.create(
            caller.tenant, body.sha256, body.size, actor=caller.key_id, once=once
        )

    return await answer_once(request, caller, content, work, _created)


def _created(result: tuple[UploadRecord, bool]) -> StoredResponse:
    record, is_new = result
    status, location = 201 if is_new else 200, f"{ROOT}/uploads/{record.id}"
    return rendered(resource_of(Upload, record), status=status, location=location)


@router.get("/{upload_id}", response_model=Upload)
async def get_upload(upload_id: str, request: Request, caller: Caller = Depends(_reader)) -> Response:
    """Return the upload's progress.

    It is completed if its last byte came just before its server ended.
    """
    record = await services_of(request).registry.uploads.resumable.finish(caller.tenant, upload_id)
    return answer(request, resource_of(Upload, record))


@router.patch("/{upload_id}", response_model=Upload)
async def send_piece(upload_id: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Receive the next piece, of any length: ``Content-Range: bytes FIRST-LAST/SIZE``.

    The received part of an interrupted piece is kept.

    409 ``upload_offset_mismatch`` says in ``received`` where the next piece begins. With the last
    one the whole is checked.
    """
    services = services_of(request)
    services.check_open()
    start, end, size = _read_range(request)
    record = await services.registry.uploads.resumable.receive(
        caller.tenant, upload_id, start, end, size, request.stream(), sender_of(request)
    )
    return respond(rendered(resource_of(Upload, record)))


@router.delete("/{upload_id}", status_code=204)
async def delete_upload(upload_id: str, request: Request, caller: Caller = Depends(_writer)) -> Response:
    """Give it up. A version that was published from it stays."""
    await services_of(request).registry.uploads.resumable.delete(caller.tenant, upload_id, actor=caller.key_id)
    return Response(status_code=204)


def _read_range(request: Request) -> tuple[int, int, int]:
    """[start, end) and the whole size of ``Content-Range``.

    Raises:
        InvalidRequest: it is missing, no range of bytes, or not what ``Content-Length`` says.
    """
    expected = "Expected Content-Range: bytes FIRST-LAST/SIZE, with LAST below SIZE."
    match = _RANGE.fullmatch(request.headers.get("content-range", ""))
    if match is None:
        raise InvalidRequest(
            "The piece's Content-Range is missing or can't be parsed.", param="Content-Range", hint=expected
        )
    start, end, size = int(match[1]), int(match[2]) + 1, int(match[3])
    # An empty piece is allowed only where nothing is missing: the client asks whether all has come.
    if end > size or end < start or (start == end and start != size):
        raise InvalidRequest("The piece's Content-Range is impossible.", param="Content-Range", hint=expected)
    length = request.headers.get("content-length")
    if length is not None and length != str(end - start):
        raise InvalidRequest("The body's length differs from the length of its Content-Range.", param="Content-Range")
    return start, end, size


def sender_of(request: Request) -> Sender:
    """Return the monitor of the client that sends the body."""
    sender: Sender = request.state.sender
    return sender


def declared_bytes(request: Request) -> int | None:
    """Return the body's length, if its head says it."""
    value = request.headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() else None


def is_json(request: Request) -> bool:
    """Return whether the body says that it is JSON."""
    kind, _, _ = request.headers.get("content-type", "").partition(";")
    return kind.strip().lower() == "application/json"


async def publish_stored(
    request: Request,
    caller: Caller,
    name: str,
    render: Callable[[Published], StoredResponse],
    *,
    is_promoting: bool,
    is_dry_run: bool,
) -> Response:
    """Publish ``{config: {…}, blob: sha256}``: a config, and the weights of a complete upload.

    Without a config, the upload must be in a file that holds its own. The body may have extra
    files: ``chat_template`` and ``generation_config`` as the files' text, ``tool_parser`` and
    ``reasoning_parser`` as names, ``chat_template_kwargs`` as the text of a JSON object;
    ``tokenizer``, the summary of the adapter's own, of which the version keeps what isn't the
    base's; and ``index``, the text of the index of several files of weights, which the blob is, one
    after the other.

    Raises:
        InvalidRequest: the body isn't that.
        AdapterFormatError: an extra file is empty or too large.
        UploadNotFound: there is no such upload, or bytes are missing.
        BytesLost: its bytes are damaged or gone: they must be sent again.
        RateLimited, Overloaded: too many uploads are under way; a publish is one, though its bytes
            are there.
    """
    registry = services_of(request).registry
    uploads = registry.uploads
    config, blob, extras = _read_publish(await _read_bounded(request.stream()))
    content = content_of(config, blob, extras)

    async def work(once: Once[Published] | None) -> Published:
        # what was answered once is answered again, also when the upload has gone since
        await registry.check_once(once)
        async with uploads.slot(caller.tenant) as release:
            stored = await uploads.resumable.stored(caller.tenant, blob)
            try:
                published = await registry.publisher.publish(
                    caller.tenant,
                    name,
                    config,
                    stored,
                    actor=caller.key_id,
                    extras=extras,
                    is_promoting=is_promoting,
                    is_dry_run=is_dry_run,
                    once=once,
                    on_stored=release,
                )
            except BytesLost:
                # what is stored isn't what came, so that nothing says any more that it needn't come
                # again
                await uploads.resumable.forget(caller.tenant, stored.digest)
                raise
            if not is_dry_run and published.version.weights_blob != stored.digest:
                # converted, or an equal version has other files: no version has the upload's
                await uploads.resumable.forget(caller.tenant, stored.digest)
            return published

    return await answer_once(request, caller, content, work, render)


async def _read_bounded(body: AsyncIterator[bytes]) -> bytes:
    # The route takes whole adapters in another form, so that the bound on its body is no bound on
    # this.
    data = bytearray()
    async for piece in body:
        data += piece
        if len(data) > LIMITS.max_body_bytes:
            raise PayloadTooLarge(f"The JSON body exceeds the limit of {LIMITS.max_body_bytes} bytes.")
    return bytes(data)


def content_of(config: bytes, blob: Digest, extras: ExtraFiles) -> bytes:
    """Return what distinguishes a publish from others under the same ``Idempotency-Key``."""
    return hashlib.sha256(config).digest() + version_digest(blob, extras).encode()


def _read_publish(body: bytes) -> tuple[bytes, Digest, ExtraFiles]:
    value: Any = parse_json(body)
    if not isinstance(value, dict) or value.keys() - {"config", "blob", INDEX, *FILE_NAMES}:
        raise InvalidRequest(
            "The body should be a JSON object with config and blob, and nothing else but a version's extra files.",
            hint=f"Extra files: {', '.join(FILE_NAMES)}.",
        )
    for name, kind, words in (("config", dict, "an object"), ("blob", str, "a SHA-256 in lower-case hex")):
        is_absent = name == "config" and "config" not in value
        if not is_absent and not isinstance(value.get(name), kind):
            raise InvalidRequest(f"{name} should be {words}.", param=name)
    # a file of weights may hold its own
    config = b""
    if "config" in value:
        config = json.dumps(value["config"], ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    if len(config) > LIMITS.max_adapter_config_bytes:
        raise PayloadTooLarge(f"config exceeds the limit of {LIMITS.max_adapter_config_bytes} bytes.", param="config")
    given = {name: value[name] for name in (*FILE_NAMES, INDEX) if value.get(name) is not None}
    for name, text in given.items():
        if not isinstance(text, str):
            raise InvalidRequest(f"{name} should be a string: the file's text.", param=name)
    return config, Digest(value["blob"]), ExtraFiles.read({name: text.encode() for name, text in given.items()})
