"""Events of a stream: the chunk in each, and the errors that end one early."""

from __future__ import annotations

import json
from typing import TypeVar

import httpx2

from loraserve import errors
from loraserve.contract.result import Answer, Result
from loraserve.sdk.answers import error_from_body
from loraserve.sdk.attempt import error_from_failure
from loraserve.sdk.call import parse

C = TypeVar("C", bound=Result)
DONE = "[DONE]"


def parse_chunk(data: str, kind: type[C], answer: Answer) -> C:
    """Return the event's chunk.

    Raises:
        LoraserveError: the event is an error (``{"error": {…}}``).
        UnexpectedAnswer: it is neither.
    """
    if '"error"' in data:
        body = _load(data)
        if isinstance(body, dict) and body.get("error"):
            error = error_from_body(body, status_code=None)
            error.request_id = answer.request_id
            raise error
    return parse(kind, data)


def _load(data: str) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return None


def stream_error(failure: httpx2.TransportError, url: str, answer: Answer) -> errors.LoraserveError:
    """Return the error for a stream that broke, or that isn't one."""
    error: errors.LoraserveError
    if isinstance(failure, httpx2.SSEError):
        error = errors.UnexpectedAnswer(f"The answer isn't a stream of events: {failure}")
    else:
        error = error_from_failure(failure, url)
    error.request_id = answer.request_id
    return error


def incomplete(answer: Answer) -> errors.LoraserveError:
    """Return the error for a stream that ended without its last event."""
    error = errors.ConnectionFailed(
        "The stream ended without its last event: the answer is incomplete.",
        hint="The server, or a proxy in front of it, ended the connection. Send the request again.",
    )
    error.request_id = answer.request_id
    return error
