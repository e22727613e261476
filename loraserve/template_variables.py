"""Variables of chat templates (``chat_template_kwargs``) that a version or the operator sets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

from loraserve.limits import LIMITS

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that a request's own fields set."""
MAX_VARIABLES = 32
_MAX_DEPTH = 16


def reserved_problem(names: Iterable[str]) -> str | None:
    """Return what is wrong with these names of variables; None: nothing is."""
    if reserved := sorted(RESERVED.intersection(names)):
        return f"can't set {', '.join(reserved)}: the request has its own field for that"
    return None


def parse_variables(text: str) -> dict[str, Any]:
    """Return the variables in a JSON object.

    Raises:
        ValueError: it isn't one, sets a reserved name, or is over a bound; the message says which,
            to stand behind the text's name.
    """
    most = LIMITS.max_chat_template_kwargs_bytes
    try:
        if len(text.encode()) > most:
            raise ValueError(f"exceeds the limit of {most} bytes")
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"isn't JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError(f"is nested deeper than {_MAX_DEPTH}") from None
    return check_variables(value)


def check_variables(value: object) -> dict[str, Any]:
    """Return the value if it is an object of variables.

    Raises:
        ValueError: as `parse_variables`.
    """
    if not isinstance(value, dict):
        raise ValueError('should be a JSON object such as {"enable_thinking": false}')
    if len(value) > MAX_VARIABLES:
        raise ValueError(f"has {len(value)} variables; at most {MAX_VARIABLES} are allowed")
    if problem := reserved_problem(value):
        raise ValueError(problem)
    if _depth(value) > _MAX_DEPTH:
        raise ValueError(f"is nested deeper than {_MAX_DEPTH}")
    canonical_text(value)
    return value


def canonical_text(variables: dict[str, Any]) -> str:
    """Return the variables as JSON that equal ones share.

    Raises:
        ValueError: a value isn't JSON's, or a text isn't Unicode.
    """
    try:
        text = json.dumps(variables, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"has a value that JSON can't hold ({type(error).__name__})") from None
    return text


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"has {name}, which isn't a JSON number")
