"""The door to `loraserve.db.idempotency` for the HTTP side,
which doesn't see the database's package.
"""

from loraserve.db.idempotency import Once, Replay, StoredResponse

__all__ = ["Once", "Replay", "StoredResponse"]
