"""What a request is told that ends otherwise than by its last token."""

from __future__ import annotations

from loraserve.engine.request import Request
from loraserve.errors import (
    AdapterNotReady,
    AdapterNumerics,
    EngineError,
    InvariantViolation,
    LoraserveError,
)
from loraserve.memory.residency.pager import Residency


def overdue_error(request: Request, state: Residency, deadline_s: float) -> LoraserveError:
    adapter = request.adapter
    if adapter is None:
        raise InvariantViolation(f"request {request.request_id} waits for an adapter and has none")
    why = (
        "everything on the device is in use"
        if state is Residency.WAITING_FOR_SPACE
        else "it is still being read, or waits for its turn"
    )
    name = adapter.name if adapter.parts else f"{adapter.name}@{adapter.version}"
    return AdapterNotReady(
        f'The adapter "{name}" was not on the device within {deadline_s:g} s: {why}.',
        hint="Try again shortly: it may be there by then.",
    )


def numerics_error(request: Request) -> LoraserveError:
    if request.adapter is None or request.activation is None:
        return EngineError("The base model's logits for this request were not finite.")
    return AdapterNumerics(
        f'The logits of adapter "{request.adapter.name}@{request.adapter.version}" for this request were not finite.',
        hint="Check the adapter's weights; other requests were not touched.",
    )
