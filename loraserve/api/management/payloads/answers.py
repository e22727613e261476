"""Answers with an ETag, conditions on it, and answers that are given again for the same ``Idempotency-Key``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import orjson
from fastapi import Request
from starlette.responses import Response

from loraserve.api.management.payloads.resources import Resource
from loraserve.errors import InvalidRequest, PreconditionFailed
from loraserve.registry.records import Precondition
from loraserve.tenancy.idempotency import Once, Replay, StoredResponse
from loraserve.tenancy.identity.auth import Caller

T = TypeVar("T")
ROOT = "/api/v1"

_REVISION_ETAG = re.compile(r'"r([0-9]{1,10})"')


def answer(request: Request, resource: Resource, *, etag: str | None = None) -> Response:
    """200 with the resource and its ETag, or 304 if the client has this state already (``If-None-Match``)."""
    body = encode(resource)
    etag = etag or content_etag(body)
    known = header_list(request, "if-none-match")
    if known is not None and names_etag(known, etag):
        return Response(status_code=304, headers={"ETag": etag})
    return Response(body, headers={"ETag": etag}, media_type="application/json")


def header_list(request: Request, name: str) -> str | None:
    """Join the lines of a header whose value is a list; None: it is absent. Of two lines neither may be overlooked."""
    lines = request.headers.getlist(name)
    return ", ".join(lines) if lines else None


def names_etag(header: str, etag: str) -> bool:
    """Whether an ``If-None-Match`` is ``*`` or lists `etag`, weak or strong. Time grows with the header's length, no faster."""
    return header.strip() == "*" or etag in (tag.strip().removeprefix("W/") for tag in header.split(","))


def encode(resource: Resource) -> bytes:
    return orjson.dumps(resource.model_dump(mode="json"))


def content_etag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def check_content_match(request: Request, resource: Resource) -> None:
    """Return if ``If-Match`` is absent, ``*``, or names the state that `resource` has, by its `content_etag`.

    Raises:
        PreconditionFailed: it changed since the client read it.
    """
    match = header_list(request, "if-match")
    # Strong comparison: a weak tag names no state of ours.
    if match is None or match.strip() == "*" or content_etag(encode(resource)) in map(str.strip, match.split(",")):
        return
    raise PreconditionFailed("It changed since it was read; nothing was changed.", hint="Read it again.")


def revision_etag(revision: int) -> str:
    """The ETag of a resource that is changed by compare-and-swap."""
    return f'"r{revision}"'


def read_precondition(request: Request) -> Precondition:
    """What ``If-Match`` and ``If-None-Match`` ask of a resource with a `revision_etag`.

    Raises:
        InvalidRequest: a header isn't a list of ETags or ``*``; or If-None-Match isn't ``*``, the only form that a PUT has use for.
    """
    match, none_match = header_list(request, "if-match"), header_list(request, "if-none-match")
    if none_match is not None and none_match.strip() != "*":
        raise InvalidRequest(
            "If-None-Match should be * here: change it only if it isn't there yet.", param="If-None-Match"
        )
    is_absent = none_match is not None
    if match is None:
        return Precondition(is_absent=is_absent)
    if match.strip() == "*":
        return Precondition(is_present=True, is_absent=is_absent)
    # Strong comparison: a weak tag (W/"…") names no state of ours.
    tags = [tag.strip() for tag in match.split(",")]
    if not all(re.fullmatch(r'(W/)?"[^"]*"', tag) for tag in tags):
        raise InvalidRequest('If-Match should be an ETag such as "r7", several of them, or *.', param="If-Match")
    found = (_REVISION_ETAG.fullmatch(tag) for tag in tags)
    return Precondition(revisions=frozenset(int(tag[1]) for tag in found if tag), is_absent=is_absent)


async def answer_once(
    request: Request,
    caller: Caller,
    content: bytes,
    work: Callable[[Once[T] | None], Awaitable[T]],
    render: Callable[[T], StoredResponse],
) -> Response:
    """`render(work(…))`, done once per ``Idempotency-Key``: the same request again gets the first one's answer.

    Args:
        content: what makes the body this body, so that the same key with another one is refused.
        work: does it, in a transaction with the `Once` it is given (None: the request has no key).
        render: the answer to a result. It is stored, so it holds no secret.

    Raises:
        IdempotencyKeyReused: the key came before with another request.
        InvalidRequest: the key can't be one.
    """
    key = request.headers.get("idempotency-key")
    once = None
    if key is not None:
        once = Once(f"{caller.key_id}:{caller.tenant}", key, _fingerprint(request, content), render)
    try:
        return respond(render(await work(once)))
    except Replay as replay:
        return respond(replay.response, replayed=True)


def respond(stored: StoredResponse, *, replayed: bool = False) -> Response:
    headers = dict(stored.headers)
    if replayed:
        headers["Idempotent-Replayed"] = "true"
    return Response(stored.body, stored.status, headers, media_type="application/json")


def created(resource: Resource, location: str, *, status: int = 201) -> StoredResponse:
    body = encode(resource)
    return StoredResponse(status, {"ETag": content_etag(body), "Location": location}, body)


def _fingerprint(request: Request, content: bytes) -> str:
    digest = hashlib.sha256()
    for part in (request.method.encode(), request.scope["path"].encode(), request.scope["query_string"], content):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
