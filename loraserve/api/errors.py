"""Translate errors to HTTP: class → status, and the body that the route's clients expect."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.responses import Response

from loraserve import errors
from loraserve.api.unknown_routes import RouteTable, absent_route, not_allowed
from loraserve.errors import InvalidRequest, LoraserveError

logger = logging.getLogger(__name__)

MANAGEMENT_PREFIX = "/api/v1"

# The first class of an error's bases that stands here decides.
_STATUS: dict[type[LoraserveError], int] = {
    errors.HeadersTooLarge: 431,
    errors.PayloadTooLarge: 413,
    errors.ContentEncodingUnsupported: 415,
    errors.MethodNotAllowed: 405,
    errors.RequestTimeout: 408,
    errors.InvalidRequest: 400,
    errors.AuthenticationError: 401,
    errors.PermissionDenied: 403,
    errors.NotFound: 404,
    errors.PreconditionFailed: 412,
    errors.IdempotencyKeyReused: 422,
    errors.Conflict: 409,
    errors.AdapterRejected: 422,
    errors.AdapterQuarantined: 409,
    errors.AdapterOfAnotherBase: 409,
    errors.AdapterTooLarge: 507,
    errors.AdapterUnavailable: 503,
    errors.Overloaded: 503,
    errors.RateLimited: 429,
    errors.EngineUnavailable: 503,
    errors.DeadlineExceeded: 504,
    errors.StorageFull: 507,
    errors.StorageError: 503,
    LoraserveError: 500,
}

# OpenAI's `type` for a status.
_OPENAI_TYPE = {403: "permission_error", 503: "server_error"}

# `error_type` on LoRAX's and TGI's routes, by the first class that fits.
_GENERATE_TYPES: tuple[tuple[type[LoraserveError], str], ...] = (
    (errors.InvalidRequest, "validation"),
    (errors.AuthenticationError, "authentication"),
    (errors.PermissionDenied, "permission"),
    (errors.NotFound, "not_found"),
    (errors.Overloaded, "overloaded"),
    (errors.RateLimited, "rate_limited"),
    (errors.DeadlineExceeded, "incomplete_generation"),
    (LoraserveError, "generation"),
)
# `type` of Anthropic's errors for a status; other statuses are the server's or the request's fault.
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
_MESSAGES_PATH = re.compile(r"(/t/[^/]+)?/v1/messages(/.*)?")
_GENERATE_PATH = re.compile(r"(/t/[^/]+)?/(generate|generate_stream)?")
_OLLAMA_PATH = re.compile(r"(/t/[^/]+)?/api/(?!v1(/|$)).*")

# A second try gives the same answer, or the time for one is over: the OpenAI client would otherwise
# repeat every 409 and 5xx.
_NOT_WORTH_RETRYING = (
    errors.AdapterUnservable,
    errors.AdapterNumerics,
    errors.AdapterCorrupt,
    errors.AdapterQuarantined,
    errors.AdapterOfAnotherBase,
    errors.EngineCrashed,
    errors.DeadlineExceeded,
)

_DEFAULT_RETRY_AFTER_S = 1.0


def status_of(error: LoraserveError) -> int:
    for cls in type(error).__mro__:
        if cls in _STATUS:
            return _STATUS[cls]
    return 500


def client_status_of(error: LoraserveError) -> int:
    """Choose the status that OpenAI's, vLLM's and SGLang's clients expect: 400 in place of 422."""
    status = status_of(error)
    return 400 if status == 422 else status


def openai_envelope(error: LoraserveError) -> dict[str, Any]:
    """Build ``{"error": {…}}`` as OpenAI's clients read it.

    It is for a body or for a stream's ``data:`` line.
    """
    status = status_of(error)
    default = "server_error" if status >= 500 else "invalid_request_error"
    param = getattr(error, "param", None)
    return {
        "error": {
            "message": str(error),
            "type": error.kind if isinstance(error, errors.RateLimited) else _OPENAI_TYPE.get(status, default),
            "param": param or "model" if isinstance(error, errors.ModelNotFound) else param,
            "code": error.code,
        }
    }


def generate_envelope(error: LoraserveError) -> dict[str, Any]:
    """Build ``{"error", "error_type", …}`` as LoRAX's and TGI's clients read it.

    They choose an exception by ``error_type`` if they have one for it, otherwise by the status.
    """
    kind = next(kind for cls, kind in _GENERATE_TYPES if isinstance(error, cls))
    param = "parameters.adapter_id" if isinstance(error, errors.ModelNotFound) else getattr(error, "param", None)
    return {"error": str(error), "error_type": kind, "code": error.code, "param": param}


def messages_envelope(error: LoraserveError, request_id: str | None) -> dict[str, Any]:
    """Build ``{"type": "error", "error": {…}}`` as Anthropic's clients read it.

    `code` and `param` next to its fields are this server's.
    """
    status = status_of(error)
    kind = _MESSAGES_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    param = getattr(error, "param", None)
    param = param or "model" if isinstance(error, errors.ModelNotFound) else param
    detail: dict[str, Any] = {"type": kind, "message": str(error), "code": error.code, "param": param}
    if isinstance(error, errors.UnsupportedParameter) and param == "thread":
        # with this code, the clients' loops of tool calls continue without a thread
        detail["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": detail, "request_id": request_id}


def ollama_envelope(error: LoraserveError) -> dict[str, Any]:
    """Build ``{"error", …}`` as Ollama's clients read it. `code` and `param` are this server's."""
    param = getattr(error, "param", None)
    param = param or "model" if isinstance(error, errors.ModelNotFound) else param
    return {"error": str(error), "code": error.code, "param": param}


def is_messages_path(path: str) -> bool:
    """Check whether Anthropic's clients call the route."""
    return _MESSAGES_PATH.fullmatch(path) is not None


def problem(error: LoraserveError, request_id: str | None) -> dict[str, Any]:
    """RFC 9457's problem document.

    ``errors`` has one entry per thing that is wrong: ``{"detail", "field"}``.
    """
    status = status_of(error)
    if isinstance(error, errors.AdapterRejected):
        details = [{"detail": text, "field": None} for text in error.problems]
    else:
        details = [{"detail": error.message, "field": getattr(error, "param", None)}]
    extra = {"received": error.received} if isinstance(error, errors.UploadOffsetMismatch) else {}
    return {
        **extra,
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": str(error),
        "code": error.code,
        "errors": details,
        "request_id": request_id,
    }


def headers_of(error: LoraserveError) -> dict[str, str]:
    """Build the headers that belong to the error.

    They are ``Retry-After`` in seconds and ``retry-after-ms``, or ``WWW-Authenticate`` on a 401.
    """
    status = status_of(error)
    if status == 401:
        return {"www-authenticate": 'Bearer realm="loraserve"'}
    if isinstance(error, _NOT_WORTH_RETRYING):
        return {"x-should-retry": "false"}
    if status not in (429, 503):
        return {}
    retry_after_s = float(getattr(error, "retry_after_s", _DEFAULT_RETRY_AFTER_S))
    headers = {
        "retry-after": str(max(1, math.ceil(retry_after_s))),
        "retry-after-ms": str(max(1, math.ceil(retry_after_s * 1000))),
    }
    # time alone doesn't mend it
    return headers | ({"x-should-retry": "false"} if isinstance(error, errors.QuotaExceeded) else {})


def error_response(
    error: LoraserveError, *, path: str, request_id: str | None, headers: Mapping[str, str] | None = None
) -> Response:
    """Build the response for `error`.

    It is problem+json under /api/v1, LoRAX's, Anthropic's and Ollama's forms on their routes, and
    OpenAI's envelope elsewhere.
    """
    is_management = path == MANAGEMENT_PREFIX or path.startswith(MANAGEMENT_PREFIX + "/")
    if is_management:
        body = problem(error, request_id)
    elif is_messages_path(path):
        body = messages_envelope(error, request_id)
    elif _OLLAMA_PATH.fullmatch(path):
        body = ollama_envelope(error)
    else:
        body = generate_envelope(error) if _GENERATE_PATH.fullmatch(path) else openai_envelope(error)
    media_type = "application/problem+json" if is_management else "application/json"
    return Response(
        orjson.dumps(body),
        status_code=status_of(error) if is_management else client_status_of(error),
        headers={**headers_of(error), **(headers or {})},
        media_type=media_type,
    )


def from_http_exception(error: HTTPException) -> LoraserveError:
    """Translate the framework's own refusals. The message never repeats what was sent."""
    if error.status_code == 413:
        return errors.PayloadTooLarge("The request's body is too large.")
    if 400 <= error.status_code < 500:
        return InvalidRequest("The request can't be read.")
    return LoraserveError("The server failed.")


def from_validation_error(error: RequestValidationError) -> InvalidRequest:
    """Translate a path or query parameter that isn't what the route declares.

    The message doesn't repeat the input.
    """
    details = error.errors()
    if not details:
        return InvalidRequest("The request is not valid.")
    location = [str(part) for part in details[0]["loc"] if part not in ("path", "query", "body", "header")]
    param = ".".join(location) or None
    return InvalidRequest(f"{param or 'The request'}: {details[0]['msg']}.", param=param)


def install(app: FastAPI) -> None:
    """Install the handlers of every error that a route raises, or that no route answers.

    An unforeseen error is logged, and its response only states that it happened.
    """

    routes = RouteTable(app)

    def respond(request: Request, error: LoraserveError, headers: Mapping[str, str] | None = None) -> Response:
        state = request.scope.get("state", {})
        request_id = state.get("request_id")
        if "record" in state:
            state["record"].code = error.code
        if status_of(error) >= 500:
            logger.warning("request %s failed: %s: %s", request_id, type(error).__name__, error)
        return error_response(error, path=request.scope["path"], request_id=request_id, headers=headers)

    async def on_loraserve_error(request: Request, error: Exception) -> Response:
        return respond(request, error if isinstance(error, LoraserveError) else unforeseen(error))

    async def on_http_exception(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return respond(request, unforeseen(error))
        method, path = request.method, request.scope["path"]
        if error.status_code == 404:
            return respond(request, routes.not_found(method, path))
        if error.status_code == 405:
            # the last part of such a path is taken for a response's id
            if (absent := absent_route(method, path)) is not None:
                return respond(request, absent)
            allowed = _allowed(request)
            return respond(request, not_allowed(method, path, allowed), {"allow": ", ".join(allowed)})
        return respond(request, from_http_exception(error))

    async def on_validation_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, RequestValidationError):
            return respond(request, unforeseen(error))
        return respond(request, from_validation_error(error))

    app.add_exception_handler(LoraserveError, on_loraserve_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_validation_error)


def _allowed(request: Request) -> list[str]:
    """List the methods of every route with the request's path.

    The framework names only the first's.
    """
    path = request.scope["path"]
    methods: set[str] = set()
    for context in iter_route_contexts(request.app.routes):
        if context.path_regex is not None and context.path_regex.match(path):
            methods |= context.methods or set()
    return sorted(methods)


def unforeseen(error: BaseException) -> LoraserveError:
    """Log an error that is our fault, and return the error to show the client in its place."""
    logger.error("a request failed with an unexpected error", exc_info=error)
    return LoraserveError("The server failed to answer this request; its log has the reason, under the request's id.")
