"""Work that outlasts its request: operations and resumable uploads."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from loraserve import errors
from loraserve.contract.result import DictOf, Result


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of an upload or a download transferred so far."""

    sent_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        share = 100 * self.sent_bytes // self.total_bytes if self.total_bytes else 100
        return f"{self.sent_bytes:,} of {self.total_bytes:,} bytes ({share} %)"


class OperationProgress(Result):
    bytes_done: int
    bytes_total: int | None
    """None: not known yet."""


class Operation(Result):
    id: str
    kind: str
    target: str
    """The adapter that it works on."""
    state: str
    """running, done, failed or cancelled."""
    progress: Annotated[dict[str, int | None], DictOf(OperationProgress)] = Field(default_factory=dict)
    """``bytes_done`` and ``bytes_total``, as far as they're known."""
    result: dict[str, Any] | None = None
    """The outcome of one that is done."""
    error: dict[str, str] | None = None
    """``code`` and ``message`` of one that failed."""
    created_at: datetime
    updated_at: datetime

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    @property
    def transferred(self) -> Progress | None:
        """The bytes transferred so far; None if unknown."""
        done, total = self.progress.get("bytes_done"), self.progress.get("bytes_total")
        return None if done is None else Progress(done, total or done)

    def failure(self) -> errors.LoraserveError | None:
        """Make the error that ended it, as the call would have raised it.

        None if it didn't fail.
        """
        if self.state == "cancelled":
            return errors.Conflict(f"The operation {self.id} was cancelled.")
        if self.state != "failed":
            return None
        error = self.error or {}
        message = error.get("message") or "It doesn't say why."
        return errors.error_from_code(error.get("code", ""), f"The operation {self.id} failed: {message}")


class Upload(Result):
    """A resumable upload and its progress."""

    id: str
    sha256: str
    size: int
    received: int
    """Leading bytes of the file that are stored durably: where the next piece begins."""
    is_complete: bool
    """Whether the whole blob is there, and hashes to its digest."""
    expires_at: datetime
