"""JSON from a stranger: strict UTF-8, no duplicate keys, bounded depth.

It has no NaN or infinity and no lone surrogates.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from loraserve.errors import AdapterFormatError


class _Refused(ValueError):
    pass


def parse_object(data: bytes, *, what: str, max_depth: int) -> dict[str, Any]:
    """Parse the JSON object in `data`; `what` names it in messages.

    Raises:
        AdapterFormatError: it isn't one strict JSON object.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise AdapterFormatError(f"{what} isn't UTF-8: byte {error.start} is invalid.") from None
    except json.JSONDecodeError as error:
        raise AdapterFormatError(
            f"{what} isn't JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except RecursionError:
        raise AdapterFormatError(f"{what} is nested deeper than {max_depth}.") from None
    except ValueError as error:
        # also Python's own bound on the digits of an integer
        raise AdapterFormatError(f"{what} isn't strict JSON: {error}.") from None
    if not isinstance(value, dict):
        raise AdapterFormatError(f"{what} holds a JSON {type(value).__name__}; expected an object.")
    _check(value, what, max_depth)
    return value


def shown(value: object, max_length: int = 80) -> str:
    """`value` as short plain ASCII for a message; input is never echoed at length."""
    text = ascii(value)
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {shown(key)} appears twice")
            seen.add(key)
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise _Refused(f"{text} isn't a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"the number {shown(text)} is out of range")
    return value


def _check(value: dict[str, Any], what: str, max_depth: int) -> None:
    level: list[Any] = [value]
    for _ in range(max_depth):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                deeper.extend(item.keys())
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
            elif isinstance(item, str) and not item.isascii() and any("\ud800" <= c <= "\udfff" for c in item):
                raise AdapterFormatError(f"{what} isn't strict JSON: a string holds a lone surrogate.")
        if not deeper:
            return
        level = deeper
    if any(isinstance(item, dict | list) for item in level):
        raise AdapterFormatError(f"{what} is nested deeper than {max_depth}.")
