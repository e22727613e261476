"""Grammars compiled for a tokenizer: formats, bounds, and errors that never repeat the input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loraserve.demo.pack import base_dir
from loraserve.errors import (
    ConfigError,
    GrammarCrashed,
    GrammarTooComplex,
    InvalidRequest,
    PayloadTooLarge,
    UnsupportedParameter,
)
from loraserve.text.answer_format import ANY_WHITESPACE, ONE_LINE, AnswerFormat, AnswerKind, NamedSchema, grammar_of
from loraserve.text.grammar import GrammarCompiler, grammar_error
from loraserve.text.tokenizer import Tokenizer

MARK = "SECRETMARKER"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(base_dir())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(base_dir(), tokenizer.vocab_size, [tokenizer.eos_token_id])


def wanted(kind: str, value: Any, **fields: Any) -> AnswerFormat:
    return AnswerFormat(kind=AnswerKind(kind), value=value, param="field", **fields)


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether the whole text is an answer."""
    matcher = compiler.compile(grammar)
    return matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("format", "answers", "others"),
    [
        (wanted("regex", r"^\d{3}-[a-f]+$"), ["123-abc"], ["123-", "12-abc", "123-abcx"]),
        (wanted("regex", "a/b"), ["a/b"], ["a"]),
        (wanted("regex", r"5\$"), ["5$"], ["5"]),
        (
            wanted(
                "choice",
                ["yes", "no", 'a "quoted"\nüü'],
            ),
            ["yes", 'a "quoted"\nüü'],
            ["ye", "maybe"],
        ),
        (wanted("grammar", 'root ::= "a" root | "b"'), ["b", "aab"], ["a", "ba"]),
        (wanted("grammar", 'start: "a"+ "b"'), ["ab", "aaab"], ["b"]),
        (wanted("lark", 'start: %json {"type": "integer"} "!"'), ["12!"], ["x!"]),
        (wanted("json_schema", {"type": "integer"}), ["12"], ["1.5", '"a"']),
        (wanted("json_schema", True), ["12", '{"a": [1]}'], ["x"]),
        (
            wanted("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
            ['{"a":1}', '{"a": 1}', '{\n    "a": 1\n}'],
            ['{"a":"x"}', "{}", '{ \n\n\n "a":1}'],
        ),
        (
            wanted("json_schema", {"properties": {"a": {}}, "type": "object"}, whitespace=None),
            ['{"a":1}'],
            ['{"a": 1}'],
        ),
        (
            wanted(
                "structural_tag",
                {"triggers": ["<f="], "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}]},
            ),
            ["hello", "so <f=a>12</f> it is"],
            ["<f=a>x</f>", "<f=b>"],
        ),
        (
            wanted(
                "structural_tag",
                {
                    "format": {
                        "type": "triggered_tags",
                        "triggers": ["<f="],
                        "tags": [
                            {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</f>"}
                        ],
                    }
                },
            ),
            ["<f=a>[1]</f>"],
            ["<f=a>[1</f>"],
        ),
    ],
)
def test_format_accepts_only_conforming_answers(
    compiler: GrammarCompiler, tokenizer: Tokenizer, format: AnswerFormat, answers: list[str], others: list[str]
) -> None:
    grammar = grammar_of(format)
    for text in answers:
        assert accepts(compiler, tokenizer, grammar, text), text
    for text in others:
        assert not accepts(compiler, tokenizer, grammar, text), text


@pytest.mark.parametrize("format", [wanted("choice", ["<|user|>"]), wanted("json_schema", {"const": "<|user|>"})])
def test_special_token_name_in_literal_is_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer, format: AnswerFormat
) -> None:
    matcher, answer = compiler.compile(grammar_of(format)), b""
    while not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token_id = int(np.flatnonzero(bits)[-1])
        assert matcher.consume_token(token_id)
        answer += b"" if token_id == tokenizer.eos_token_id else tokenizer.token_bytes(token_id)
    assert answer.decode().strip('"') == "<|user|>"
    assert not matcher.is_error()


def test_mutually_referring_alternatives_are_followed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """As pydantic writes a union of classes with fields of that union."""
    union = {"oneOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/leaf"}]}
    node = {"properties": {"kind": {"const": "node"}, "child": union}, "required": ["kind", "child"], "type": "object"}
    leaf = {"properties": {"kind": {"const": "leaf"}}, "required": ["kind"], "type": "object"}
    grammar = grammar_of(wanted("json_schema", {**union, "$defs": {"node": node, "leaf": leaf}}))
    assert accepts(compiler, tokenizer, grammar, '{"kind":"node","child":{"kind":"node","child":{"kind":"leaf"}}}')
    assert not accepts(compiler, tokenizer, grammar, '{"kind":"node"}')


PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
}
COMPACT, PRETTY = '{"a":1,"b":[2,3]}', '{\n  "a": 1,\n  "b": [\n    2,\n    3\n  ]\n}'
LOOSE = [
    '{"a" : 1, "b": [2]}',
    '{"a":  1, "b": [2]}',
    '{"a": 1 , "b": [2]}',
    '{ "a": 1, "b": [2]}',
    '{"a": 1, "b": [2] }',
]


@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        ({}, [COMPACT, PRETTY, '{"a": 1, "b": [2, 3]}', '{"a":1,\n"b":[2,3]}'], LOOSE),
        ({"whitespace": ANY_WHITESPACE}, [COMPACT, PRETTY, *LOOSE], []),
        ({"whitespace": ONE_LINE}, [COMPACT, '{"a": 1, "b": [2, 3]}'], [PRETTY, *LOOSE, '{"a":1,\n"b":[2,3]}']),
        ({"whitespace": None}, [COMPACT], [PRETTY, *LOOSE, '{"a": 1,"b":[2]}']),
        ({"whitespace": "[ ]"}, [COMPACT, '{ "a" : 1 , "b" : [ 2 ] }'], [PRETTY, LOOSE[1]]),
    ],
    ids=["bounded", "any", "one line", "none", "own"],
)
def test_white_space_is_bounded_unless_asked_otherwise(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    fields: dict[str, Any],
    taken: list[str],
    refused: list[str],
) -> None:
    grammar = grammar_of(wanted("json_schema", PAIR, **fields))
    assert [text for text in taken if not accepts(compiler, tokenizer, grammar, text)] == []
    assert [text for text in refused if accepts(compiler, tokenizer, grammar, text)] == []


@pytest.mark.parametrize(
    ("own", "taken", "refused"),
    [
        ({"whitespace_flexible": False}, [COMPACT], [PRETTY, '{"a": 1, "b": [2]}']),
        (
            {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
            ['{"a": 1, "b": [2]}'],
            [COMPACT],
        ),
        ({"whitespace_pattern": " "}, [LOOSE[0], COMPACT], [PRETTY]),
        ({"coerce_one_of": True}, [PRETTY], [LOOSE[0]]),
    ],
)
def test_options_of_schema_choose_white_space(
    compiler: GrammarCompiler, tokenizer: Tokenizer, own: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    grammar = grammar_of(wanted("json_schema", PAIR | {"x-guidance": own}))
    assert [text for text in taken if not accepts(compiler, tokenizer, grammar, text)] == []
    assert [text for text in refused if accepts(compiler, tokenizer, grammar, text)] == []


def test_indentation_of_lines_is_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = grammar_of(wanted("json_schema", {"type": "array", "items": {"type": "integer"}}))
    assert accepts(compiler, tokenizer, grammar, "[1,\n" + " " * 24 + "2]")
    assert not accepts(compiler, tokenizer, grammar, "[1,\n" + " " * 25 + "2]")
    assert not accepts(compiler, tokenizer, grammar, "[1,\n\n2]")


@pytest.mark.parametrize("pattern", ["^score$", "^(score)$", "^(?:score|rank)$"])
def test_pattern_of_listed_names_leaves_no_dead_end(
    compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer"}, "rank": {"type": "integer"}},
        "patternProperties": {pattern: {"maximum": 9}},
        "required": ["score", "rank"],
        "additionalProperties": False,
    }
    grammar = grammar_of(wanted("json_schema", schema))
    assert accepts(compiler, tokenizer, grammar, '{"score": 9, "rank": 9}')
    assert not accepts(compiler, tokenizer, grammar, '{"score": 10, "rank": 9}')
    matcher = compiler.compile(grammar)
    matcher.consume_tokens(tokenizer.encode('{"score": 9, "rank": 9', add_special_tokens=False))
    assert matcher.validate_tokens(tokenizer.encode(",", add_special_tokens=False)) == 0


def test_numbers_of_tools_are_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schemas = (NamedSchema(name="n", value={"type": "number"}, param="tools"),)
    lark = wanted("lark", 'start: "n=" @n', schemas=schemas)
    unbounded = msgspec.structs.replace(lark, has_bounded_numbers=False)
    for format, is_bounded in ((lark, True), (unbounded, False)):
        assert accepts(compiler, tokenizer, grammar_of(format), "n=1.5")
        assert accepts(compiler, tokenizer, grammar_of(format), "n=1.0123456789") is not is_bounded


@pytest.mark.parametrize(
    ("format", "error"),
    [
        (wanted("regex", ""), InvalidRequest),
        (wanted("regex", 3), InvalidRequest),
        (wanted("regex", "x" * (1 << 19)), PayloadTooLarge),
        (wanted("choice", []), InvalidRequest),
        (wanted("choice", "yes"), InvalidRequest),
        (wanted("choice", ["a", 1]), InvalidRequest),
        (wanted("choice", ["a"] * 2000), InvalidRequest),
        (wanted("grammar", f"root = {MARK}"), InvalidRequest),
        (wanted("grammar", f"root ::= {MARK}"), InvalidRequest),
        (wanted("grammar", "root ::= " + "(" * 5000), InvalidRequest),
        (wanted("structural_tag", [MARK]), InvalidRequest),
        (wanted("structural_tag", {"triggers": ["<"], "structures": [MARK]}), InvalidRequest),
        (wanted("structural_tag", {"triggers": [MARK], "structures": [{"begin": "b", "end": "e"}]}), InvalidRequest),
        (wanted("structural_tag", {"format": {"type": MARK}}), UnsupportedParameter),
        (wanted("json_schema", {"not": {"const": MARK}}), UnsupportedParameter),
    ],
)
def test_invalid_format_is_refused_by_field(format: AnswerFormat, error: type[InvalidRequest]) -> None:
    with pytest.raises(error) as caught:
        grammar_of(format)
    assert str(caught.value.param).startswith("field")
    assert MARK not in str(caught.value)


@pytest.mark.parametrize(
    ("format", "error", "says"),
    [
        (wanted("regex", f"({MARK}"), InvalidRequest, "unclosed group"),
        (wanted("regex", f"(?={MARK})a"), InvalidRequest, "look-around"),
        (wanted("lark", f"start: {MARK.lower()}"), InvalidRequest, "line 1, column 8: a rule is missing"),
        (wanted("lark", f'start: "a" |\n b: [[{MARK}'), InvalidRequest, "line 2"),
        (wanted("lark", f"start: <|{MARK}|>"), InvalidRequest, "special token"),
        (wanted("json_schema", {"type": MARK}), InvalidRequest, "type"),
        (wanted("json_schema", {"$ref": f"#/{MARK}"}), InvalidRequest, "leads nowhere"),
        (wanted("json_schema", {"oneOf": [{"const": MARK}, {"type": "string"}]}), InvalidRequest, "anyOf"),
        (wanted("json_schema", {"type": "string", "const": 3}), InvalidRequest, "nothing satisfies"),
        (wanted("json_schema", {"enum": MARK}), InvalidRequest, "isn't what its place asks for"),
        (wanted("json_schema", {"x-guidance": {MARK: 1}}), InvalidRequest, "can't be used"),
        (wanted("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000), GrammarTooComplex, "too complex"),
    ],
)
def test_uncompilable_grammar_is_explained_without_client_text(
    compiler: GrammarCompiler, format: AnswerFormat, error: type[InvalidRequest], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        compiler.compile(grammar_of(format))
    assert type(caught.value) is error
    assert MARK.lower() not in str(caught.value).lower()


def test_unknown_llguidance_message_is_never_repeated() -> None:
    assert MARK not in str(grammar_error(f"some new message about {MARK}"))


def test_panic_caught_by_llguidance_is_reported_as_crash() -> None:
    for message in ("panic: too many of something\nat x.rs:1", "Parser Error: panic: secret"):
        error = grammar_error(message)
        assert isinstance(error, GrammarCrashed)
        assert "secret" not in str(error)
    assert not isinstance(grammar_error('1(2): Expected (at "panic: ")'), GrammarCrashed)


def allowed(compiler: GrammarCompiler, grammar: str) -> set[int]:
    matcher = compiler.compile(grammar)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize("width", [1000, 1536, 1700])
def test_logits_width_may_differ_from_tokenizer_size(tokenizer: Tokenizer, width: int) -> None:
    compiler = GrammarCompiler(base_dir(), width, [tokenizer.eos_token_id])
    found = allowed(compiler, grammar_of(wanted("regex", "[0-9]+")))
    digits = {i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).isdigit()}
    assert found == digits - tokenizer.special_token_ids
    assert compiler.load().vocab_size == max(width, tokenizer.vocab_size)


def test_every_end_of_text_token_may_end_answer(tokenizer: Tokenizer) -> None:
    ends = [tokenizer.eos_token_id, tokenizer.token_to_id("<|pad|>")]
    compiler = GrammarCompiler(base_dir(), tokenizer.vocab_size, ends)
    matcher = compiler.compile(grammar_of(wanted("regex", "a*")))
    assert {token_id for token_id in ends if matcher.deep_copy().consume_token(token_id)} == set(ends)


def test_base_without_end_of_text_token_is_refused() -> None:
    with pytest.raises(UnsupportedParameter, match="end-of-text"):
        GrammarCompiler(base_dir(), 1536, []).compile('start: "a"')


def test_unsupported_tokenizer_kind_is_refused(tmp_path: Path) -> None:
    definition = json.loads((base_dir() / "tokenizer.json").read_text())
    definition["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(UnsupportedParameter, match="tokenizer"):
        GrammarCompiler(tmp_path, 1536, [3]).compile('start: "a"')


def test_missing_llguidance_error_names_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match="pip install llguidance"):
        GrammarCompiler(base_dir(), 1536, [3]).load()


def test_a_mask_of_an_ambiguous_grammar_is_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile("start:" + 2000 * ' "a"?')
    a = tokenizer.token_to_id("a")
    for _ in range(50):
        matcher.compute_bitmask()
        if matcher.is_error() or not matcher.consume_token(a):
            break
    assert isinstance(grammar_error(matcher.get_error()), GrammarTooComplex)
