"""Each family's parser: on whole answers, on each way to cut one, and on what is no call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_answers import answer_of, decoded

from loraserve.text.tool_parsers import parser as parser_module
from loraserve.text.tool_parsers.parser import Parser
from loraserve.text.tool_parsers.table import TOOL_FORMATS

MakeParser = Callable[..., Parser]

OSLO = ["get_weather", {"city": "Oslo", "unit": "celsius"}]
NESTED = ["get_weather", {"city": 'a "b" {c} [d] \\ é 👍', "nested": {"list": [1, -2.5e3, None, {"x": [True]}]}}]
TIME: list[Any] = ["get_time", {}]

CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "hermes": [
        (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}\n</tool_call>',
            {"calls": [OSLO]},
        ),
        (
            "I'll look.\n\n<tool_call>\n"
            '{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}\n</tool_call>\n'
            '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>\n',
            {"content": "I'll look.", "calls": [OSLO, TIME]},
        ),
        (
            '<tool_call>{"arguments": {"city": "a \\"b\\" {c} [d] \\\\ \\u00e9 👍", '
            '"nested": {"list": [1, -2.5e3, null, {"x": [true]}]}}, "name": "get_weather"}</tool_call>',
            {"calls": [NESTED]},
        ),
        ('<tool_call>{"name": "get_time"}</tool_call>', {"calls": [TIME]}),
        ('<tool_call>{"name": "get_time", "arguments": null}</tool_call>', {"calls": [TIME]}),
        (
            '<tool_call>{"name": "say", "arguments": "{\\"text\\": \\"é\\"}"}</tool_call>',
            {"calls": [["say", {"text": "é"}]]},
        ),
        ('<tool_call>{"name": "get_time", "arguments": {}}}\n</tool_call>', {"calls": [TIME]}),
        ('<tool_call>{"name": "get_time", "arguments": {}}', {"calls": [TIME]}),
        ('<tool_call>{"name": "get_time", "arguments": {}}\n</tool_cal', {"calls": [TIME]}),
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', {"calls": [["unknown", {}]]}),
        (
            '<tool_call>[{"name": "get_time", "arguments": {}}, {"name": "get_time", "arguments": {}}]</tool_call>',
            {"calls": [TIME, TIME]},
        ),
        (
            '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>\nDone.',
            {"content": "\nDone.", "calls": [TIME]},
        ),
    ],
    "llama3_json": [
        ('{"name": "get_weather", "parameters": {"city": "Oslo", "unit": "celsius"}}', {"calls": [OSLO]}),
        ('\n{"type": "function", "name": "get_time", "parameters": {}}', {"calls": [TIME]}),
        ('<|python_tag|>{"name": "get_time", "parameters": {}}', {"calls": [TIME]}),
        ('<|python_tag|>{"name": "unknown", "parameters": {}}', {"calls": [["unknown", {}]]}),
        (
            '{"name": "get_time", "parameters": {}}; {"name": "get_time", "arguments": {}}\n',
            {"calls": [TIME, TIME]},
        ),
    ],
    "pythonic": [
        ("[get_weather(city=\"Oslo\", unit='celsius')]", {"calls": [OSLO]}),
        (
            "[get_weather(city='a \"b\" {c} [d] \\\\ \\u00e9 👍', nested={'list': [1, -2.5e3, None, {'x': (True,)}]}), "
            "get_time()]",
            {"calls": [NESTED, TIME]},
        ),
        ("<|python_start|>[get_time()]<|python_end|>", {"calls": [TIME]}),
        ('[say(text="""two\n"lines" """)]', {"calls": [["say", {"text": 'two\n"lines" '}]]}),
        ("[say(**{'text': 'x' 'y'})]", {"calls": [["say", {"text": "xy"}]]}),
        ("[say(text='\\ud83d\\udc4d\\x41\\n\\q')]", {"calls": [["say", {"text": "👍A\n\\q"}]]}),
    ],
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}, '
            '{"name": "get_time", "arguments": {}, "id": "123456789"}]',
            {"calls": [OSLO, TIME]},
        ),
        (
            'Well. [TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "unit": "celsius"}[TOOL_CALLS]get_time{}',
            {"content": "Well.", "calls": [OSLO, TIME]},
        ),
        ("[TOOL_CALLS]get_time[CALL_ID]abcDEF123[ARGS]{}", {"calls": [TIME]}),
    ],
    "granite": [
        (
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}]',
            {"calls": [OSLO]},
        ),
        ('<tool_call>[{"arguments": {}, "name": "get_time"}]', {"calls": [TIME]}),
        ('[{"name": "get_time", "arguments": {}}]', {"calls": [TIME]}),
        ('<tool_call>{"name": "get_time", "arguments": {}}</tool_call>', {"calls": [TIME]}),
    ],
    "phi4_mini_json": [
        (
            'functools[{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}, '
            '{"name": "get_time", "arguments": {}}]',
            {"calls": [OSLO, TIME]},
        ),
        (
            '<|tool_call|>[{"type": "function", "function": {"name": "get_time", "arguments": {}}}]<|/tool_call|>',
            {"calls": [TIME]},
        ),
    ],
    "functiongemma": [
        (
            "<start_function_call>call:get_time{days:18446744073709551617}<end_function_call>",
            {"calls": [["get_time", {"days": 18446744073709551617}]]},
        ),
        (
            "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,unit:<escape>celsius<escape>}"
            "<end_function_call><start_function_call>call:get_time{}<end_function_call>",
            {"calls": [OSLO, TIME]},
        ),
        (
            '<start_function_call>call:get_weather{city:<escape>a "b" {c} [d] \\ é 👍<escape>,'
            "nested:{list:[1,-2.5e3,null,{x:[true]}]}}<end_function_call>",
            {"calls": [NESTED]},
        ),
        (
            "<start_function_call>call:say{text:hello there}<end_function_call>",
            {"calls": [["say", {"text": "hello there"}]]},
        ),
        ('<start_function_call>call:say{"text":"a\\"b"}<end_function_call>', {"calls": [["say", {"text": 'a"b'}]]}),
    ],
    "qwen3_coder": [
        (
            "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
            "<parameter=unit>\ncelsius\n</parameter>\n</function>\n</tool_call>",
            {"content": "Sure.", "calls": [OSLO]},
        ),
        (
            "<function=get_weather><parameter=city>7</parameter><parameter=days>7</parameter>"
            '<parameter=flags>\n[true]\n</parameter><parameter=more>{"a": "<b>"}</parameter></function>',
            {"calls": [["get_weather", {"city": "7", "days": 7, "flags": [True], "more": {"a": "<b>"}}]]},
        ),
        ("<tool_call>\n<function=get_time>\n</function>\n</tool_call>", {"calls": [TIME]}),
        (
            "<function=get_time><parameter=days>18446744073709551617</parameter></function>",
            {"calls": [["get_time", {"days": 18446744073709551617}]]},
        ),
        ('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>', {"calls": [TIME]}),
    ],
}
# told in words, written alike
CALLS["generic"] = CALLS["hermes"]
CALL_CASES = [
    pytest.param(name, *case, id=f"{name}-{n}") for name, cases in CALLS.items() for n, case in enumerate(cases)
]

NOT_CALLS: dict[str, list[str]] = {
    "hermes": [
        "Hello, world.\n\n",
        "<tool_call>\nnot JSON\n</tool_call>",
        '<tool_call>{"nom": "get_time", "arguments": {}}</tool_call> ',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "say", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "say", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_w',
        "a < b, <tool> and <tool_cal",
        "<tool_call>",
        "",
    ],
    "llama3_json": [
        '{"a": 1}',
        '{"name": "Ann", "parameters": {"age": 5}}',
        '{"name": "get_time"}',
        "{not JSON}",
        'Say {"name": "get_time", "parameters": {}}',
        '<|python_tag|>brave_search.call(query="x")',
        "[1, 2]",
    ],
    "pythonic": [
        "[1] says that",
        "[unknown(a=1)]",
        "[get_time",
        "[get_time(",
        "[say(text='never closed",
        "[say('positional')]",
        "[say(text=float('inf'))]",
        "[say(text=1e999)]",
        "[say(text=" + "[" * 40 + "]" * 40 + ")]",
        "[say(text=" + "9" * 5000 + ")]",
        "get_time()",
        "[]",
    ],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] hello there", '[TOOL_CALLS] [{"name": "say"', "[TOOL_CALLS][1]", "[TOOL"],
    "granite": ["[1, 2]", "[unclear]", "<|tool_call|>no", '[{"name": "unknown", "arguments": {}}]', '{"name": "say"}'],
    "phi4_mini_json": ["functools", "functools are tools", "functools[1]", "<|tool_call|>x<|/tool_call|>"],
    "functiongemma": [
        "<start_function_call>no<end_function_call>",
        "<start_function_call>call:say{text:<escape>never closed",
        "<start_function_call>call:say{text}<end_function_call>",
        "<start_function_call>call:{}<end_function_call>",
        "<start_function_call>call:say{text:" + "[" * 40 + "}",
    ],
    "qwen3_coder": ["<tool_call>\nno\n</tool_call>", "<function=", "<function=get_time", "<function >"],
}
NOT_CALLS["generic"] = NOT_CALLS["hermes"]
TEXT_CASES = [
    pytest.param(name, text, id=f"{name}-{n}") for name, texts in NOT_CALLS.items() for n, text in enumerate(texts)
]


@pytest.mark.parametrize(("name", "text", "expected"), CALL_CASES)
def test_calls_are_found_in_a_whole_answer(
    make_parser: MakeParser, name: str, text: str, expected: dict[str, Any]
) -> None:
    assert decoded(answer_of(make_parser(name), [text])) == expected


@pytest.mark.parametrize(("name", "text"), TEXT_CASES)
def test_text_without_call_is_content_verbatim(make_parser: MakeParser, name: str, text: str) -> None:
    assert answer_of(make_parser(name), [text]) == ({"content": text} if text else {})


@pytest.mark.parametrize(
    ("name", "text"), [case.values[:2] for case in CALL_CASES] + [case.values for case in TEXT_CASES]
)
def test_answer_parses_equally_at_any_chunk_boundary(make_parser: MakeParser, name: str, text: Any) -> None:
    whole = answer_of(make_parser(name), [text])
    assert answer_of(make_parser(name), text) == whole
    for at in range(len(text)):
        assert answer_of(make_parser(name), [text[:at], text[at:]]) == whole, text[:at]


@pytest.mark.parametrize("name", sorted(set(CALLS)))
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_hostile_text_parses_without_error_in_any_pieces(
    make_parser: MakeParser, name: str, data: st.DataObject
) -> None:
    words = [word for text, _ in CALLS[name] for word in (text[:40], text[-30:], text[7:19])]
    pieces = data.draw(
        st.lists(st.one_of(st.sampled_from([*words, *NOT_CALLS[name]]), st.text(max_size=8)), max_size=6)
    )
    whole = answer_of(make_parser(name), ["".join(pieces)])
    assert answer_of(make_parser(name), pieces) == whole
    assert answer_of(make_parser(name), "".join(pieces)) == whole


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "granite", "mistral", "phi4_mini_json"])
def test_arguments_are_streamed_verbatim_as_generated(make_parser: MakeParser, name: str) -> None:
    text = CALLS[name][0][0]
    parser = make_parser(name)
    begin = text.index('{"city"')
    assert [type(delta).__name__ for delta in parser.push(text[: begin + 1])] == ["CallStart", "ArgumentsDelta"]
    (delta,) = parser.push('"ci')
    assert getattr(delta, "text", None) == '"ci'


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name": "say", "arguments": {"text": "cut o', [["say", '{"text": "cut o']]),
        ("hermes", '<tool_call>{"name": "say", "arguments": {"text": "a\\', [["say", '{"text": "a\\']]),
        (
            "hermes",
            '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>\n<tool_call>{"na',
            [["get_time", "{}"]],
        ),
        ("hermes", '<tool_call>{"name": "get_time"}</tool_call>\n<tool_ca', [["get_time", "{}"]]),
        ("mistral", "[TOOL_CALLS]get_time[ARGS]{}[TOOL_", [["get_time", "{}"]]),
        ("hermes", '<tool_call>{"name": "say", "arguments": {oops}}</tool_call>', [["say", "{oops}"]]),
        ("mistral", '[TOOL_CALLS]say[ARGS]{"text": ', [["say", '{"text": ']]),
        ("qwen3_coder", "<function=say>\n<parameter=text>\ncut o", [["say", ""]]),
        ("qwen3_coder", "<function=say>\n<parameter=a>1</parameter><parameter=text>\ncut o", [["say", '{"a": 1']]),
        ("llama3_json", '{"name": "say", "parameters": {"text": "x"}', [["say", '{"text": "x"}']]),
    ],
)
def test_truncated_or_misspelled_call_stays_a_call(
    make_parser: MakeParser, name: str, text: str, calls: list[list[str]]
) -> None:
    assert answer_of(make_parser(name), [text]) == {"calls": calls}


def test_special_token_markers_are_left_out_of_content(make_parser: MakeParser) -> None:
    hidden = ("<|tool_call|>", "<|/tool_call|>")
    for text in ("a <|tool_call|>no<|/tool_call|> b", "a <|/tool_call|><|tool_call|>no b"):
        parser = make_parser("phi4_mini_json", hidden=hidden)
        assert answer_of(parser, text)["content"].split() == ["a", "no", "b"]


def test_the_end_of_a_marker_is_never_shown(make_parser: MakeParser) -> None:
    parser = make_parser("hermes")
    shown = ""
    for char in 'Hi <b> \n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>':
        shown += "".join(getattr(delta, "text", "") for delta in parser.push(char))
        assert "<t" not in shown
    assert shown == "Hi <b>{}"


def test_a_value_may_be_long(make_parser: MakeParser) -> None:
    value = "x" * 200_000
    text = f'<tool_call>{{"name": "say", "arguments": {{"text": "{value}"}}}}</tool_call>'
    pieces = [text[at : at + 50] for at in range(0, len(text), 50)]
    assert decoded(answer_of(make_parser("hermes"), pieces)) == {"calls": [["say", {"text": value}]]}


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("hermes", '<tool_call>{"x": ['),
        ("mistral", '[TOOL_CALLS][{"x": ['),
        ("granite", '<tool_call>[{"x": "'),
        ("functiongemma", "<start_function_call>call:f{a:["),
    ],
)
def test_nested_markers_are_reread_boundedly(
    make_parser: MakeParser, monkeypatch: pytest.MonkeyPatch, name: str, start: str
) -> None:
    """Without the bound each marker would be read up to the end of the text."""
    monkeypatch.setattr(parser_module, "_MAX_REREAD", 5000)
    text = start * 500
    num_attempts = 0
    parser = make_parser(name)
    calls = parser._calls  # type: ignore[attr-defined]

    def counted(marker: str) -> Any:
        nonlocal num_attempts
        num_attempts += 1
        return calls(marker)

    parser._calls = counted  # type: ignore[attr-defined]
    answer = answer_of(parser, [text])
    assert answer == {"content": text}
    assert 0 < num_attempts < 300, "a start is shorter than 40 characters"
    assert answer_of(make_parser(name), text) == answer


def test_every_format_is_tested_here() -> None:
    assert {format_.name for format_ in TOOL_FORMATS.values()} == set(CALLS) == set(NOT_CALLS)
