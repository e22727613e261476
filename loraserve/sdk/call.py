"""A call of the API as a value: the request, and the reader of its answer.

Both transports send it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from pydantic import ValidationError

from loraserve import errors
from loraserve.contract.result import Answer, Result
from loraserve.sdk.file_piece import FilePiece

T = TypeVar("T")
R = TypeVar("R", bound=Result)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request that can be built any number of times.

    It has the function that reads its answer's body.
    """

    method: str
    path: str
    read: Callable[[Answer, bytes], T]
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    """JSON, encoded, unless `headers` say that it is something else."""
    piece: FilePiece | None = None
    timeout_s: float | None = None
    """Timeout of this call; None: the client's."""

    @property
    def is_repeatable(self) -> bool:
        """True if sending it twice does what sending it once does.

        Then a broken connection may be tried again.
        """
        if self.method == "POST":
            # of these each makes another one
            is_making = self.path in ("/v1/files", "/v1/batches")
            is_asking = self.path == "/tokenize" or (self.path.startswith("/v1/") and not is_making)
            return "Idempotency-Key" in self.headers or is_asking
        return self.method == "GET" or (self.method == "PUT" and "If-Match" not in self.headers)


def read_into(kind: type[R]) -> Callable[[Answer, bytes], R]:
    """Return a reader that parses the body as a `kind`.

    Raises (when called):
        UnexpectedAnswer: the body isn't one.
    """

    def read(answer: Answer, body: bytes) -> R:
        result = parse(kind, body)
        result._answer = answer
        return result

    return read


def read_nothing(_answer: Answer, _body: bytes) -> None:
    """Read nothing of an answer without a body."""


def parse(kind: type[R], body: bytes | str) -> R:
    """Parse JSON as a `kind`.

    Raises:
        UnexpectedAnswer: the JSON isn't one.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise errors.UnexpectedAnswer(
            f"The server's answer isn't a {kind.__name__}: {where}: {first['msg']}.",
            hint="Check that this is a loraserve server of the same version as this client.",
        ) from error


def encode(value: Mapping[str, Any]) -> bytes:
    """Return a request's body as JSON.

    Raises:
        InvalidRequest: it holds a value that JSON has no word for (NaN, infinity, an object, half a
            surrogate pair).
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise errors.InvalidRequest(f"The request can't be written as JSON: {error}.") from error


def idempotency_key() -> dict[str, str]:
    """Return a header by which the server recognises a repeated request."""
    return {"Idempotency-Key": uuid.uuid4().hex}


def if_match_header(etag: str | None) -> dict[str, str]:
    """Return the header that makes a change fail unless the resource still has this ETag.

    There is none if the ETag is None.
    """
    return {} if etag is None else {"If-Match": etag}


def segment(name: str, what: str, *, safe: str = "") -> str:
    """Quote `name` as part of a URL's path.

    Raises:
        InvalidRequest: an empty name, or one that would lead to another path.
    """
    if not name or any(part in ("", ".", "..") for part in name.split("/")):
        raise errors.InvalidRequest(f"{name!r} can't be {what}.", param=what)
    return quote(name, safe=safe)
