"""Errors: classes, codes, HTTP's status and envelope, and what the SDK makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx2

from loraserve import errors
from loraserve.api.errors import error_response
from loraserve.sdk.answers import error_from_response
from loraserve.sdk.retry import RetryPolicy

RETRIES = RetryPolicy(max_retries=1, random=lambda: 0.0, now=lambda: datetime(2026, 1, 1, tzinfo=UTC))


def test_errors(golden: Callable[..., None]) -> None:
    """One error a paragraph: with its parent, each envelope, its headers,
    and the SDK's error and retry.
    """
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.LoraserveError)]
    lines = []
    for cls in sorted(classes, key=lambda cls: cls.__name__):
        error = cls("MESSAGE", hint="HINT")
        parent = "" if cls is errors.LoraserveError else f"({cls.__base__.__name__})"
        lines += [f"{cls.__name__}{parent}", f"    code {cls.code}"]
        lines.append(f"    from its code {type(errors.error_from_code(cls.code, 'MESSAGE')).__name__}")
        for path in ("/v1/completions", "/api/v1/adapters"):
            response = error_response(error, path=path, request_id="ID")
            headers = {name: value for name, value in sorted(response.headers.items()) if name != "content-length"}
            lines.append(f"    {path} {response.status_code} {json.dumps(json.loads(response.body), sort_keys=True)}")
            lines.append(f"    {path} headers {json.dumps(headers)}")
            lines.append(f"    {path} in the SDK {in_sdk(response)}")
    for kind in ("requests", "tokens"):
        body = error_response(errors.RateLimited("", kind=kind), path="/v1/completions", request_id="ID").body
        lines.append(f"too many {kind}: type {json.loads(body)['error']['type']}")
    golden("errors.txt", lines)


def in_sdk(response: Any) -> str:
    """Return the class that the SDK raises for the answer, and whether it asks again before."""
    request = httpx2.Request("GET", "http://server/")
    answer = httpx2.Response(
        response.status_code, headers=dict(response.headers), content=response.body, request=request
    )
    delay_s = RETRIES.delay_after_answer(0, answer.status_code, answer.headers)
    return (
        f"{type(error_from_response(answer)).__name__}, {'no retry' if delay_s is None else f'retry after {delay_s} s'}"
    )
