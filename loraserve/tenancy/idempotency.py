"""The door to `loraserve.db.idempotency` for the HTTP side.

That side doesn't see the database's package.
"""

from loraserve.db.idempotency import Once, Replay, StoredResponse

__all__ = ["Once", "Replay", "StoredResponse"]
