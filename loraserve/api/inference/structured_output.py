"""Read the form of a body's answers, in OpenAI's fields, vLLM's old and new, or SGLang's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request

from loraserve.api.grammar.checker import Grammar
from loraserve.api.http.disconnect import while_connected
from loraserve.api.http.json_body import parse_json
from loraserve.api.inference.schemas import InferenceBody
from loraserve.api.services import services_of
from loraserve.errors import InvalidRequest, PayloadTooLarge, UnsupportedParameter
from loraserve.limits import LIMITS
from loraserve.settings import Settings
from loraserve.text.answer_format import ANY_WHITESPACE, ONE_LINE, WHITESPACE, AnswerFormat, AnswerKind
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import TenantId

_WHITESPACE = {"bounded": WHITESPACE, "one-line": ONE_LINE, "any": ANY_WHITESPACE}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OBJECT = {"type": "object"}


async def check_grammar(request: Request, tenant: TenantId, wanted: AnswerFormat, tokenizer: Tokenizer) -> Grammar:
    """Compile the grammar of a format; stop when the client leaves.

    Raises:
        InvalidRequest: it can't be followed; `param` names the place.
        GrammarTooComplex: compiling it takes more time or memory than it may.
        ClientDisconnect: the client has left.
    """
    services = services_of(request)
    wanted = _with_settings(wanted, services.settings)
    return await while_connected(request, services.grammars.check(tenant, wanted, tokenizer.summary_text))


def _with_settings(wanted: AnswerFormat, settings: Settings) -> AnswerFormat:
    """Complete the format with what the operator chose where the request didn't."""
    if wanted.whitespace == WHITESPACE:
        wanted = msgspec.structs.replace(wanted, whitespace=_WHITESPACE[settings.json_whitespace])
    if settings.json_numbers == "any":
        wanted = msgspec.structs.replace(wanted, has_bounded_numbers=False)
    return wanted


def read_answer_format(body: InferenceBody) -> AnswerFormat | None:
    """Read what the answers have to be; None: any text.

    Raises:
        InvalidRequest: a field is wrong, or two of them set what the answers are.
        UnsupportedParameter: a kind of answer that isn't implemented.
        PayloadTooLarge: a schema, given as a text, is over `limits.max_grammar_bytes`.
    """
    found: AnswerFormat | None = None
    for read in _READERS:
        wanted = read(body)
        if wanted is None:
            continue
        if found is not None:
            raise InvalidRequest(
                f"{found.param} and {wanted.param} both say what the answer has to be.",
                param=wanted.param,
                hint="Send one of them.",
            )
        found = wanted
    return found


def _read_response_format(body: InferenceBody) -> AnswerFormat | None:
    value, param = body.response_format, "response_format"
    if not value:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} should be an object with a type.", param=param)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            # a schema next to it is Fireworks' and llama.cpp's
            schema = value.get("schema")
            if schema is None:
                return AnswerFormat(kind=AnswerKind.JSON_SCHEMA, value=_OBJECT, param=param)
            return _json(schema, f"{param}.schema")
        case "json_schema":
            return _read_json_schema(value.get("json_schema"), f"{param}.json_schema")
        case "structural_tag":
            return AnswerFormat(kind=AnswerKind.STRUCTURAL_TAG, value=value, param=param)
        case "regex" | "grammar" | "json" as kind:
            # Fireworks' and TGI's
            field = next((name for name in ("pattern", "grammar", "value") if name in value), "value")
            where = f"{param}.{field}"
            if kind == "json":
                return _json(value.get(field), where)
            return AnswerFormat(kind=AnswerKind(kind), value=value.get(field), param=where)
        case _:
            raise InvalidRequest(
                f"{param}.type should be text, json_object, json_schema, structural_tag, regex or grammar.",
                param=f"{param}.type",
            )


def _read_json_schema(value: object, param: str) -> AnswerFormat:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} should be an object with name and schema.", param=param)
    name, strict, schema = value.get("name"), value.get("strict"), value.get("schema")
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise InvalidRequest(
            f"{param}.name should be 1 to 64 letters, digits, underscores and dashes.", param=f"{param}.name"
        )
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{param}.strict should be true or false.", param=f"{param}.strict")
    if schema is None:
        raise InvalidRequest(f"{param}.schema is missing.", param=f"{param}.schema")
    wanted = _json(schema, f"{param}.schema")
    return msgspec.structs.replace(wanted, is_lenient=strict is False)


def _read_structured_outputs(body: InferenceBody) -> AnswerFormat | None:
    value, param = body.structured_outputs, "structured_outputs"
    if not value:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} should be an object.", param=param)
    given = {name: item for name, item in value.items() if item is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    unknown = [name for name in given if name not in _KINDS and name not in _OPTIONS]
    if unknown:
        raise UnsupportedParameter(
            f"{param} has a field that is not supported; it may have {', '.join(_KINDS)}.", param=param
        )
    kinds = [name for name in _KINDS if name in given]
    if len(kinds) != 1:
        raise InvalidRequest(f"{param} should have one of {', '.join(_KINDS)}; it has {len(kinds)}.", param=param)
    wanted = _KINDS[kinds[0]](given[kinds[0]], f"{param}.{kinds[0]}")
    if _flag(given, "disable_any_whitespace", param):
        wanted = msgspec.structs.replace(wanted, whitespace=None)
    if "whitespace_pattern" in given:
        wanted = msgspec.structs.replace(
            wanted, whitespace=_pattern(given["whitespace_pattern"], f"{param}.whitespace_pattern")
        )
    return msgspec.structs.replace(
        wanted,
        has_no_more_properties=_flag(given, "disable_additional_properties", param),
        has_bounded_numbers=not _flag(given, "disable_number_bounds", param),
    )


def _read_older(body: InferenceBody) -> AnswerFormat | None:
    """Read vLLM's fields of before `structured_outputs`."""
    found: AnswerFormat | None = None
    for name, kind in _GUIDED.items():
        value = getattr(body, name)
        if value is None:
            continue
        if found is not None:
            raise InvalidRequest(f"{found.param} and {name} both say what the answer has to be.", param=name)
        found = _KINDS[kind](value, name)
    if found is None or body.guided_whitespace_pattern is None:
        return found
    pattern = _pattern(body.guided_whitespace_pattern, "guided_whitespace_pattern")
    return msgspec.structs.replace(found, whitespace=pattern)


def _read_top_level(body: InferenceBody) -> AnswerFormat | None:
    found: AnswerFormat | None = None
    for name, kind in _TOP_LEVEL.items():
        value = getattr(body, name)
        # llama.cpp's clients send an empty grammar for none
        if value is None or (name == "grammar" and value == ""):
            continue
        if found is not None:
            raise InvalidRequest(f"{found.param} and {name} both say what the answer has to be.", param=name)
        found = _KINDS[kind](value, name)
    return found


def _json(value: object, param: str) -> AnswerFormat:
    """Read a schema, or one in a string."""
    if isinstance(value, str):
        data = value.encode()
        if len(data) > LIMITS.max_grammar_bytes:
            raise PayloadTooLarge(f"{param} is longer than {LIMITS.max_grammar_bytes} bytes.", param=param)
        try:
            value = parse_json(data)
        except InvalidRequest as error:
            message = error.message.replace("The body", param, 1)
            raise InvalidRequest(message, param=param) from None
    return AnswerFormat(kind=AnswerKind.JSON_SCHEMA, value=value, param=param)


def _json_object(value: object, param: str) -> AnswerFormat:
    if value is not True:
        raise InvalidRequest(f"{param} should be true or false.", param=param)
    return AnswerFormat(kind=AnswerKind.JSON_SCHEMA, value=_OBJECT, param=param)


def _structural_tag(value: object, param: str) -> AnswerFormat:
    if isinstance(value, str):
        value = _json(value, param).value
    return AnswerFormat(kind=AnswerKind.STRUCTURAL_TAG, value=value, param=param)


def _kind(kind: AnswerKind) -> Callable[[Any, str], AnswerFormat]:
    return lambda value, param: AnswerFormat(kind=kind, value=value, param=param)


def _flag(given: dict[str, Any], name: str, param: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{param}.{name} should be true or false.", param=f"{param}.{name}")
    return value


def _pattern(value: object, param: str) -> str:
    if not isinstance(value, str) or not value or len(value) > LIMITS.max_stop_bytes:
        raise InvalidRequest(f"{param} should be a regex of 1 to {LIMITS.max_stop_bytes} characters.", param=param)
    return value


_KINDS: dict[str, Callable[[Any, str], AnswerFormat]] = {
    "json": _json,
    "regex": _kind(AnswerKind.REGEX),
    "choice": _kind(AnswerKind.CHOICE),
    "grammar": _kind(AnswerKind.GRAMMAR),
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}
"""Fields of `structured_outputs`, one of which it has."""

_OPTIONS = frozenset(
    {
        *("disable_any_whitespace", "disable_additional_properties", "disable_number_bounds", "whitespace_pattern"),
        *("disable_fallback", "backend"),
    }
)
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
_TOP_LEVEL = {
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
    "structural_tag": "structural_tag",
}
"""SGLang's and llama.cpp's fields."""

_READERS = (_read_response_format, _read_structured_outputs, _read_older, _read_top_level)
