"""Forms that a request prescribes for its answer, and the grammars of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from loraserve.errors import InvalidRequest, PayloadTooLarge, UnsupportedParameter
from loraserve.limits import LIMITS
from loraserve.text.json_schema.alternatives import has_exclusive_alternatives
from loraserve.text.json_schema.escapes import allowed_escapes
from loraserve.text.json_schema.number_bounds import bound_digits
from loraserve.text.json_schema.preparation import prepare
from loraserve.types import Struct

WHITESPACE = r"\n(?: {0,24}|\t{0,8})"
"""White space between two tokens of JSON: a line break with its indentation.

JSON itself allows any number of spaces, and a weak model may make nothing else until its answer is
cut off.
"""
ANY_WHITESPACE = r"[ \t\r\n]+"
"""White space between two tokens of JSON, as JSON itself has it."""
ONE_LINE = ""
"""White space in JSON: a space behind a comma or a colon alone."""
SEPARATORS = (", ?", ": ?")
"""Regexes of what stands between two items, and between a name and its value, with `WHITESPACE` and
`ONE_LINE`.
"""

_OPTIONS: Mapping[str, str] = {"name": "options", "lark_grammar": '%llguidance {"no_forcing":true}\nstart: ""'}
"""Grammar of options, which hold for the one that comes with it.

Without `no_forcing`, text that alone is possible would be made of the tokens that the tokenizer
makes of it. A special token's name in a literal then becomes that token, which the literal doesn't
allow, and the request fails.
"""


ANSWER = "answer"
"""Name of an answer's own form, in a grammar around it."""


class AnswerKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    """Lark, or llama.cpp's GBNF."""
    LARK = "lark"
    STRUCTURAL_TAG = "structural_tag"


class NamedSchema(Struct, frozen=True):
    """A schema that a grammar refers to as ``@name``.

    Attributes:
        value: the schema, as `prepare` returns it, with llguidance's options.
        param: the field that it came in.
    """

    name: str
    value: dict[str, Any]
    param: str

    def as_json_schema(self, *, has_bounded_numbers: bool = True) -> dict[str, Any]:
        """Convert the schema to the form that llguidance takes.

        Raises:
            UnsupportedParameter: a part of it can't be enforced.
        """
        options = self.value.get("x-guidance", {})
        own = _options(self.value, self.param, is_lenient=bool(options.get("lenient")))
        schema = copy.deepcopy(self.value)
        if has_bounded_numbers:
            bound_digits(schema)
        return {**schema, "x-guidance": {**own, **options}}


class AnswerFormat(Struct, frozen=True):
    """Form that a request requires of its answer.

    Attributes:
        value: the schema, regex, list of choices, grammar or structural tag.
        param: the request's field for it.
        is_lenient: parts of a schema that can't be enforced are ignored.
        has_no_more_properties: a schema's objects have the properties that are listed, where they
            don't set it.
        whitespace: regex of what may stand between two tokens of JSON; None: nothing. With
            `WHITESPACE` and `ONE_LINE`, `SEPARATORS` are between items.
        has_bounded_numbers: numbers have few digits, where the schema doesn't set it.
        around: Lark of the whole answer, in which this format is ``@answer``; empty: it is all.
        schemas: schemas that the Lark text or `around` refers to.
    """

    kind: AnswerKind
    value: Any
    param: str
    is_lenient: bool = False
    has_no_more_properties: bool = False
    whitespace: str | None = WHITESPACE
    has_bounded_numbers: bool = True
    around: str = ""
    schemas: tuple[NamedSchema, ...] = ()


def grammar_of(wanted: AnswerFormat, is_special: Callable[[str], bool] = lambda text: False) -> str:
    """Build the grammar in llguidance's JSON form, which isn't compiled yet.

    Args:
        is_special: whether a text is one of the tokenizer's special tokens.

    Raises:
        InvalidRequest: it is nothing of its kind; `param` names the place.
        UnsupportedParameter: a part of it can't be enforced.
        PayloadTooLarge: it is over `limits.max_grammar_bytes`.
    """
    match wanted.kind:
        case AnswerKind.JSON_SCHEMA:
            own: dict[str, Any] = {"json_schema": json_schema_of(wanted)}
        case AnswerKind.REGEX:
            own = {"lark_grammar": f"start: /{_lark_regex(_text(wanted))}/"}
        case AnswerKind.CHOICE:
            own = {"lark_grammar": f"start: {' | '.join(map(_quoted, _choices(wanted)))}"}
        case AnswerKind.GRAMMAR:
            own = {"lark_grammar": _to_lark(_text(wanted), wanted.param)}
        case AnswerKind.LARK:
            own = {"lark_grammar": _text(wanted)}
        case AnswerKind.STRUCTURAL_TAG:
            own = {"lark_grammar": _structural_tag(wanted, is_special)}
    grammars = [{"lark_grammar": wanted.around}, {**own, "name": ANSWER}] if wanted.around else [own]
    grammars += [
        {"name": schema.name, "json_schema": schema.as_json_schema(has_bounded_numbers=wanted.has_bounded_numbers)}
        for schema in wanted.schemas
    ]
    grammar = json.dumps({"grammars": [*grammars, _OPTIONS]}, ensure_ascii=False, separators=(",", ":"))
    _check_bytes(grammar, wanted.param)
    return grammar


def json_schema_of(wanted: AnswerFormat) -> dict[str, Any]:
    """Convert the schema of a format of that kind to the form that llguidance takes."""
    schema = prepare(
        wanted.value,
        wanted.param,
        is_lenient=wanted.is_lenient,
        has_no_more_properties=wanted.has_no_more_properties,
    )
    options: dict[str, Any] = {
        **_options(schema, wanted.param, is_lenient=wanted.is_lenient),
        "lenient": wanted.is_lenient,
    }
    own = schema.get("x-guidance")
    if not isinstance(own, dict):
        own = {}
    if not own.keys() & _WHITESPACE_OPTIONS:
        options |= _whitespace_options(wanted.whitespace)
    if wanted.has_bounded_numbers:
        bound_digits(schema)
    return {**schema, "x-guidance": options | own}


def _whitespace_options(whitespace: str | None) -> dict[str, Any]:
    """Choose llguidance's options for the white space of `AnswerFormat`."""
    options: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    if whitespace in (WHITESPACE, ONE_LINE):
        options["item_separator"], options["key_separator"] = SEPARATORS
    return options


_WHITESPACE_OPTIONS = frozenset({"whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator"})


def _options(schema: dict[str, Any], param: str, *, is_lenient: bool) -> dict[str, Any]:
    """Choose llguidance's options for a prepared schema, which its own override."""
    return {
        "coerce_one_of": is_lenient or has_exclusive_alternatives(schema),
        "json_allowed_escapes": allowed_escapes(schema, param, is_lenient=is_lenient),
    }


def _check_bytes(text: str, param: str) -> None:
    if len(text.encode()) > LIMITS.max_grammar_bytes:
        raise PayloadTooLarge(f"{param} is longer than {LIMITS.max_grammar_bytes} bytes.", param=param)


def _text(wanted: AnswerFormat) -> str:
    value = wanted.value
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(f"{wanted.param} should be a string, not an empty one.", param=wanted.param)
    _check_bytes(value, wanted.param)
    return value


def _choices(wanted: AnswerFormat) -> Sequence[str]:
    value, param = wanted.value, wanted.param
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{param} should be a list of strings, not an empty one.", param=param)
    if len(value) > LIMITS.max_choices:
        raise InvalidRequest(f"{param} has more than {LIMITS.max_choices} choices.", param=param)
    for index, item in enumerate(value):
        if not isinstance(item, str):
            where = f"{param}.{index}"
            raise InvalidRequest(f"{where} should be a string.", param=where)
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _lark_regex(regex: str) -> str:
    """Write the regex as it stands between slashes.

    It is for the whole answer, so that anchors at its ends add nothing.
    """
    from llguidance import regex_to_lark

    regex = regex.removeprefix("^")
    before = regex.removesuffix("$")
    num_backslashes = len(before) - len(before.rstrip("\\"))
    return regex_to_lark(regex if num_backslashes % 2 else before, "d")


def _to_lark(text: str, param: str) -> str:
    """Convert llama.cpp's GBNF to Lark; Lark stays as it is.

    Raises:
        InvalidRequest: it is neither.
    """
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        return any_to_lark(text)
    except GbnfToLarkError as error:
        line = error.pos.text.count("\n", 0, error.pos.pos) + 1
        raise InvalidRequest(
            f"{param} is no grammar in Lark or GBNF: line {line} can't be read.", param=param
        ) from None
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply.", param=param) from None
    except Exception:
        # the converter's own kind of error names the rule that is missing, in the caller's words
        raise InvalidRequest(
            f"{param} is no grammar in Lark or GBNF: a rule is missing, or there twice.",
            param=param,
            hint="Lark begins with start:, GBNF with root ::=.",
        ) from None


def _structural_tag(wanted: AnswerFormat, is_special: Callable[[str], bool]) -> str:
    """Convert text with structured parts between tags, as vLLM and SGLang describe it, to Lark."""
    from llguidance import StructTag

    value, param = wanted.value, wanted.param
    if isinstance(value, dict) and isinstance(value.get("format"), dict):
        value = _triggered_tags(value["format"], f"{param}.format")
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} should be an object with structures and triggers.", param=param)
    structures = value.get("structures")
    triggers = _texts(value.get("triggers"))
    if not triggers:
        raise InvalidRequest(f"{param}.triggers should be a list of strings.", param=f"{param}.triggers")
    if not isinstance(structures, list) or not structures or len(structures) > LIMITS.max_choices:
        raise InvalidRequest(
            f"{param}.structures should be a list of 1 to {LIMITS.max_choices} objects.", param=f"{param}.structures"
        )
    tags = []
    for index, structure in enumerate(structures):
        where = f"{param}.structures.{index}"
        if not isinstance(structure, dict):
            raise InvalidRequest(f"{where} should be an object with begin, schema and end.", param=where)
        begin, end = structure.get("begin"), structure.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise InvalidRequest(f"{where}.begin and end should be strings.", param=where)
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if trigger is None:
            raise InvalidRequest(f"{where}.begin begins with none of the triggers.", param=f"{where}.begin")
        schema = AnswerFormat(
            kind=AnswerKind.JSON_SCHEMA,
            value=structure.get("schema", {"type": "object"}),
            param=f"{where}.schema",
            is_lenient=wanted.is_lenient,
            whitespace=wanted.whitespace,
            has_bounded_numbers=wanted.has_bounded_numbers,
        )
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=json_schema_of(schema), end=end))
    return StructTag.to_grammar(tags, assume_special=all(is_special(tag.trigger) for tag in tags))


def _triggered_tags(form: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Convert xgrammar's newer form of structural tags to the older one.

    Raises:
        UnsupportedParameter: it is of another kind.
    """
    tags = form.get("tags")
    if form.get("type") != "triggered_tags" or not isinstance(tags, list):
        raise UnsupportedParameter(f"{param}.type is not supported; triggered_tags is.", param=f"{param}.type")
    structures = []
    for index, tag in enumerate(tags):
        content = tag.get("content") if isinstance(tag, dict) else None
        if not isinstance(content, dict) or content.get("type") != "json_schema":
            where = f"{param}.tags.{index}.content"
            raise UnsupportedParameter(f"{where} is not supported; of type json_schema it is.", param=where)
        structures.append({"begin": tag.get("begin"), "schema": content.get("json_schema"), "end": tag.get("end")})
    return {"triggers": form.get("triggers"), "structures": structures}


def _texts(value: object) -> list[str]:
    """Check that this is a list of texts; an empty one if it isn't."""
    if isinstance(value, list) and all(isinstance(item, str) and item for item in value):
        return value
    return []
