"""The end of a request whose own time is over: an answer that is cut short, or an error where nothing was made. Known to the server and to the engine."""

from __future__ import annotations

from loraserve.errors import DeadlineExceeded

TIMEOUT = "timeout"
"""The stop reason of an answer that ends early, since its request's own time was over."""


def timeout_error(timeout_s: float) -> DeadlineExceeded:
    """Its own time was over before its first token."""
    return DeadlineExceeded(
        f"No token could be made within the {timeout_s:g} s that the request gives itself.",
        hint="Try again later, or with a longer timeout.",
    )
