"""Files, and batches of requests in them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from loraserve.sdk.call import Result

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class File(Result):
    """A stored file; times are seconds since 1970."""

    id: str
    filename: str
    bytes: int
    purpose: str
    """``batch`` of an input, ``batch_output`` of results."""
    created_at: int
    expires_at: int | None = None
    """None: it is kept until it is deleted."""


class DeletedFile(Result):
    id: str
    deleted: bool


class RequestCounts(Result):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(Result):
    """A batch; times are seconds since 1970."""

    id: str
    status: str
    endpoint: str
    input_file_id: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: dict[str, Any] | None = None
    """``data``: each fault of the input with its ``code``, ``message`` and ``line``."""
    request_counts: RequestCounts = Field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    created_at: int
    expires_at: int | None = None
    """End of its window: what isn't done by then isn't computed any more."""

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED
