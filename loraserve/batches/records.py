"""Files and batches as their readers see them, and what a line of a batch's input comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar

from loraserve.db.models import BatchRow, FileRow
from loraserve.tenancy.billing.journal import Totals
from loraserve.types import Digest, TenantId

T = TypeVar("T")

INPUT, OUTPUT = "batch", "batch_output"
"""Purposes of files."""

VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, EXPIRED, CANCELLED = "completed", "failed", "expired", "cancelled"
LIVE_STATES = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)
"""States of batches that a server works on."""
ENDED_STATES = (COMPLETED, FAILED, EXPIRED, CANCELLED)


@dataclass(frozen=True, slots=True)
class FileRecord:
    id: str
    purpose: str
    filename: str
    size: int
    blob: Digest
    created_at: datetime
    expires_at: datetime | None

    @classmethod
    def of(cls, row: FileRow) -> FileRecord:
        return cls(row.id, row.purpose, row.filename, row.size, Digest(row.blob), row.created_at, row.expires_at)


@dataclass(frozen=True, slots=True)
class BatchRecord:
    id: str
    tenant: TenantId
    created_by: str
    input_file_id: str
    input_blob: Digest
    endpoint: str
    completion_window: str
    metadata: Mapping[str, str] | None
    output_ttl_s: int | None
    state: str
    times: Mapping[str, int]
    """Second since 1970 at which it came to each state that it has been in."""
    errors: Sequence[Mapping[str, Any]] | None
    num_lines: int
    num_completed: int
    num_failed: int
    num_chunks: int
    usage: Mapping[str, int]
    output_file_id: str | None
    error_file_id: str | None
    created_at: datetime
    expires_at: datetime

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_STATES

    @classmethod
    def of(cls, row: BatchRow) -> BatchRecord:
        return cls(
            id=row.id,
            tenant=TenantId(row.tenant_id),
            created_by=row.created_by,
            input_file_id=row.input_file_id,
            input_blob=Digest(row.input_blob),
            endpoint=row.endpoint,
            completion_window=row.completion_window,
            metadata=row.labels,
            output_ttl_s=row.output_ttl_s,
            state=row.state,
            times=row.times,
            errors=row.errors,
            num_lines=row.num_lines,
            num_completed=row.num_completed,
            num_failed=row.num_failed,
            num_chunks=row.num_chunks,
            usage=row.usage,
            output_file_id=row.output_file_id,
            error_file_id=row.error_file_id,
            created_at=row.created_at,
            expires_at=row.expires_at,
        )


@dataclass(frozen=True, slots=True)
class NewBatch:
    """Batch as a client requests it."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Mapping[str, str] | None = None
    output_ttl_s: int | None = None


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """Part of a list, as OpenAI's API pages: the next one follows its last item."""

    items: tuple[T, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class BatchError:
    """Fault of a batch's input, or reason of its failure."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def as_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "param": self.param, "line": self.line}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Line of a batch's input.

    Attributes:
        number: from 1; blank lines count, and aren't requests.
        data: the text; None if it is longer than `LIMITS.max_batch_line_bytes`.
    """

    number: int
    data: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class LineRequest:
    """Request in a line, read and not yet checked by its route.

    Attributes:
        body: JSON for the route.
        model: what it is sent to.
    """

    custom_id: str = field(repr=False)
    body: bytes = field(repr=False)
    model: str


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """Answer of a route to a line, and the usage to bill once it is durable.

    Attributes:
        retry_after_s: time after which it is to be tried again; None: the answer is final.
        pauses_batch: whether other lines of the batch would be refused too until then.
    """

    status: int
    request_id: str
    body: bytes = field(repr=False)
    usage: Totals = field(repr=False)
    retry_after_s: float | None = None
    pauses_batch: bool = False


class LineHandler(Protocol):
    """Access to the routes, which compute the lines."""

    def is_ready(self) -> bool:
        """Check whether the routes can answer at all."""
        ...

    def is_open(self) -> bool:
        """Check whether there is room that no client's request waits for."""
        ...

    def read(self, endpoint: str, data: bytes) -> LineRequest:
        """Read a line.

        Raises:
            InvalidRequest: it isn't a request to `endpoint`; `param` names the field.
        """
        ...

    async def check_model(self, batch: BatchRecord, model: str) -> None:
        """Check that the batch's tenant has the model.

        Raises:
            ModelNotFound, InvalidRequest: it hasn't.
            TenantNotFound: the tenant is deleted.
            LoraserveError: it can't be known now.
        """
        ...

    async def run(self, batch: BatchRecord, request: LineRequest) -> LineAnswer:
        """Compute the request as the tenant's own, after all others.

        Raises:
            TenantNotFound: the tenant is deleted.
        """
        ...
