"""Refusals of Ollama's routes: each is named, in Ollama's form, and reaches no engine."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any

import httpx2
import pytest
from hermes_model import base, model_dir

__all__ = ["base", "model_dir"]

pytestmark = pytest.mark.usefixtures("no_leaks")

HELLO = [{"role": "user", "content": "hello"}]
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"stream": "maybe"}, "stream"),
    ({"options": 5}, "options"),
    ({"options": {"temperature": -1}}, "options.temperature"),
    ({"options": {"temperature": "warm"}}, "options.temperature"),
    ({"options": {"top_p": 2}}, "options.top_p"),
    ({"options": {"top_k": -2}}, "options.top_k"),
    ({"options": {"min_p": 2}}, "options.min_p"),
    ({"options": {"seed": 1 << 63}}, "options.seed"),
    ({"options": {"num_predict": 0}}, "options.num_predict"),
    ({"options": {"num_predict": -3}}, "options.num_predict"),
    ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
    ({"options": {"presence_penalty": 3}}, "options.presence_penalty"),
    ({"options": {"stop": 5}}, "options.stop"),
    ({"options": {"stop": [""]}}, "options.stop.0"),
    ({"options": {"stop": ["x"] * 65}}, "options.stop"),
    ({"options": {"typical_p": 0.7}}, "options.typical_p"),
    ({"options": {"mirostat": 1}}, "options.mirostat"),
    ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
    ({"format": "xml"}, "format"),
    ({"format": 5}, "format"),
    ({"format": {"not": {}}}, "format.not"),
    ({"think": 5}, "think"),
    ({"think": ""}, "think"),
    ({"keep_alive": "soon"}, "keep_alive"),
    ({"keep_alive": True}, "keep_alive"),
    ({"keep_alive": []}, "keep_alive"),
    ({"keep_alive": "1" * 40}, "keep_alive"),
    ({"logprobs": "all"}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"template": "{{ .Prompt }}"}, "template"),
    ({"suffix": "end"}, "suffix"),
    ({"grammar": 'root ::= "a"'}, "grammar"),
    ({"temperature": 0}, "temperature"),
    ({"seed": 0}, "seed"),
    ({"num_predict": 5}, "num_predict"),
    ({"repeat_penalty": 1.1}, "repeat_penalty"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"stop": ["x"]}, "stop"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"_debug_render_only": True}, "_debug_render_only"),
    ({"priority": 5000}, "priority"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": 5}, "messages"),
    ({"messages": HELLO * 1025}, "messages"),
    ({"messages": [5]}, "messages.0"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "a wizard", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages.0.images"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "x", "thinking": 5}]}, "messages.1.thinking"),
    ({"messages": [*HELLO, {"role": "tool", "content": "x", "tool_name": 5}]}, "messages.1.tool_name"),
    ({"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages.1.tool_call_id"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": 5}]}, "messages.1.tool_calls"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [5]}]}, "messages.1.tool_calls.0"),
    ({"messages": [*HELLO, CALL]}, "messages.1.tool_calls.0.function.arguments"),
    (
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}]},
        "messages.1.tool_calls.0.function.name",
    ),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [TIME]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
    ({"tools": 5}, "tools"),
    ({"tools": [5]}, "tools.0"),
    ({"tools": [TIME, TIME]}, "tools.1.function.name"),
    ({"tool_choice": "all"}, "tool_choice"),
]
PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 5}, "prompt"),
    ({"prompt": "x" * 9000}, "prompt"),
    ({"prompt": "x" * 9000, "raw": True}, "prompt"),
    ({"prompt": "x" * 9000, "system": "be brief"}, "prompt"),
    ({"prompt": "x<|late|>", "raw": True}, "prompt.1"),
    ({"system": 5}, "system"),
    ({"system": "be brief", "raw": True}, "system"),
    ({"raw": "yes, please"}, "raw"),
    ({"context": [1, 2, 3]}, "context"),
    ({"images": ["aGk="]}, "images"),
    ({"tools": [TIME]}, "tools"),
]
EMBEDDED: list[tuple[str, dict[str, Any], str]] = [
    ("/api/embed", {"input": 5}, "input"),
    ("/api/embed", {"input": [5]}, "input"),
    ("/api/embed", {"input": [[1, 2]]}, "input"),
    ("/api/embed", {"input": ["x", ""]}, "input.1"),
    ("/api/embed", {"input": "x" * 9000, "truncate": False}, "input"),
    ("/api/embed", {"input": "x", "dimensions": -1}, "dimensions"),
    ("/api/embed", {"input": "x", "dimensions": 1 << 20}, "dimensions"),
    ("/api/embed", {"input": "x", "options": 5}, "options"),
    ("/api/embed", {"input": "x", "keep_alive": "soon"}, "keep_alive"),
    ("/api/embed", {"input": ["x"] * 3000}, "input"),
    ("/api/embeddings", {"prompt": 5}, "prompt"),
    ("/api/embeddings", {"prompt": "x" * 9000}, "prompt"),
    ("/api/show", {"model": None}, "model"),
    ("/api/show", {"model": 5}, "model"),
]
CASES = [
    *(("/api/chat", {"messages": HELLO, **fields}, param) for fields, param in [*BOTH, *CHATS]),
    *(("/api/generate", {"prompt": "hello", **fields}, param) for fields, param in [*BOTH, *PROMPTS]),
    *EMBEDDED,
]


async def test_bad_fields_are_named_in_ollama_form(
    client: httpx2.AsyncClient, subtests: pytest.Subtests, engine: Any
) -> None:
    for path, fields, param in CASES:
        with subtests.test(param, path=path, fields=str(fields)[:80]):
            answer = await client.post(path, json={"model": "sql", **fields})
            body = answer.json()
            assert (answer.status_code, body["param"]) == (400, param), answer.text
            assert set(body) == {"error", "code", "param"}
            place = re.sub(r"\.[01]$|\.tool_calls$", "", param)
            assert place in body["error"], body["error"]
    assert engine.seen == []


async def test_refusal_names_cure(client: httpx2.AsyncClient) -> None:
    async def error_of(path: str, **fields: Any) -> str:
        text: str = (await client.post(path, json={"model": "sql", "messages": HELLO, **fields})).json()["error"]
        return text

    assert "Send options.temperature." in await error_of("/api/chat", temperature=0)
    assert "Send options.num_predict." in await error_of("/api/generate", num_predict=3)
    assert "/api/chat" in await error_of("/api/generate", prompt="x", context=[1])
    assert "chat_template.jinja" in await error_of("/api/chat", template="x")
    assert "or send truncate." in await error_of("/api/embed", input="x" * 9000, truncate=False)
    assert "or send it to /api/embed." in await error_of("/api/embeddings", prompt="x" * 9000)


async def test_every_refusal_has_ollama_form(client: httpx2.AsyncClient, url: str, engine: Any) -> None:
    async def refused(send: Awaitable[httpx2.Response]) -> tuple[int, str]:
        answer = await send
        body = answer.json()
        assert set(body) == {"error", "code", "param"}
        assert isinstance(body["error"], str)
        return answer.status_code, body["code"]

    chat = {"model": "sql", "messages": HELLO}
    async with httpx2.AsyncClient(base_url=url) as stranger:
        assert (await stranger.head("/")).status_code == 200
        for method, path in (("GET", "tags"), ("GET", "ps"), ("GET", "version"), ("POST", "show"), ("POST", "chat")):
            assert await refused(stranger.request(method, f"/api/{path}")) == (401, "invalid_api_key")
    assert await refused(client.get("/api/chat")) == (405, "method_not_allowed")
    assert await refused(client.get("/api/status")) == (404, "not_found")
    assert await refused(client.post("/t/globex/api/chat", json=chat)) == (404, "tenant_not_found")
    assert await refused(client.post("/api/chat", content=b"{")) == (400, "invalid_value")
    assert await refused(client.post("/api/chat", content=b"x" * (3 << 20))) == (413, "payload_too_large")
    for path in ("chat", "generate", "embed", "embeddings", "show"):
        body = {"messages": HELLO, "prompt": "x", "input": "x", "model": "absent"}
        assert await refused(client.post(f"/api/{path}", json=body)) == (404, "model_not_found")
    assert await refused(client.post("/api/chat", json=chat | {"priority": -1})) == (403, "permission_denied")
    engine.fail_after = 0
    answer = await client.post("/api/chat", json=chat)
    assert (answer.status_code, answer.json()["code"]) == (503, "overloaded")
    assert answer.headers["retry-after"]
    # management keeps its own
    assert (await client.get("/api/v1/absent")).headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("route", "cure"),
    [
        ("POST /api/pull", "loraserve adapter push"),
        ("POST /api/push", "loraserve adapter pull"),
        ("POST /api/create", "loraserve adapter push"),
        ("POST /api/copy", "loraserve adapter alias"),
        ("DELETE /api/delete", "loraserve adapter delete"),
        ("POST /api/blobs/sha256:00", "loraserve adapter push"),
        ("POST /t/acme/api/pull", "loraserve adapter push"),
    ],
)
async def test_model_changes_are_refused_with_cure(client: httpx2.AsyncClient, route: str, cure: str) -> None:
    method, path = route.split()
    answer = await client.request(method, path, json={"model": "llama3"})
    error = answer.json()["error"]
    assert answer.status_code == 404
    assert error.startswith(f"There is no route {route}: models aren't changed by Ollama's API here.")
    assert cure in error
    assert "/api/v1/adapters" in error
