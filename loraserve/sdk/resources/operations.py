"""`client.operations`: what takes longer than a request, and goes on without one."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from typing import Any

from pydantic import Field

from loraserve import errors
from loraserve.sdk.call import Call, Result, read_into, segment
from loraserve.sdk.file_piece import Progress
from loraserve.sdk.transport.paging import all_rows, all_rows_async
from loraserve.sdk.transport.steps import Pause, Steps, run, run_async
from loraserve.sdk.transport.transport import AsyncTransport, Transport

ROOT = "/api/v1/operations"
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0


class Operation(Result):
    id: str
    kind: str
    target: str
    """What it works on: an adapter's name."""
    state: str
    """running, done, failed or cancelled."""
    progress: dict[str, int | None] = Field(default_factory=dict)
    """``bytes_done`` and ``bytes_total``, as far as they're known."""
    result: dict[str, Any] | None = None
    """Of one that is done: what it made."""
    error: dict[str, Any] | None = None
    """Of one that failed: ``code`` and ``message``."""
    created_at: datetime
    updated_at: datetime

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    @property
    def transferred(self) -> Progress | None:
        """How far it has come; None where it doesn't say."""
        done, total = self.progress.get("bytes_done"), self.progress.get("bytes_total")
        return None if done is None else Progress(done, total or done)

    def failure(self) -> errors.LoraserveError | None:
        """The error that ended it, as the call would have raised it; None: it didn't fail."""
        if self.state == "cancelled":
            return errors.Conflict(f"The operation {self.id} was cancelled.")
        if self.state != "failed":
            return None
        said = self.error or {}
        message = str(said.get("message") or "It doesn't say why.")
        return errors.error_from_code(str(said.get("code", "")), f"The operation {self.id} failed: {message}")


def _get(operation_id: str) -> Call[Operation]:
    return Call("GET", f"{ROOT}/{segment(operation_id, 'operation')}", read_into(Operation))


def _cancel(operation_id: str) -> Call[Operation]:
    return Call("DELETE", f"{ROOT}/{segment(operation_id, 'operation')}", read_into(Operation))


def _wait(
    operation_id: str, timeout_s: float | None, on_progress: Callable[[Progress], object] | None
) -> Steps[Operation]:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        operation: Operation = yield _get(operation_id)
        progress = operation.transferred
        if on_progress is not None and progress is not None:
            on_progress(progress)
        if not operation.is_running:
            failure = operation.failure()
            if failure is not None:
                raise failure
            return operation
        left_s = MAX_PAUSE_S if deadline is None else deadline - time.monotonic()
        if left_s <= 0:
            raise errors.ClientTimeout(
                f"The operation {operation_id} still runs after {timeout_s:g} s, and goes on.",
                hint=f"See: loraserve operation show {operation_id}",
            )
        yield Pause(min(pause_s, left_s))
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


class Operations:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> Iterator[Operation]:
        """The tenant's operations, newest first; pages are asked for as they're needed."""
        return all_rows(self._transport, ROOT, Operation)

    def get(self, operation_id: str) -> Operation:
        """Raises OperationNotFound where there is none, or it is another tenant's."""
        return self._transport.send(_get(operation_id))

    def cancel(self, operation_id: str) -> Operation:
        """The operation as it is: it ends soon, and what it did so far is undone. One that has ended stays as it is."""
        return self._transport.send(_cancel(operation_id))

    def wait(
        self,
        operation_id: str,
        *,
        timeout: float | None = None,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> Operation:
        """Return the operation once it is done.

        Args:
            timeout: seconds to wait at most; None: as long as it takes.

        Raises:
            ClientTimeout: it still runs, and goes on.
            Conflict: it was cancelled.
            LoraserveError: it failed, with the error that ended it.
        """
        return run(self._transport, _wait(operation_id, timeout, on_progress))


class AsyncOperations:
    """As `Operations`, awaiting."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def list(self) -> AsyncIterator[Operation]:
        return all_rows_async(self._transport, ROOT, Operation)

    async def get(self, operation_id: str) -> Operation:
        return await self._transport.send(_get(operation_id))

    async def cancel(self, operation_id: str) -> Operation:
        """As `Operations.cancel`."""
        return await self._transport.send(_cancel(operation_id))

    async def wait(
        self,
        operation_id: str,
        *,
        timeout: float | None = None,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> Operation:
        """As `Operations.wait`."""
        return await run_async(self._transport, _wait(operation_id, timeout, on_progress))
