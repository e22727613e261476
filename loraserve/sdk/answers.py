"""The error that a refusal stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import httpx2

from loraserve import errors
from loraserve.contract.result import Answer as Answer
from loraserve.sdk.retry import retry_after_s

_BY_STATUS: Mapping[int, type[errors.LoraserveError]] = {
    400: errors.InvalidRequest,
    401: errors.AuthenticationError,
    403: errors.PermissionDenied,
    404: errors.NotFound,
    408: errors.ClientTimeout,
    409: errors.Conflict,
    412: errors.PreconditionFailed,
    413: errors.PayloadTooLarge,
    422: errors.InvalidRequest,
    429: errors.RateLimited,
    500: errors.LoraserveError,
    502: errors.Overloaded,
    503: errors.Overloaded,
    504: errors.Overloaded,
    507: errors.StorageFull,
}
"""Classes of answers that have no `code`, or one newer than this client."""


def error_from_response(response: httpx2.Response) -> errors.LoraserveError:
    """Return the error that a refusal (its body already read) stands for.

    `status_code`, `request_id`, `code` and `retry_after_s` are set. Both envelopes are understood:
    OpenAI's ``{"error": {…}}`` and RFC 9457's problem document. Anything else, such as a proxy's
    HTML page, gives `UnexpectedAnswer` or the class of its status.
    """
    body = _json_object(response.content)
    error = _foreign_error(response) if body is None else error_from_body(body, status_code=response.status_code)
    error.status_code = response.status_code
    error.request_id = response.headers.get("x-request-id")
    wait_s = retry_after_s(response.headers, datetime.now(UTC))
    if wait_s is not None and isinstance(error, errors.Overloaded | errors.RateLimited | errors.AdapterNotReady):
        error.retry_after_s = wait_s
    return error


def error_from_body(body: Mapping[str, Any], *, status_code: int | None) -> errors.LoraserveError:
    """Return the error in an envelope. A known `code` decides the class, else the status does."""
    inner = body.get("error")
    fields: Mapping[str, Any] = inner if isinstance(inner, Mapping) else body
    message = _text(fields.get("message")) or _text(fields.get("detail")) or _text(fields.get("title"))
    if message is None:
        message = inner if isinstance(inner, str) else f"The server answered {status_code} without a reason."
    code = _text(fields.get("code"))
    error = errors.error_from_code(code, message) if code is not None else errors.LoraserveError(message)
    if status_code == 409 and isinstance(error, errors.AdapterBaseMismatch):
        # an upload's is a 422; here a published version is meant
        error = errors.AdapterOfAnotherBase(message)
    if type(error) is errors.LoraserveError:
        error = _BY_STATUS.get(status_code or 500, errors.LoraserveError)(message)
    if code is not None:
        error.code = code
    problems = fields.get("errors")
    if isinstance(error, errors.InvalidRequest | errors.AdapterOfAnotherBase):
        error.param = _text(fields.get("param")) or _first_param(problems)
    if isinstance(error, errors.AdapterRejected) and isinstance(problems, list) and problems:
        error.problems = tuple(_problem(problem) for problem in problems)
    hint = _text(fields.get("hint"))
    if hint is not None and hint not in message:
        error.hint = hint
    return error


def _foreign_error(response: httpx2.Response) -> errors.LoraserveError:
    status = f"{response.status_code} {response.reason_phrase}".strip()
    kind = response.headers.get("content-type", "no content type")
    message = f"{response.request.method} {response.request.url} was answered with {status} ({kind})"
    if response.status_code in (502, 503, 504):
        return errors.Overloaded(f"{message}: a proxy is in front of the server, or the server is starting.")
    return errors.UnexpectedAnswer(
        f"{message}; expected an error in JSON, as a loraserve server sends it.",
        hint="Check that this is the URL of a loraserve server.",
    )


def _json_object(content: bytes) -> Mapping[str, Any] | None:
    try:
        body = json.loads(content)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _problem(problem: object) -> str:
    """Return an entry of `errors[]` as one line: the problem and its field."""
    if not isinstance(problem, Mapping):
        return str(problem)
    detail = _text(problem.get("detail")) or json.dumps(problem)
    field = _text(problem.get("field"))
    return f"{field}: {detail}" if field and field not in detail else detail


def _first_param(problems: object) -> str | None:
    if not isinstance(problems, list):
        return None
    return next(
        (field for problem in problems if isinstance(problem, Mapping) and (field := _text(problem.get("field")))), None
    )
