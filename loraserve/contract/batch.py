"""Files, and batches of requests in them. Times are seconds since 1970."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from loraserve.contract.result import ALWAYS, DictOf, Result, one_of
from loraserve.contract.usage import PromptTokensDetails, ReasoningDetails

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class File(Result):
    """A stored file; times are seconds since 1970."""

    id: str
    object: Annotated[str, one_of("file")] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    """None: it is kept until it is deleted."""
    filename: str
    purpose: Annotated[str, one_of("batch", "batch_output")]
    """``batch`` of an input, ``batch_output`` of results."""
    status: Annotated[str, one_of("processed")] = "processed"


class DeletedFile(Result):
    id: str
    object: Annotated[str, one_of("file")] = "file"
    deleted: bool


class InputError(Result):
    """A fault of a batch's input."""

    code: str
    message: str
    param: str | None
    line: int | None


class InputErrors(Result):
    object: Annotated[str, one_of("list")]
    data: list[InputError]


class RequestCounts(Result):
    """Lines of a batch's input, by their state."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(Result):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class Batch(Result):
    """A batch; times are seconds since 1970."""

    id: str
    object: Annotated[str, one_of("batch")] = "batch"
    endpoint: str
    errors: Annotated[dict[str, Any], DictOf(InputErrors)] | None = None
    """``data``: each fault of the input with its ``code``, ``message`` and ``line``."""
    input_file_id: str
    completion_window: Annotated[str | None, ALWAYS] = None
    status: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: Annotated[int | None, ALWAYS] = None
    """End of its window: what isn't done by then isn't computed any more."""
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = Field(default_factory=RequestCounts)
    usage: Annotated[BatchUsage | None, ALWAYS] = None
    metadata: dict[str, str] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED
