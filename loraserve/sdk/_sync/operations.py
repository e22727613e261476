# Generated from loraserve/sdk/_async/operations.py by `make sdk`: don't edit.
"""`client.operations`: work that outlasts its request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from loraserve import errors
from loraserve.contract.operation import Operation, Progress
from loraserve.sdk._sync.paging import all_rows
from loraserve.sdk._sync.transport import Transport
from loraserve.sdk.call import Call, read_into, segment

ROOT = "/api/v1/operations"
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0


class Operations:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> Iterator[Operation]:
        """Yield the tenant's operations, newest first; pages are requested as they're needed."""
        return all_rows(self._transport, ROOT, Operation)

    def get(self, operation_id: str) -> Operation:
        """Return the operation.

        Raises:
            OperationNotFound: there is none, or it is another tenant's.
        """
        return self._transport.send(Call("GET", _path(operation_id), read_into(Operation)))

    def cancel(self, operation_id: str) -> Operation:
        """Cancel the operation and return its state.

        It ends soon, and its work is undone; no-op once it has ended.
        """
        return self._transport.send(Call("DELETE", _path(operation_id), read_into(Operation)))

    def wait(
        self,
        operation_id: str,
        *,
        timeout: float | None = None,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> Operation:
        """Return the operation once it is done.

        Args:
            timeout: most seconds to wait; None: no bound.

        Raises:
            ClientTimeout: it still runs, and goes on.
            Conflict: it was cancelled.
            LoraserveError: it failed, with the error that ended it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause_s = FIRST_PAUSE_S
        while True:
            operation = self.get(operation_id)
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
                    f"The operation {operation_id} is still running after {timeout:g} s, and continues.",
                    hint=f"See: loraserve operation show {operation_id}",
                )
            self._transport.pause(min(pause_s, left_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _path(operation_id: str) -> str:
    return f"{ROOT}/{segment(operation_id, 'operation')}"
