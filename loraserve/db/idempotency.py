"""``Idempotency-Key``: a repeated POST does its work once and gets the first answer again.

The answer is stored in the transaction of the work, so after a crash either both exist or neither
does. Of two concurrent equal requests, the second waits for the first one's transaction and gets
its answer. Only successes are stored; a failed request may be repeated with the same key.
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
    """Answer to the first request.

    It has the headers that belong to the result (``ETag``, ``Location``).
    """

    status: int
    headers: dict[str, str]
    body: bytes


class Replay(Exception):
    """The work was done before; `response` is its answer."""

    def __init__(self, response: StoredResponse) -> None:
        super().__init__("answered before")
        self.response = response


@dataclass(frozen=True, slots=True)
class Once(Generic[T]):
    """Guard that a request does its work once.

    Args:
        owner: API key and tenant; keys of different owners are independent.
        key: value of the header; stored as a hash.
        fingerprint: hash of method, path, query and content. The same key with another fingerprint
            is refused.
        render: converts the work's result to the stored answer, without secrets.
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
        """Check that the key is unused.

        Raises:
            Replay: the work was done before.
            IdempotencyKeyReused: the key was used for another request.
        """
        row = await session.get(IdempotencyRow, (self.owner, self._hash))
        if row is None or row.expires_at <= self.clock():
            return
        if row.fingerprint != self.fingerprint:
            raise IdempotencyKeyReused(
                "This Idempotency-Key was already used for a different request.",
                hint="Use a new key for a new request.",
            )
        raise Replay(StoredResponse(row.status, row.headers, row.body))

    async def begin(self, session: AsyncSession) -> None:
        """Take the key at the start of the work's transaction.

        `finish` must follow in the same transaction.

        Raises:
            Replay, IdempotencyKeyReused: as `check`, also after waiting for a concurrent request.
        """
        now = self.clock()
        identity = tuple_(IdempotencyRow.owner, IdempotencyRow.key_hash)
        # Skip locked rows, so that two requests that delete expired keys don't deadlock.
        expired = select(IdempotencyRow.owner, IdempotencyRow.key_hash).where(IdempotencyRow.expires_at <= now)
        await session.execute(
            delete(IdempotencyRow).where(identity.in_(expired.limit(100).with_for_update(skip_locked=True)))
        )
        # This key's own row must be deleted even if it wasn't among those.
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
        """Store the answer for `result` along with the work."""
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
        # Delete a tenth at a time, so that a full table isn't trimmed row by row.
        oldest = (
            select(IdempotencyRow.created_at)
            .where(mine)
            .order_by(IdempotencyRow.created_at)
            .offset(LIMITS.max_idempotency_keys_per_key // 10)
            .limit(1)
        )
        await session.execute(delete(IdempotencyRow).where(mine, IdempotencyRow.created_at < oldest.scalar_subquery()))
