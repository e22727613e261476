"""Responses with ETags, preconditions on them, and replays for the same ``Idempotency-Key``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import quote

import orjson
from fastapi import Request
from starlette.responses import Response

from loraserve.contract.result import Result
from loraserve.errors import InvalidRequest, PreconditionFailed
from loraserve.registry.records import Precondition
from loraserve.tenancy.idempotency import Once, Replay, StoredResponse
from loraserve.tenancy.identity.auth import Caller

T = TypeVar("T")
ROOT = "/api/v1"


def adapter_path(name: str) -> str:
    """Return the path of the adapter, whose name may have slashes."""
    return f"{ROOT}/adapters/{quote(name, safe=':')}"


_REVISION_ETAG = re.compile(r'"r([0-9]{1,10})"')


def answer(request: Request, resource: Result, *, etag: str | None = None) -> Response:
    """Return 200 with the resource and its ETag, or 304 if ``If-None-Match`` names this state."""
    body = encode(resource)
    etag = etag or content_etag(body)
    known = header_list(request, "if-none-match")
    if known is not None and names_etag(known, etag):
        return Response(status_code=304, headers={"ETag": etag})
    return Response(body, headers={"ETag": etag}, media_type="application/json")


def header_list(request: Request, name: str) -> str | None:
    """Join the lines of a header that holds a list, so that none is overlooked.

    None: the header is absent.
    """
    lines = request.headers.getlist(name)
    return ", ".join(lines) if lines else None


def names_etag(header: str, etag: str) -> bool:
    """Return whether an ``If-None-Match`` is ``*`` or lists `etag`, weak or strong.

    Takes time linear in the header's length.
    """
    return header.strip() == "*" or etag in (tag.strip().removeprefix("W/") for tag in header.split(","))


def encode(resource: Result) -> bytes:
    """Return the resource's JSON, without fields that were never set."""
    return orjson.dumps(resource.model_dump(mode="json", exclude_unset=True))


def content_etag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def check_content_match(request: Request, resource: Result) -> None:
    """Check that ``If-Match`` is absent, ``*``, or the `content_etag` of the resource.

    Raises:
        PreconditionFailed: the resource changed since the client read it.
    """
    match = header_list(request, "if-match")
    # Strong comparison: a weak tag names no state of ours.
    if match is None or match.strip() == "*" or content_etag(encode(resource)) in map(str.strip, match.split(",")):
        return
    raise PreconditionFailed(
        "The resource changed since it was read; nothing was done.", hint="Read it again, then retry."
    )


def revision_etag(revision: int) -> str:
    """Return the ETag of a resource that is changed by compare-and-swap."""
    return f'"r{revision}"'


def read_precondition(request: Request) -> Precondition:
    """Read what ``If-Match`` and ``If-None-Match`` require of a resource with a `revision_etag`.

    Raises:
        InvalidRequest: a header isn't a list of ETags or ``*``; or If-None-Match isn't ``*``, the
            only form of use to a PUT.
    """
    match, none_match = header_list(request, "if-match"), header_list(request, "if-none-match")
    if none_match is not None and none_match.strip() != "*":
        raise InvalidRequest(
            "If-None-Match should be * here, which means: only if it doesn't exist yet.", param="If-None-Match"
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
    """Return `render(work(…))`, computed once per ``Idempotency-Key``.

    A repeated request gets the first response.

    Args:
        content: identifies the body, so that the same key with another body is refused.
        work: does the request, in a transaction with the given `Once` (None: the request has no
            key).
        render: returns the response to a result. It is stored, so it must hold no secret.

    Raises:
        IdempotencyKeyReused: the key was used with another request.
        InvalidRequest: the key is malformed.
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


def rendered(
    resource: Result, *, status: int = 200, etag: str | None = None, location: str | None = None
) -> StoredResponse:
    """Render the resource with its ETag: of its content, unless one is given."""
    body = encode(resource)
    headers = {"ETag": etag or content_etag(body)}
    return StoredResponse(status, headers if location is None else headers | {"Location": location}, body)


def _fingerprint(request: Request, content: bytes) -> str:
    digest = hashlib.sha256()
    for part in (request.method.encode(), request.scope["path"].encode(), request.scope["query_string"], content):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
