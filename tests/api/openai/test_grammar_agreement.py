"""An answer's form holds however it is computed: for each grammar, schema and set of tools, the
same tokens or the same error with proposed tokens and without, as a stream and in one piece.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from campaigns import default_and_campaign
from fastapi import FastAPI
from marked_model import EngineHere, make_engines, write_marked
from tool_answers import MARKERS

from loraserve.api.services import Services
from loraserve.engine.engine import Engine
from loraserve.text.chat_format import ChatFormat
from loraserve.text.chat_template import ChatTemplate
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import BaseSpec

ALL_MARKERS = (*MARKERS, "<|im_start|>", "<|im_end|>")
FAMILIES = ("functiongemma", "granite", "hermes", "llama3_json", "mistral", "phi4_mini_json", "pythonic", "qwen3_coder")
CASES_PER_SEED = 10
PROMPTS = ("list the tickets", "say it", "call the tool", "which zone?")

Fields = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A request's fields, and the family of the model's tool calls."""

    fields: Fields
    family: str = "none"


# drawing


def draw_case(seed: int) -> Case:
    draw = random.Random(seed)
    sampling: Fields = {
        "max_tokens": draw.randint(8, 80),
        "temperature": draw.choice((0.0, 0.0, 1.0)),
        "seed": seed,
        "messages": [{"role": "user", "content": draw.choice(PROMPTS)}],
    }
    made = (draw_tools, draw_tools, draw_form, draw_lark, draw_lark)[seed % 5](draw)
    return Case(sampling | made.fields, made.family)


def draw_tools(draw: random.Random) -> Case:
    names = draw.sample(("get_time", "get_weather", "say", "f"), draw.randint(1, 3))
    tools = [
        {
            "type": "function",
            "function": {"name": name, "parameters": draw_parameters(draw), "strict": draw.random() < 0.3},
        }
        for name in names
    ]
    named = {"type": "function", "function": {"name": names[0]}}
    fields: Fields = {
        "tools": tools,
        "tool_choice": draw.choice(("required", "required", named)),
        "parallel_tool_calls": draw.random() < 0.7,
    }
    return Case(fields, draw.choice(FAMILIES))


def draw_parameters(draw: random.Random) -> Fields:
    values: tuple[Fields, ...] = (
        {"type": "string"},
        {"type": "string", "maxLength": 4},
        {"enum": ["celsius", "<tool_call>", "fahrenheit"]},
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"type": "boolean"},
        {"$ref": "#/$defs/flag"},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    )
    names = draw.sample(("zone", "city", "days", "unit", "qxzjkv"), draw.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: draw.choice(values) for name in names},
        "required": [name for name in names if draw.random() < 0.8],
        "additionalProperties": False,
        "$defs": {"flag": {"type": "boolean"}},
    }


def draw_form(draw: random.Random) -> Case:
    kind = draw.randrange(6)
    if kind == 0:
        return Case({"structured_outputs": {"regex": draw.choice(("(ab|ba){2,9}", "[a-c]{3}<\\|x\\|>", "a+b|c{2}"))}})
    if kind == 1:
        return Case({"structured_outputs": {"choice": ["the one answer", "the other", "<|im_start|>user"]}})
    if kind == 2:
        # properties beside patterns of properties, in closed and in open objects
        pattern = draw.choice(("^x_[a-z]{1,3}$", "^s", "[0-9]$", "^(score|rank)$", "^score$"))
        schema: Fields = {
            "type": "object",
            "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 99}, "qxzjkv": {"type": "boolean"}},
            "patternProperties": {pattern: {"type": "integer"}},
            "required": draw.choice((["score"], ["score", "qxzjkv"])),
        }
        if draw.random() < 0.6:
            schema["additionalProperties"] = False
    elif kind == 3:
        # a name in the schema that is a special token's, and one that is spelled letter by letter
        schema = {
            "type": "object",
            "properties": {"<|im_start|>": {"const": "<escape>"}, "zzqxjw": {"enum": ["<|im_end|>", "zzqxjw"]}},
            "required": ["<|im_start|>", "zzqxjw"],
            "additionalProperties": False,
        }
    else:
        schema = draw_tree(draw)
    named = {"name": "drawn", "schema": schema, "strict": True}
    return Case({"response_format": {"type": "json_schema", "json_schema": named}})


def draw_tree(draw: random.Random) -> Fields:
    """Draw a schema that refers to itself, with patterns, formats, alternatives and bounds."""
    leaves: tuple[Fields, ...] = (
        {"type": "string", "pattern": draw.choice(("^[0-9]{5}$", "[ab]c?d", "^.{2,6}$", "^<\\|x")), "maxLength": 12},
        {"type": "string", "format": draw.choice(("date", "time", "uuid", "ipv4"))},
        {"type": "integer", "minimum": -5, "maximum": 500, "multipleOf": draw.choice((1, 5))},
        {"type": "number", "minimum": 0, "exclusiveMaximum": 9.5},
        {"enum": ["red", 'quo"ted', 1, None, True, [1, "x"]]},
        {"anyOf": [{"type": "null"}, {"const": "<tool_call>"}, {"type": "boolean"}]},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    )
    names = draw.sample(("name", "qxzjkv", "a b", "é", "kind"), draw.randint(1, 4))
    node = {
        "type": "object",
        "properties": {
            **{name: draw.choice(leaves) for name in names},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["next", *(name for name in names if draw.random() < 0.7)],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def draw_lark(draw: random.Random) -> Case:
    """Draw pieces of text, special tokens among them; one in four has an end that is dead."""
    symbols = [draw.choice(_PIECES) for _ in range(draw.randint(2, 6))]
    body = " ".join(f"({symbol}){draw.choice(('', '', '', '?', '{1,2}'))}" for symbol in symbols)
    rules = [
        "WORD: /[a-z]{1,6}/",
        "number[max_tokens=3]: /[0-9]+/",
        "text[lazy]: /[a-z ]{1,12}\\./",
        'pair: "<" WORD ">" | <|im_start|> WORD <|im_end|>',
    ]
    if draw.random() < 0.25:
        body = f'{body} ("ab" dead | "cd")'
        rules += ['dead: "x" never', "never: NEVER", "NEVER: /x+/ & /y+/"]
    return Case({"structured_outputs": {"grammar": "\n".join([f"start: {body}", *rules])}})


_PIECES = (
    '"hello"',
    '"qxzjkvwq"',
    "<|im_start|>",
    "<|im_end|>",
    '<|im_start|> "user"',
    '"a" | <escape>',
    "WORD",
    "number",
    "text",
    "pair",
    '"<|im_start|>"',
    "<think> | </think>",
)

# answering


@pytest.fixture(autouse=True)
def no_mask_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Propose whatever the processor does beside: grammars that once took long get no proposals."""
    monkeypatch.setattr("loraserve.engine.grammar.constraint.SLOW_MASK_S", math.inf)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("marked")
    write_marked(path, ALL_MARKERS)
    return path


@pytest.fixture(scope="module")
def engines(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    made = make_engines(model_dir, tmp_path_factory.mktemp("store"))
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def base(engines: tuple[Engine, Engine]) -> BaseSpec:
    return engines[0].base


@pytest.fixture
def engine(engines: tuple[Engine, Engine], base: BaseSpec, model_dir: Path) -> EngineHere:
    return EngineHere(engines[0], base, Tokenizer(model_dir))


@pytest.fixture
async def client(app: FastAPI, acme: Any) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://loraserve", headers=acme.headers) as client:
        yield client


async def answer(client: httpx2.AsyncClient, engine: EngineHere, fields: Fields, *, is_streamed: bool) -> Fields:
    """Return the answer's tokens with what the client reads of it, or the error."""
    engine.said.clear()
    body = {"model": engine.base.id, **fields, "stream": is_streamed}
    response = await client.post("/v1/chat/completions", json=body, timeout=60)
    error: Fields | None = None
    choices: list[Fields] = []
    if is_streamed and response.status_code == 200:
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        for event in map(json.loads, events):
            error = event.get("error", error)
            choices += event.get("choices", ())
        messages = [choice["delta"] for choice in choices]
    else:
        error = response.json().get("error")
        choices = response.json().get("choices", [])
        messages = [choice["message"] for choice in choices]
    if error is not None:
        assert response.status_code in (200, 400), response.text
        return {"code": error["code"], "message": error["message"]}
    functions = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    return {
        "token_ids": list(engine.said),
        "content": "".join(message.get("content") or "" for message in messages),
        "calls": "".join(f"{one.get('name') or ''}{one.get('arguments') or ''}" for one in functions),
        "end": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
    }


async def every_answer(
    client: httpx2.AsyncClient, services: Services, engine: EngineHere, engines: tuple[Engine, Engine], case: Case
) -> list[Fields]:
    """Return the answers with proposed tokens and without, each as a stream and in one piece."""
    tokenizer = services.tokenizer
    template = ChatTemplate(tokenizer.model_dir, tokenizer)
    services.chat_format = ChatFormat(template, tokenizer, tool_call_parser=case.family)
    answers = []
    for engine.engine in engines:
        answers += [await answer(client, engine, case.fields, is_streamed=flag) for flag in (False, True)]
    return answers


@pytest.mark.parametrize("first", default_and_campaign(range(0, 300, CASES_PER_SEED), default=range(0, 20, 10)))
async def test_answers_agree_whether_tokens_are_proposed(
    client: httpx2.AsyncClient,
    services: Services,
    engine: EngineHere,
    engines: tuple[Engine, Engine],
    first: int,
) -> None:
    ends: Counter[str] = Counter()
    before = engines[0].stats().accepted_grammar_tokens
    for seed in range(first, first + CASES_PER_SEED):
        case = draw_case(seed)
        answers = await every_answer(client, services, engine, engines, case)
        assert all(answer == answers[0] for answer in answers), (seed, case, answers)
        ends[answers[0].get("code") or answers[0]["end"][0]] += 1
    assert ends.total() == CASES_PER_SEED
    assert ends.total() > ends["invalid_value"] + ends["unsupported_parameter"]
    # a grammar's own tokens are proposed in each ten
    assert engines[0].stats().accepted_grammar_tokens > before


def call_case(family: str, parameters: Fields, **fields: Any) -> Case:
    tool = {"type": "function", "function": {"name": "get_time", "parameters": parameters}}
    messages = [{"role": "user", "content": "which zone?"}]
    return Case({"messages": messages, "tools": [tool], "tool_choice": "required", **fields}, family)


ZONE: Fields = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
PLACE: Fields = {"type": "object", "properties": {"zone": {"enum": ["a", "b"]}}, "required": ["zone"]}
MARKED_CASES = {
    "Mistral": (call_case("mistral", PLACE, max_tokens=40), ["[TOOL_CALLS]", "[ARGS]"]),
    "FunctionGemma": (call_case("functiongemma", ZONE, max_tokens=24), ["<start_function_call>", "<escape>"]),
    "Hermes": (call_case("hermes", PLACE, max_tokens=60), ["<tool_call>", "</tool_call>", "<tool_call>"]),
    "Lark": (
        Case(
            {
                "messages": [{"role": "user", "content": "say hello"}],
                "structured_outputs": {"grammar": 'start: "hello" <|im_start|> "user"'},
                "max_tokens": 20,
            }
        ),
        ["<|im_start|>"],
    ),
}


@pytest.mark.parametrize(("case", "markers"), MARKED_CASES.values(), ids=MARKED_CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_special_tokens_follow_forced_text(
    client: httpx2.AsyncClient,
    services: Services,
    engine: EngineHere,
    engines: tuple[Engine, Engine],
    case: Case,
    markers: list[str],
    temperature: float,
) -> None:
    case = Case({**case.fields, "temperature": temperature, "seed": 3}, case.family)
    before = engines[0].stats().accepted_grammar_tokens
    answers = await every_answer(client, services, engine, engines, case)
    assert all(answer == answers[0] for answer in answers), answers
    (token_ids,) = answers[0]["token_ids"]
    said = [text for token_id in token_ids for text in markers[:2] if token_id == engine.tokenizer.token_to_id(text)]
    assert said[: len(markers)] == markers
    assert engines[0].stats().accepted_grammar_tokens > before
