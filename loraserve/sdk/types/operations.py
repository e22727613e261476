"""Operations: work that outlasts its request."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from loraserve import errors
from loraserve.sdk.call import Result
from loraserve.sdk.file_piece import Progress


class Operation(Result):
    id: str
    kind: str
    target: str
    """The adapter that it works on."""
    state: str
    """running, done, failed or cancelled."""
    progress: dict[str, int | None] = Field(default_factory=dict)
    """``bytes_done`` and ``bytes_total``, as far as they're known."""
    result: dict[str, Any] | None = None
    """The outcome of one that is done."""
    error: dict[str, Any] | None = None
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
        """Return the error that ended it, as the call would have raised it.

        None if it didn't fail.
        """
        if self.state == "cancelled":
            return errors.Conflict(f"The operation {self.id} was cancelled.")
        if self.state != "failed":
            return None
        error = self.error or {}
        message = str(error.get("message") or "It doesn't say why.")
        return errors.error_from_code(str(error.get("code", "")), f"The operation {self.id} failed: {message}")
