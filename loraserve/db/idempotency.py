"""``Idempotency-Key``: a POST that is sent again does its work once and gets the first answer again.

The answer is stored in the transaction of the work itself, so after a crash either both are there or neither is. Two equal
requests at once: the second waits for the first one's transaction and then gets its answer. Only successes are kept; what
failed may be tried again with the same key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Generic, TypeVar

from sqlalchemy import delete, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraserve.db.models import IdempotencyRow
from loraserve.db.session import Clock, utc_now
from loraserve.db.upsert import upsert
from loraserve.errors import IdempotencyKeyReused, InvalidRequest
from loraserve.limits import LIMITS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """What the first request was answered. `headers` holds those that belong to the result (``ETag``, ``Location``)."""

    status: int
    headers: dict[str, str]
    body: bytes


class Replay(Exception):
    """The work was done before; `response` is what was answered then."""

    def __init__(self, response: StoredResponse) -> None:
        super().__init__("answered before")
        self.response = response


@dataclass(frozen=True, slots=True)
class Once(Generic[T]):
    """One request's right to do its work once.

    Args:
        owner: whose key it is: API key and tenant. Keys of different owners never meet.
        key: the header's value; stored as a hash.
        fingerprint: of method, path, query and content. The same key with another fingerprint is refused.
        render: the answer for the work's result; without secrets, because it is stored.
    """

    owner: str
    key: str = field(repr=False)
    fingerprint: str
    render: Callable[[T], StoredResponse]
    clock: Clock = utc_now

    def __post_init__(self) -> None:
        if not 1 <= len(self.key) <= LIMITS.max_idempotency_key_bytes or not (
            self.key.isascii() and self.key.isprintable()
        ):
            raise InvalidRequest(
                f"Idempotency-Key should be 1 to {LIMITS.max_idempotency_key_bytes} printable ASCII characters.",
                param="Idempotency-Key",
            )

    @property
    def _hash(self) -> str:
        return hashlib.sha256(self.key.encode()).hexdigest()

    async def check(self, session: AsyncSession) -> None:
        """Return if the work is still to be done.

        Raises:
            Replay: it was done.
            IdempotencyKeyReused: the key came with another request.
        """
        row = await session.get(IdempotencyRow, (self.owner, self._hash))
        if row is None or row.expires_at <= self.clock():
            return
        if row.fingerprint != self.fingerprint:
            raise IdempotencyKeyReused(
                "This Idempotency-Key came before with another request.", hint="Use a new key for a new request."
            )
        raise Replay(StoredResponse(row.status, row.headers, row.body))

    async def begin(self, session: AsyncSession) -> None:
        """Take the key, first thing in the work's transaction; `finish` must follow in the same one.

        Raises:
            Replay, IdempotencyKeyReused: as `check`, also when the other request was still running a moment ago.
        """
        now = self.clock()
        identity = tuple_(IdempotencyRow.owner, IdempotencyRow.key_hash)
        # Skipping what others hold: two requests that tidy up at once must not wait for each other in a circle.
        expired = select(IdempotencyRow.owner, IdempotencyRow.key_hash).where(IdempotencyRow.expires_at <= now)
        await session.execute(
            delete(IdempotencyRow).where(identity.in_(expired.limit(100).with_for_update(skip_locked=True)))
        )
        # This key's own row must be out of the way even if it wasn't among those.
        await session.execute(
            delete(IdempotencyRow).where(identity == (self.owner, self._hash), IdempotencyRow.expires_at <= now)
        )
        row = {
            "owner": self.owner,
            "key_hash": self._hash,
            "fingerprint": self.fingerprint,
            "status": 0,
            "headers": {},
            "body": b"",
            "created_at": now,
            "expires_at": now + timedelta(seconds=LIMITS.idempotency_ttl_s),
        }
        # Waits for another transaction that is taking the same key.
        if not await upsert(session, IdempotencyRow, [row]):
            await self.check(session)
        await self._drop_oldest(session)

    async def finish(self, session: AsyncSession, result: T) -> None:
        """Store the answer for `result` beside the work."""
        response = self.render(result)
        await session.execute(
            update(IdempotencyRow)
            .where(IdempotencyRow.owner == self.owner, IdempotencyRow.key_hash == self._hash)
            .values(status=response.status, headers=response.headers, body=response.body)
        )

    async def _drop_oldest(self, session: AsyncSession) -> None:
        mine = IdempotencyRow.owner == self.owner
        num_kept = await session.scalar(select(func.count()).select_from(IdempotencyRow).where(mine)) or 0
        if num_kept <= LIMITS.max_idempotency_keys_per_key:
            return
        # A tenth at a time, so that a full table isn't counted and trimmed row by row.
        oldest = (
            select(IdempotencyRow.created_at)
            .where(mine)
            .order_by(IdempotencyRow.created_at)
            .offset(LIMITS.max_idempotency_keys_per_key // 10)
            .limit(1)
        )
        await session.execute(delete(IdempotencyRow).where(mine, IdempotencyRow.created_at < oldest.scalar_subquery()))
