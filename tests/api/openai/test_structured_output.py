"""Fields that say what an answer has to be: OpenAI's, vLLM's old and new ones, SGLang's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest
from core_clock import scheduled_s

from loraserve.api.services import Services
from loraserve.limits import Limits

MARK = "SECRETMARKER"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
MESSAGES = [{"role": "user", "content": "hi"}]


async def chat(client: httpx2.AsyncClient, **fields: Any) -> httpx2.Response:
    return await client.post("/v1/chat/completions", json={"model": "sql", "messages": MESSAGES, **fields})


async def complete(client: httpx2.AsyncClient, **fields: Any) -> httpx2.Response:
    return await client.post("/v1/completions", json={"model": "sql", "prompt": "x", **fields})


def json_schema(schema: object = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}}


def endless(first: int = 0) -> dict[str, Any]:
    """A schema with so many alternatives that comparing them takes many seconds."""
    return {"oneOf": [{"const": first + number} for number in range(8000)]}


def grammar_of(engine: Any) -> dict[str, Any]:
    """What the engine was given last."""
    params = engine.seen[-1].params
    assert params.grammar_bytes > 0
    grammar, options = json.loads(params.grammar)["grammars"]
    assert options["name"] == "options"
    return grammar


SAME_SCHEMA = {
    "response_format": json_schema(strict=True),
    "response_format, not strict": json_schema(),
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
    "structured_outputs as text": {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
    "guided_json": {"guided_json": SCHEMA},
    "guided_json as text": {"guided_json": json.dumps(SCHEMA)},
    "SGLang": {"json_schema": json.dumps(SCHEMA)},
    "TGI": {"response_format": {"type": "json", "value": SCHEMA}},
    "Fireworks": {"response_format": {"type": "json_object", "schema": SCHEMA}},
}


@pytest.mark.parametrize("fields", SAME_SCHEMA.values(), ids=SAME_SCHEMA)
@pytest.mark.parametrize("ask", [chat, complete])
async def test_schema_reaches_engine_from_each_request_form(
    client: httpx2.AsyncClient, engine: Any, fields: dict[str, Any], ask: Callable[..., Awaitable[httpx2.Response]]
) -> None:
    assert (await ask(client, **fields)).status_code == 200
    schema = grammar_of(engine)["json_schema"]
    assert schema.pop("x-guidance")["lenient"] is False
    assert schema == SCHEMA


OTHERS = {
    "json_object": ({"response_format": {"type": "json_object"}}, "json_schema"),
    "structured json_object": ({"structured_outputs": {"json_object": True}}, "json_schema"),
    "regex": ({"structured_outputs": {"regex": "[0-9]+"}}, "start: /[0-9]+/"),
    "guided_regex": ({"guided_regex": "[0-9]+"}, "start: /[0-9]+/"),
    "Fireworks' regex": ({"response_format": {"type": "regex", "pattern": "[0-9]+"}}, "start: /[0-9]+/"),
    "TGI's regex": ({"response_format": {"type": "regex", "value": "[0-9]+"}}, "start: /[0-9]+/"),
    "SGLang's regex": ({"regex": "[0-9]+"}, "start: /[0-9]+/"),
    "choice": ({"structured_outputs": {"choice": ["a", "b"]}}, 'start: "a" | "b"'),
    "guided_choice": ({"guided_choice": ["a", "b"]}, 'start: "a" | "b"'),
    "grammar": ({"structured_outputs": {"grammar": 'start: "a"'}}, 'start: "a"'),
    "guided_grammar": ({"guided_grammar": 'start: "a"'}, 'start: "a"'),
    "llama.cpp's grammar": ({"grammar": 'root ::= "a"'}, '%llguidance {}\n\nstart: "a"\n'),
    "llama.cpp's grammar of none": ({"grammar": "", "regex": "[0-9]+"}, "start: /[0-9]+/"),
    "SGLang's ebnf": ({"ebnf": 'root ::= "a"'}, '%llguidance {}\n\nstart: "a"\n'),
}


@pytest.mark.parametrize(("fields", "expected"), OTHERS.values(), ids=OTHERS)
async def test_regex_choice_and_grammar_requests_reach_engine(
    client: httpx2.AsyncClient, engine: Any, fields: dict[str, Any], expected: str
) -> None:
    assert (await chat(client, **fields)).status_code == 200
    grammar = grammar_of(engine)
    assert expected in grammar or grammar["lark_grammar"] == expected


TAG = {"triggers": ["<f="], "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}]}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", **TAG}},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        {"structural_tag": TAG},
    ],
)
async def test_structural_tags_reach_engine(client: httpx2.AsyncClient, engine: Any, fields: dict[str, Any]) -> None:
    assert (await chat(client, **fields)).status_code == 200
    assert '"</f>"' in grammar_of(engine)["lark_grammar"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": None},
        {"structured_outputs": {}},
        {"guided_json": None, "regex": None},
    ],
)
async def test_any_text_is_any_text(client: httpx2.AsyncClient, engine: Any, fields: dict[str, Any]) -> None:
    response = await chat(client, **fields)
    assert response.status_code == 200
    assert "x-loraserve-ignored" not in response.headers
    assert engine.seen[-1].params.grammar == ""


async def test_options_of_the_format_are_heeded(client: httpx2.AsyncClient, engine: Any) -> None:
    await chat(client, structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert grammar_of(engine)["json_schema"]["x-guidance"]["whitespace_flexible"] is False
    await chat(client, structured_outputs={"json": SCHEMA, "whitespace_pattern": " "})
    assert grammar_of(engine)["json_schema"]["x-guidance"]["whitespace_pattern"] == " "
    await chat(client, structured_outputs={"json": SCHEMA, "disable_additional_properties": True})
    assert grammar_of(engine)["json_schema"]["additionalProperties"] is False
    await chat(client, guided_json=SCHEMA, guided_whitespace_pattern="x?", guided_decoding_backend="xgrammar")
    assert grammar_of(engine)["json_schema"]["x-guidance"]["whitespace_pattern"] == "x?"


async def test_numbers_are_bounded_unless_asked_otherwise(
    client: httpx2.AsyncClient, engine: Any, services: Services
) -> None:
    number = {"type": "number"}
    await chat(client, **json_schema(number))
    assert grammar_of(engine)["json_schema"]["maximum"] == 9_000_000_000_000_000_000
    await chat(client, structured_outputs={"json": number, "disable_number_bounds": True})
    assert "maximum" not in grammar_of(engine)["json_schema"]
    services.settings = services.settings.model_copy(update={"json_numbers": "any"})
    await chat(client, **json_schema(number))
    assert "maximum" not in grammar_of(engine)["json_schema"]


async def test_operator_chooses_unspecified_json_whitespace(
    client: httpx2.AsyncClient, engine: Any, services: Services
) -> None:
    await chat(client, **json_schema())
    options = grammar_of(engine)["json_schema"]["x-guidance"]
    assert options["item_separator"] == ", ?"
    assert options["whitespace_flexible"] is False
    services.settings = services.settings.model_copy(update={"json_whitespace": "bounded"})
    await chat(client, **json_schema())
    options = grammar_of(engine)["json_schema"]["x-guidance"]
    assert options["whitespace_pattern"].startswith(r"\n")
    assert options["item_separator"] == ", ?"
    services.settings = services.settings.model_copy(update={"json_whitespace": "any"})
    await chat(client, **json_schema())
    options = grammar_of(engine)["json_schema"]["x-guidance"]
    assert options["whitespace_pattern"] == r"[ \t\r\n]+"
    assert "item_separator" not in options
    await chat(client, structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert grammar_of(engine)["json_schema"]["x-guidance"]["whitespace_flexible"] is False
    await chat(client, structured_outputs={"json": SCHEMA, "whitespace_pattern": " "})
    assert grammar_of(engine)["json_schema"]["x-guidance"]["whitespace_pattern"] == " "


async def test_unenforceable_schema_is_refused_unless_strict_is_false(client: httpx2.AsyncClient, engine: Any) -> None:
    schema = {"type": "array", "uniqueItems": True}
    for strict in (True, None):
        refused = await chat(client, **json_schema(schema, strict=strict))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "response_format.json_schema.schema.uniqueItems"
        assert "strict: false" in refused.json()["error"]["message"]
    assert (await chat(client, **json_schema(schema, strict=False))).status_code == 200
    assert "uniqueItems" not in grammar_of(engine)["json_schema"]


async def test_every_choice_follows_the_grammar(client: httpx2.AsyncClient, engine: Any) -> None:
    response = await complete(client, prompt=["a", "b"], n=3, **json_schema())
    assert response.status_code == 200
    assert len({request.params.grammar for request in engine.seen}) == 1
    assert len(engine.seen) == 6
    assert len({request.params.seed for request in engine.seen}) == 6


FORMAT = "response_format"
STRUCTURED = "structured_outputs"
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("a format that is a string", {FORMAT: MARK}, FORMAT, "invalid_value"),
    ("a format without a type", {FORMAT: {"a": MARK}}, f"{FORMAT}.type", "invalid_value"),
    ("a format of an unknown type", {FORMAT: {"type": MARK}}, f"{FORMAT}.type", "invalid_value"),
    ("no json_schema", {FORMAT: {"type": "json_schema"}}, f"{FORMAT}.json_schema", "invalid_value"),
    (
        "no schema",
        {FORMAT: {"type": "json_schema", "json_schema": {}}},
        f"{FORMAT}.json_schema.schema",
        "invalid_value",
    ),
    ("a schema that is a list", json_schema([MARK]), f"{FORMAT}.json_schema.schema", "invalid_value"),
    ("a name with spaces", json_schema(name=f"a {MARK}"), f"{FORMAT}.json_schema.name", "invalid_value"),
    ("strict a string", json_schema(strict=MARK), f"{FORMAT}.json_schema.strict", "invalid_value"),
    (
        "a type of no kind",
        json_schema({"properties": {"a": {"type": MARK}}}),
        f"{FORMAT}.json_schema.schema.properties.a",
        "invalid_value",
    ),
    (
        "a reference out of the document",
        json_schema({"$ref": f"http://{MARK}/"}),
        f"{FORMAT}.json_schema.schema.$ref",
        "unsupported_parameter",
    ),
    ("nothing to choose", {STRUCTURED: {"choice": []}}, f"{STRUCTURED}.choice", "invalid_value"),
    ("two kinds at once", {STRUCTURED: {"choice": [MARK], "regex": MARK}}, STRUCTURED, "invalid_value"),
    ("no kind", {STRUCTURED: {"whitespace_pattern": MARK}}, STRUCTURED, "invalid_value"),
    ("an unknown kind", {STRUCTURED: {MARK: 1}}, STRUCTURED, "unsupported_parameter"),
    ("json_object of a string", {STRUCTURED: {"json_object": MARK}}, f"{STRUCTURED}.json_object", "invalid_value"),
    ("a flag of a string", {STRUCTURED: {"regex": "a", "disable_any_whitespace": MARK}}, "", "invalid_value"),
    ("whitespace that is a number", {STRUCTURED: {"json": {}, "whitespace_pattern": 3}}, "", "invalid_value"),
    ("a regex that is a number", {"regex": 3}, "regex", "invalid_value"),
    ("a regex that can't be read", {"guided_regex": f"({MARK}"}, "guided_regex", "invalid_value"),
    ("a grammar that can't be read", {"ebnf": f"{MARK} = a"}, "ebnf", "invalid_value"),
    ("a grammar without a rule", {"guided_grammar": f"start: {MARK.lower()}"}, "guided_grammar", "invalid_value"),
    ("a schema in text that is no JSON", {"guided_json": f"{{{MARK}"}, "guided_json", "invalid_value"),
    ("a text too large", {"guided_json": '"' + "x" * (1 << 19) + '"'}, "guided_json", "payload_too_large"),
    ("an unknown guided field", {"guided_nonsense": MARK}, "guided_nonsense", "unsupported_parameter"),
    ("two of vLLM's older fields", {"guided_regex": MARK, "guided_choice": [MARK]}, "guided_choice", "invalid_value"),
    ("llama.cpp's grammar that can't be read", {"grammar": f"{MARK} = a"}, "grammar", "invalid_value"),
    ("llama.cpp's grammar of a number", {"grammar": 3}, "grammar", "invalid_value"),
    ("llama.cpp's grammar and SGLang's", {"grammar": MARK, "ebnf": MARK}, "grammar", "invalid_value"),
    ("two of SGLang's fields", {"regex": MARK, "ebnf": MARK}, "ebnf", "invalid_value"),
    (
        "OpenAI's field and vLLM's",
        {**json_schema(), STRUCTURED: {"regex": MARK}},
        f"{STRUCTURED}.regex",
        "invalid_value",
    ),
    ("an old field and a new one", {STRUCTURED: {"regex": MARK}, "guided_json": {}}, "guided_json", "invalid_value"),
    # hostile
    ("alternatives to compare", {"guided_json": endless()}, "guided_json", "grammar_too_complex"),
    ("brackets without end", {"regex": "(" * 100_000}, "regex", "invalid_value"),
    ("a chain of rules", {"ebnf": "\n".join(f"r{i} ::= r{i + 1}" for i in range(6000))}, "ebnf", "invalid_value"),
    (
        "a chain of rules in Lark",
        {"guided_grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(9000)) + '\nr9000: "a"'},
        "guided_grammar",
        "grammar_too_complex",
    ),
    (
        "alternatives of alternatives",
        json_schema({"allOf": [{"anyOf": [{"pattern": f"{a}{i}" * 200} for a in "ab"]} for i in range(16)]}),
        f"{FORMAT}.json_schema.schema",
        "grammar_too_complex",
    ),
    ("a schema of itself", json_schema({"$ref": "#"}), f"{FORMAT}.json_schema.schema", "invalid_value"),
    ("alternatives without an end", {"ebnf": "root ::= " + "(" * 5000}, "ebnf", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
async def test_bad_formats_are_refused_by_name_within_bounds(
    client: httpx2.AsyncClient, engine: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    started = time.monotonic()
    response = await chat(client, **fields)
    error = response.json()["error"]
    assert response.status_code == (413 if code == "payload_too_large" else 400), error
    assert error["code"] == code
    assert error["param"] == param or (not param and error["param"].startswith(STRUCTURED))
    assert error["type"] == "invalid_request_error"
    assert MARK.lower() not in response.text.lower()
    assert len(response.content) < 1500
    assert engine.seen == []
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("limits", [Limits(grammar_timeout_s=1.0)])
async def test_a_hostile_grammar_delays_no_other_tenants_request(
    client: httpx2.AsyncClient, url: str, make_tenant: Callable[[str], Awaitable[Any]]
) -> None:
    other = await make_tenant("globex")
    async with httpx2.AsyncClient(base_url=url, headers=other.headers, timeout=30) as globex:
        warm = await globex.post("/v1/completions", json={"model": "org/base:1", "prompt": "x", "regex": "a"})
        assert warm.status_code == 200
        hostile = [asyncio.create_task(chat(client, guided_json=endless(number))) for number in range(2)]
        await asyncio.sleep(0.2)
        started = scheduled_s()
        answer = await globex.post("/v1/completions", json={"model": "org/base:1", "prompt": "x", "regex": "b+"})
        took_s = scheduled_s() - started
        assert answer.status_code == 200
        assert not all(task.done() for task in hostile)
        assert {response.status_code for response in await asyncio.gather(*hostile)} == {400}
        assert took_s < 2


async def test_a_known_grammar_is_not_compiled_again(client: httpx2.AsyncClient, services: Services) -> None:
    for _ in range(3):
        await chat(client, **json_schema())
        await chat(client, regex="(")
    assert services.grammars.num_by_outcome == {"compiled": 1, "cached": 2, "refused": 3}
    assert services.grammars.check_s.num == 2


async def test_disconnect_ends_grammar_compilation(client: httpx2.AsyncClient, services: Services) -> None:
    await chat(client, regex="a")
    (process,) = services.grammars._processes._all
    with pytest.raises(httpx2.TimeoutException):
        await client.post(
            "/v1/completions", json={"model": "sql", "prompt": "x", "guided_json": endless()}, timeout=0.3
        )
    async with asyncio.timeout(10):
        # it was killed, and another started for the next
        while process.num_starts < 2:
            await asyncio.sleep(0.01)
    assert (await chat(client, regex="c")).status_code == 200
    assert process.num_starts == 2
