"""End of a request at its own timeout, as server and engine both produce it."""

from __future__ import annotations

from loraserve.errors import DeadlineExceeded

TIMEOUT = "timeout"
"""Stop reason of an answer that its request's timeout cut short."""


def timeout_error(timeout_s: float) -> DeadlineExceeded:
    """Return the error of a request that timed out before its first token."""
    return DeadlineExceeded(
        f"The request got no token within its timeout of {timeout_s:g} s.",
        hint="Try again later, or set a longer timeout.",
    )
