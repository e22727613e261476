"""What the scripts of all clients share: the questions, the tool, and how features are run.

    python SCRIPT.py URL KEY [--OPTION…] FEATURE…

prints one line of JSON per feature: ``{"feature", "answer"}``, or ``{"feature", "error"}`` with the
traceback. A script needs its client alone, nothing of the server.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

QUESTION = "list the tickets with age over 81"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
TEXT_MODEL, JSON_MODEL = "sql", "json"
"""Adapters: one for texts, one for calls and values."""
MAX_TOKENS = 120
FEATURES: dict[str, Callable[[], Any]] = {}
URL, KEY = sys.argv[1:3]
LIMITED_KEY = os.environ.get("LORASERVE_LIMITED_KEY", "")
"""Key of a tenant that may send one request a minute."""
SCRIPT_OPTIONS = {word.removeprefix("--") for word in sys.argv[3:] if word.startswith("--")}
_ASKED = [word for word in sys.argv[3:] if not word.startswith("--")]
BASE_URL = f"{URL}/v1"
RESULT = '{"rows": 3}'
"""What the tool returns."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "table": {"type": "string", "enum": ["tickets", "users", "orders"]},
        "field": {"type": "string", "enum": ["age", "size"]},
        "op": {"type": "string", "enum": [">", "<", "="]},
        "value": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["table", "field", "op", "value"],
    "additionalProperties": False,
}
DESCRIPTION = "Rows of a table whose number lies on one side of another."
Table = Literal["tickets", "users", "orders"]
Field = Literal["age", "size"]
Operator = Literal[">", "<", "="]


def query_type() -> Any:
    """Return the pydantic model of `SCHEMA`; not every client comes with pydantic."""
    import pydantic

    return pydantic.create_model(
        "Query",
        __doc__=DESCRIPTION,
        table=(Table, ...),
        field=(Field, ...),
        op=(Operator, ...),
        value=(int, pydantic.Field(ge=1, le=99)),
    )


def feature(function: Callable[[], Any]) -> Callable[[], Any]:
    FEATURES[function.__name__] = function
    return function


def run() -> None:
    # one loop for all: clients keep connections
    with asyncio.Runner() as runner:
        for name in _ASKED:
            try:
                answer = FEATURES[name]()
                if inspect.isawaitable(answer):
                    answer = runner.run(_await(answer))
                line = {"feature": name, "answer": answer}
            except Exception:
                line = {"feature": name, "error": traceback.format_exc()}
            print(json.dumps(line), flush=True)


async def _await(answer: Any) -> Any:
    return await answer
