"""What the process that compiles grammars answers, without the process."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loraserve.demo.pack import base_dir
from loraserve.text import grammar_worker
from loraserve.text.answer_format import AnswerFormat, AnswerKind
from loraserve.text.grammar import GrammarCompiler
from loraserve.text.grammar_worker import Checked, CheckFormat, check
from loraserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer(base_dir())
    return GrammarCompiler(base_dir(), tokenizer.vocab_size, [tokenizer.eos_token_id])


def answer(compiler: GrammarCompiler, kind: str, value: Any) -> Checked:
    return check(compiler, AnswerFormat(kind=AnswerKind(kind), value=value, param="field"))


def test_valid_grammar_is_returned_with_size(compiler: GrammarCompiler) -> None:
    checked = answer(compiler, "json_schema", {"type": "object"})
    assert checked.error_code is None
    assert '"json_schema"' in checked.grammar
    assert 0 < checked.num_bytes < grammar_worker.MAX_GRAMMAR_BYTES
    assert checked.seconds > 0


def test_grammar_using_too_much_memory_is_refused(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_worker, "MAX_GRAMMAR_BYTES", 1000)
    checked = answer(compiler, "regex", "[a-z]{3}|[0-9]{9}")
    assert (checked.error_code, checked.grammar) == ("grammar_too_complex", "")


def test_grammar_with_slow_masks_is_refused(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_worker, "MAX_MASK_S", -1.0)
    assert answer(compiler, "regex", "[a-z]+").error_code == "grammar_too_complex"


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"type": "strange"}, "field"),
        (
            {"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "("}]}}},
            "field.properties.a.anyOf.1",
        ),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"minLength": "x"}}}, "field.$defs.b"),
        ({"items": {"uniqueItems": True}}, "field.items.uniqueItems"),
    ],
)
def test_the_place_at_fault_is_named(compiler: GrammarCompiler, schema: dict[str, Any], param: str) -> None:
    checked = answer(compiler, "json_schema", schema)
    assert checked.error_code in ("invalid_value", "unsupported_parameter")
    assert checked.param == param
    assert checked.message.startswith(param)


def test_textual_grammar_fault_names_whole_field_and_position(compiler: GrammarCompiler) -> None:
    checked = answer(compiler, "lark", "start: b")
    assert (checked.param, checked.error_code) == ("field", "invalid_value")
    assert "line 1, column 8" in checked.message


@pytest.mark.parametrize(("kind", "value"), [("regex", "(a"), ("grammar", 'root ::= "a" [[:foo:]]')])
def test_converted_grammar_fault_names_no_position(compiler: GrammarCompiler, kind: str, value: str) -> None:
    checked = answer(compiler, kind, value)
    assert checked.error_code == "invalid_value"
    assert "column" not in checked.message


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ("temperature=0.5", "temperature"),
        ("lazy, temperature = 1", "temperature"),
        ("capture", "capture"),
        ('max_tokens=3, capture="x"', "capture"),
        ('stop="!", stop_capture="x"', "stop_capture"),
    ],
)
def test_an_attribute_without_effect_is_refused_by_name(compiler: GrammarCompiler, attributes: str, name: str) -> None:
    for text in (
        f"start: a\na[{attributes}]: /[a-z]*/",
        f"%import common.INT a[{attributes}]: /[a-z]*/\nstart: a temperatureq\ntemperatureq: INT",
        f'start: a\na: %lark {{\nstart: b\nb[{attributes}]: /[a-z]*/\n}} "!"',
    ):
        checked = answer(compiler, "grammar", text)
        assert (checked.error_code, checked.param) == ("unsupported_parameter", "field")
        assert f"the attribute {name} of a rule is not supported" in checked.message


def test_attribute_names_used_as_text_are_accepted(compiler: GrammarCompiler) -> None:
    text = """start: temperature capture? [stop_capture] "a[temperature=1]" /[capture=]/ // b[temperature=1]: "x"
        temperature: "temperature=0.5"
        capture: %json {"properties": {"temperature": {"const": 1}}}
        stop_capture[max_tokens=2]: /x*/"""
    assert answer(compiler, "grammar", text).error_code is None


def test_panic_on_compiling_thread_ends_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As llguidance's are."""

    def compile(*_: object) -> Checked:
        raise Panic("with a client's words")

    monkeypatch.setattr(grammar_worker, "check", compile)
    tokenizer = Tokenizer(base_dir())
    setup = grammar_worker.Setup(str(base_dir()), tokenizer.vocab_size, (tokenizer.eos_token_id,))
    process = grammar_worker._prepare(msgspec.json.encode(setup))
    with pytest.raises(Panic):
        process(msgspec.json.encode(CheckFormat(AnswerFormat(kind=AnswerKind.REGEX, value="a", param="field"))))


@pytest.mark.parametrize(
    ("rule", "text", "is_right"),
    [
        ("[max_tokens=2]: /a*/", "aaz", True),
        ("[max_tokens=2]: /a*/", "aaaz", False),
        ('[stop="b"]: /a*/', "aabz", True),
        ('[stop="b"]: /a*/', "aaz", False),
        ('[suffix="b"]: /a*/', "aabz", True),
        ("[lazy]: /[ab]*b/", "abz", True),
        ("[lazy]: /[ab]*b/", "abbz", False),
    ],
)
def test_the_other_attributes_are_followed(compiler: GrammarCompiler, rule: str, text: str, is_right: bool) -> None:
    checked = answer(compiler, "grammar", f'start: a "z"\na{rule}')
    assert checked.error_code is None
    tokenizer = Tokenizer(base_dir())
    # at once, as after a preemption, and token by token
    token_ids = [tokenizer.token_to_id(character) for character in text]
    matcher = compiler.compile(checked.grammar).deep_copy()
    taken = [matcher.consume_token(token_id) for token_id in token_ids]
    assert (all(taken) and matcher.is_accepting()) is is_right
    assert compiler.compile(checked.grammar).consume_tokens(token_ids) is is_right


@pytest.mark.parametrize(("trigger", "is_special"), [("<|assistant|>", True), ("<tool>", False)])
def test_triggers_become_special_tokens_when_available(
    compiler: GrammarCompiler, trigger: str, is_special: bool
) -> None:
    tag = {"triggers": [trigger], "structures": [{"begin": trigger, "schema": {"type": "integer"}, "end": "!"}]}
    checked = answer(compiler, "structural_tag", tag)
    assert checked.error_code is None
    # a special token stands in Lark without quotes
    assert (f'"{trigger}"' in checked.grammar.replace("\\", "")) is not is_special
