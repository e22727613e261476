"""JSON as it must be: one reading, no surprises. Every body under /v1 passes here."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, NoReturn

from starlette.requests import Request

from loraserve.errors import InvalidRequest
from loraserve.limits import KIB, LIMITS

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_OFF_LOOP_BYTES = 256 * KIB
_MAX_DIGITS = 40


async def json_object(request: Request) -> dict[str, Any]:
    """The body's object.

    Raises:
        InvalidRequest: it isn't one, or isn't strict JSON; the message says why and never what was sent.
    """
    body = await request.body()
    value = await asyncio.to_thread(parse_json, body) if len(body) > _OFF_LOOP_BYTES else parse_json(body)
    if not isinstance(value, dict):
        raise InvalidRequest("The body should be a JSON object.")
    return value


def parse_json(body: bytes, max_depth: int = LIMITS.max_json_depth) -> Any:
    """The value of strict JSON: UTF-8, no NaN or infinity (``1e400`` is one), no duplicate keys, no lone surrogates, no deeper than `max_depth`.

    Raises:
        InvalidRequest: it isn't that.
    """
    if not body:
        raise InvalidRequest("The body is empty; it should be a JSON object.")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not UTF-8 (byte {error.start}).") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_bounded_int,
        )
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error.msg} (character {error.pos}).") from None
    except RecursionError:
        raise InvalidRequest(f"The body's JSON is nested deeper than {max_depth}.") from None
    # Fewer brackets than the bound can't be nested deeper, and without an escape there is no surrogate: most bodies skip the walk.
    if body.count(b"[") + body.count(b"{") > max_depth or _SURROGATE_ESCAPE.search(body):
        _check_tree(value, max_depth)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise InvalidRequest("The body's JSON has an object with the same key twice.")
    return value


def _refuse_constant(_: str) -> NoReturn:
    raise InvalidRequest("The body is not valid JSON: NaN and Infinity are not numbers of JSON.")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidRequest("The body has a number that is too large.")
    return value


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise InvalidRequest("The body has a number that is too large.")
    return int(text)


def _check_tree(value: Any, max_depth: int) -> None:
    stack: list[tuple[Any, int]] = [(value, 1)]
    while stack:
        node, depth = stack.pop()
        if isinstance(node, str):
            _check_text(node)
        elif isinstance(node, dict | list):
            if depth > max_depth:
                raise InvalidRequest(f"The body's JSON is nested deeper than {max_depth}.")
            if isinstance(node, dict):
                for key in node:
                    _check_text(key)
            children = node.values() if isinstance(node, dict) else node
            stack.extend((child, depth + 1) for child in children if isinstance(child, str | dict | list))


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequest("The body has a lone surrogate (half of a \\ud83d\\ude00 pair) in a string.") from None
