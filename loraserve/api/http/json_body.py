"""JSON as it must be: one reading, no surprises. Every body under /v1 passes here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import orjson
from starlette.requests import Request

from loraserve.api.http.text_threads import TextThreads
from loraserve.errors import InvalidRequest
from loraserve.limits import KIB, LIMITS

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_ON_LOOP_BYTES = 32 * KIB
"""A body of nothing but brackets takes some milliseconds of it."""
_MAX_DIGITS = 40


async def json_object(request: Request, text_threads: TextThreads) -> dict[str, Any]:
    """Parse the body's object. A long body is parsed on `text_threads`.

    Raises:
        InvalidRequest: it isn't one, or isn't strict JSON; the message says why and never what was
            sent.
    """
    caller = getattr(request.state, "caller", None)
    return await json_object_of(await request.body(), text_threads, "" if caller is None else caller.tenant)


async def json_object_of(body: bytes, text_threads: TextThreads, tenant: str) -> dict[str, Any]:
    """Parse the object of a body that was read, as `json_object` does.

    Raises:
        InvalidRequest
    """
    if len(body) <= _ON_LOOP_BYTES:
        value = parse_json(body)
    else:
        value = await text_threads.run(tenant, len(body), partial(parse_json, body))
    if not isinstance(value, dict):
        raise InvalidRequest("The body should be a JSON object.")
    return value


def dump_json(value: Any) -> bytes:
    """Encode the value as JSON, with integers of any length.

    Clients' schemas and transformers' configs have some beyond the 64 bits that orjson writes.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(_with_long_integers(value))


dump_text: Callable[[str], bytes] = orjson.dumps
"""Encode a text as `dump_json` does, by orjson's own function: it is called for each token."""


def _with_long_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_long_integers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_long_integers(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return orjson.Fragment(str(value).encode())
    return value


def parse_json(body: bytes, max_depth: int = LIMITS.max_json_depth) -> Any:
    """Parse strict JSON: UTF-8, finite numbers, no duplicate keys, bounded depth.

    Lone surrogates are refused too.

    Raises:
        InvalidRequest: it isn't that.
    """
    if not body:
        raise InvalidRequest("The body is empty; it should be a JSON object.")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not UTF-8 (byte {error.start}).") from None
    num_brackets = body.count(b"[") + body.count(b"{")
    if num_brackets > LIMITS.max_json_containers and count_containers(body) > LIMITS.max_json_containers:
        raise InvalidRequest(f"The body's JSON has more than {LIMITS.max_json_containers} objects and arrays.")
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
    # Fewer brackets than the bound can't be nested deeper, and without an escape there is no
    # surrogate: most bodies skip the walk.
    if num_brackets > max_depth or _SURROGATE_ESCAPE.search(body):
        _check_tree(value, max_depth)
    return value


def count_containers(body: bytes) -> int:
    """Count the objects and arrays that begin in a JSON text: its brackets outside strings."""
    # no backslash pairs and no escaped quotes: what is left of quotes are the strings' ends
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    return outside.count(b"[") + outside.count(b"{")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise InvalidRequest("The body's JSON has an object with the same key twice.")
    return value


def _refuse_constant(_: str) -> NoReturn:
    raise InvalidRequest("The body is not valid JSON: NaN and Infinity are not JSON numbers.")


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
