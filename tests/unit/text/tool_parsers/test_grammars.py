"""The grammars of calls: what they allow is read as calls that fit the tools' schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tool_answers import EOS, SAY, TIME, TOOLS, WEATHER, joined

from loraserve.errors import PayloadTooLarge
from loraserve.text.answer_format import AnswerFormat, AnswerKind, grammar_of
from loraserve.text.chat_format import ChatAnswerFormat, ToolUse
from loraserve.text.reasoning import REASONING_FORMATS
from loraserve.text.tokenizer import Tokenizer
from loraserve.text.tool_parsers.format import Tool
from loraserve.text.tool_parsers.table import tool_format

MAX_TOKENS = 600
CLOSERS = ('"', "}", "]", ")", "\n</parameter>\n", "<escape>", "</tool_call>")
NAMES = (
    "functiongemma",
    "generic",
    "granite",
    "hermes",
    "llama3_json",
    "mistral",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
)


@pytest.fixture(scope="module")
def tokenizers(make_tokenizer: Callable[..., Tokenizer]) -> dict[str, tuple[Tokenizer, LLTokenizer]]:
    made = {kind: make_tokenizer(kind) for kind in ("special", "added", "text")}
    return {kind: (tokenizer, llguidance_of(tokenizer)) for kind, tokenizer in made.items()}


def llguidance_of(tokenizer: Tokenizer) -> LLTokenizer:
    text = (tokenizer.model_dir / "tokenizer.json").read_text()
    return LLTokenizer(text, n_vocab=tokenizer.vocab_size, eos_token=tokenizer.token_to_id(EOS))


def answer_format(
    tokenizer: Tokenizer,
    name: str,
    tools: tuple[Tool, ...] = TOOLS,
    *,
    is_forced: bool = True,
    is_parallel: bool = True,
    reasoning: str | None = None,
    is_open: bool | None = None,
) -> ChatAnswerFormat:
    return ChatAnswerFormat(
        tokenizer,
        tool_format(name, tokenizer, ""),
        ToolUse(tools, (), is_forced=is_forced, is_parallel=is_parallel),
        None if reasoning is None else REASONING_FORMATS[reasoning],
        is_open,
    )


def grammar_text(wanted: ChatAnswerFormat) -> str:
    """Return the grammar of whole answers as the engine gets it."""
    whole = wanted.whole(None)
    assert whole is not None
    return grammar_of(whole)


def written(tokenizer: Tokenizer, llguidance: LLTokenizer, grammar: str, seed: int) -> tuple[str, bool]:
    """Return what a random model writes under a grammar, and whether it came to the end.

    It likes to close what is open, and knows no reason to write a long string.
    """
    draw, eos = random.Random(seed), tokenizer.token_to_id(EOS)
    matcher = LLMatcher(llguidance, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids: list[int] = []
    chars = [chr(tokenizer.token_bytes(token)[0]) for token in range(min(256, tokenizer.vocab_size))]
    while len(token_ids) < MAX_TOKENS:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: tokenizer.vocab_size]).tolist()
        assert allowed, matcher.get_error()
        closing = closers_of(tokenizer.decode(token_ids[-16:], skip_special_tokens=False))
        scores = {token: 1 if token > 255 else closing.get(chars[token], 0) for token in allowed}
        best = max(scores.values())
        liked = [token for token in allowed if scores[token] == best]
        token = draw.choice(liked if best and draw.random() < 0.9 else allowed)
        if token == eos:
            return tokenizer.decode(token_ids, skip_special_tokens=False), True
        assert matcher.consume_token(token), matcher.get_error()
        token_ids.append(token)
    return tokenizer.decode(token_ids, skip_special_tokens=False), False


def closers_of(text: str) -> dict[str, int]:
    """Return the characters that go on with something that closes, and how much of it is there
    with each.
    """
    found: dict[str, int] = {}
    for closer in CLOSERS:
        for at, char in enumerate(closer):
            if text.endswith(closer[:at]):
                found[char] = max(found.get(char, 0), at + 1)
    return found


def check_calls(calls: list[list[str]], tools: tuple[Tool, ...] = TOOLS) -> None:
    by_name = {tool.name: tool for tool in tools}
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), dict(by_name[name].parameters or {"additionalProperties": False}))


@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("name", NAMES)
def test_forced_calls_are_parsed_and_fit_schemas(
    tokenizers: dict[str, tuple[Tokenizer, LLTokenizer]], name: str, kind: str
) -> None:
    tokenizer, llguidance = tokenizers[kind]
    num_whole = 0
    for is_parallel in (False, True):
        wanted = answer_format(tokenizer, name, is_parallel=is_parallel)
        grammar = grammar_text(wanted)
        for seed in range(10):
            text, is_whole = written(tokenizer, llguidance, grammar, seed)
            parser = wanted.parser()
            answer = joined([*parser.push(text), *parser.finish()])
            if is_whole:
                assert "content" not in answer, text
                num_whole += 1
                check_calls(answer["calls"])
                assert is_parallel or len(answer["calls"]) == 1
    assert num_whole >= 10, text


COMBINED = Tool(
    "find",
    {
        "type": "object",
        "properties": {"id": {"type": "integer"}, "name": {"type": "string", "pattern": "^[a-z]{1,4}$"}},
        "anyOf": [{"required": ["id"]}, {"required": ["name"]}],
    },
)
PATTERNS = Tool(
    "match",
    {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[A-C]{2}$"},
            "more": {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
            "last-one": {"type": "boolean"},
        },
        "required": ["code", "more"],
    },
)
OPTIONAL = Tool(
    "maybe",
    {"type": "object", "properties": {key: {"type": "boolean"} for key in "abcd"}, "required": ["b"]},
)


@pytest.mark.parametrize("tool", [COMBINED, PATTERNS, OPTIONAL], ids=lambda tool: tool.name)
@pytest.mark.parametrize("name", NAMES)
def test_complex_tool_schemas_are_also_followed(
    tokenizers: dict[str, tuple[Tokenizer, LLTokenizer]], name: str, tool: Tool
) -> None:
    tokenizer, llguidance = tokenizers["special"]
    wanted = answer_format(tokenizer, name, (tool,), is_parallel=False)
    grammar, found = grammar_text(wanted), []
    for seed in range(12):
        text, is_whole = written(tokenizer, llguidance, grammar, seed)
        parser = wanted.parser()
        answer = joined([*parser.push(text), *parser.finish()])
        if is_whole:
            check_calls(answer["calls"], (tool,))
            found.append(answer["calls"][0][1])
    assert len(set(found)) > 1


@pytest.mark.parametrize("name", ["functiongemma", "pythonic", "qwen3_coder"])
def test_repeated_definitions_per_property_are_bounded_in_total(
    tokenizers: dict[str, tuple[Tokenizer, LLTokenizer]], name: str
) -> None:
    # 200 KB of tools were a format of 287 MB, which the server encodes and hashes
    definitions = {f"d{i}": {"description": "x" * 900} for i in range(130)}
    properties = {f"p{i}": {"$ref": "#/$defs/d0"} for i in range(2500)}
    tool = Tool("f", {"type": "object", "$defs": definitions, "properties": properties})
    with pytest.raises(PayloadTooLarge, match="schemas of tools") as refusal:
        answer_format(tokenizers["special"][0], name, (tool,)).whole(None)
    assert refusal.value.param == "tools"


@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"llama3_json", "pythonic"}))
def test_strict_tools_hold_behind_free_text(
    tokenizers: dict[str, tuple[Tokenizer, LLTokenizer]], name: str, kind: str
) -> None:
    tokenizer, llguidance = tokenizers[kind]
    wanted = answer_format(tokenizer, name, (WEATHER, TIME), is_forced=False)
    is_text = kind == "text"
    start = {
        "functiongemma": "<start_function_call>call:get_",
        "granite": "<tool_call>[" if is_text else "<|tool_call|>[",
        "generic": "<tool_call>\n{",
        "hermes": "<tool_call>\n{",
        "mistral": "[TOOL_CALLS] [{" if is_text else "[TOOL_CALLS]get_",
        "phi4_mini_json": "functools[{" if is_text else "<|tool_call|>[",
        "qwen3_coder": "<tool_call>\n<fun",
    }[name]
    matcher = LLMatcher(llguidance, grammar_text(wanted), log_level=0)
    assert matcher.consume_tokens(tokenizer.encode("Let me see: 1 < 2.\n", add_special_tokens=False))
    assert matcher.is_accepting()
    assert matcher.consume_tokens(tokenizer.encode(start, add_special_tokens=False))
    assert not matcher.is_accepting()
    assert not matcher.consume_tokens(tokenizer.encode("unknown", add_special_tokens=False))


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_unmarked_calls_are_not_enforced_in_free_text(
    tokenizers: dict[str, tuple[Tokenizer, LLTokenizer]], name: str
) -> None:
    tokenizer, _ = tokenizers["special"]
    assert answer_format(tokenizer, name, is_forced=False).whole(None) is None


def test_non_strict_tools_leave_text_unconstrained(
    tokenizers: dict[str, tuple[Tokenizer, LLTokenizer]],
) -> None:
    tokenizer, _ = tokenizers["special"]
    assert answer_format(tokenizer, "hermes", (TIME, SAY), is_forced=False).whole(None) is None


@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("is_open", [True, None, False])
def test_reasoning_is_allowed_before_forced_call(
    tokenizers: dict[str, tuple[Tokenizer, LLTokenizer]], kind: str, is_open: bool | None
) -> None:
    tokenizer, llguidance = tokenizers[kind]
    wanted = answer_format(tokenizer, "hermes", (TIME,), reasoning="qwen3", is_open=is_open, is_parallel=False)
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    thought = {True: "Hm < 1.</think>\n\n", None: "<think>\nHm.</think>", False: ""}[is_open]
    text = thought + call
    matcher = LLMatcher(llguidance, grammar_text(wanted), log_level=0)
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert not matcher.is_accepting()
        assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()
    parser = wanted.parser()
    answer = joined([*parser.push(text), *parser.finish()])
    assert answer["calls"] == [["get_time", "{}"]]
    assert "content" not in answer
    assert answer.get("reasoning", "") in ("Hm < 1.", "Hm.", "")


@pytest.mark.parametrize("name", NAMES)
def test_a_formatted_answer_and_calls_exclude_each_other(
    tokenizers: dict[str, tuple[Tokenizer, LLTokenizer]], name: str
) -> None:
    tokenizer, llguidance = tokenizers["special"]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = AnswerFormat(kind=AnswerKind.JSON_SCHEMA, value=schema, param="response_format")
    whole = answer_format(tokenizer, name, (TIME,), is_forced=False).whole(wanted)
    assert whole is not None
    grammar = grammar_of(whole)
    calls = grammar_text(answer_format(tokenizer, name, (TIME,), is_parallel=False))
    call, _ = written(tokenizer, llguidance, calls, 0)
    # what isn't marked could be the beginning of a formatted answer
    call = "<|python_tag|>" * (name in ("llama3_json", "pythonic")) + call
    for text in ('{"n": 5}', call):
        matcher = LLMatcher(llguidance, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        assert matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False)), (text, matcher.get_error())
        assert matcher.is_accepting(), text
    matcher = LLMatcher(llguidance, grammar, log_level=0)
    assert not matcher.consume_tokens(tokenizer.encode("Hello", add_special_tokens=False))


def test_exclusive_alternatives_are_enforced_in_strict_tools(
    tokenizers: dict[str, tuple[Tokenizer, LLTokenizer]],
) -> None:
    """Pydantic writes a union with a discriminator so."""
    options = [
        {"type": "object", "properties": {"kind": {"const": kind}, "n": {"type": "integer"}}, "required": ["kind"]}
        for kind in ("cat", "dog")
    ]
    parameters = {"type": "object", "properties": {"pet": {"oneOf": options}}, "required": ["pet"]}
    tokenizer, llguidance = tokenizers["special"]
    wanted = answer_format(tokenizer, "hermes", (Tool("adopt", parameters, is_strict=True),), is_parallel=False)
    matcher = LLMatcher(llguidance, grammar_text(wanted), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    call = '<tool_call>\n{"name": "adopt", "arguments": {"pet": {"kind": "dog"}}}\n</tool_call>'
    assert matcher.consume_tokens(tokenizer.encode(call, add_special_tokens=False)), matcher.get_error()
    assert matcher.is_accepting()
