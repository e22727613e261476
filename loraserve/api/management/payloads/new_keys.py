"""New keys: how one takes another's place, and the one answer that has a secret."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from loraserve.api.management.payloads.bodies import Body
from loraserve.api.management.payloads.responses import answer_once, content_etag, encode
from loraserve.contract.result import Result
from loraserve.contract.tenant import Key
from loraserve.errors import Conflict
from loraserve.tenancy.idempotency import Once, StoredResponse
from loraserve.tenancy.identity.auth import Caller
from loraserve.tenancy.identity.keys import IssuedKey, KeyRecord

K = TypeVar("K", bound=Key)


class KeyRotation(Body):
    overlap_s: float = Field(default=0.0, allow_inf_nan=False)
    """Seconds for which the old key works on."""

    @property
    def overlap(self) -> timedelta:
        """The time, of which no number is too large to be refused in words."""
        return timedelta(seconds=min(max(self.overlap_s, -1.0), 1e9))


async def answer_new_key(
    request: Request,
    caller: Caller,
    work: Callable[[Once[IssuedKey] | None], Awaitable[IssuedKey]],
    *,
    location: Callable[[KeyRecord], str],
    resource: Callable[[KeyRecord], K],
    with_secret: Callable[[K, str], Result],
) -> Response:
    """Return 201 with a new key's secret, which no replay has.

    Args:
        work: makes the key, as for `answer_once`.

    Raises:
        Conflict: the first request with this Idempotency-Key made the key.
    """
    made: list[IssuedKey] = []

    async def make(once: Once[IssuedKey] | None) -> IssuedKey:
        made.append(await work(once))
        return made[0]

    def without_secret(key: IssuedKey) -> StoredResponse:
        return StoredResponse(201, {"X-Key-Id": key.record.id}, b"")

    replayed = await answer_once(request, caller, await request.body(), make, without_secret)
    if not made:
        raise Conflict(
            f"The key {replayed.headers['x-key-id']} was created by the first request with this "
            "Idempotency-Key; its secret was"
            " shown then and isn't stored.",
            hint="If the secret was lost, revoke that key and create another with a new Idempotency-Key.",
        )
    key = resource(made[0].record)
    headers = {
        "ETag": content_etag(encode(key)),
        "Location": location(made[0].record),
        "Cache-Control": "no-store",
    }
    return Response(encode(with_secret(key, made[0].secret)), 201, headers, media_type="application/json")
