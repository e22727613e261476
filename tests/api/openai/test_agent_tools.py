"""Tools and items of coding agents in responses: free text, namespaces, and what OpenAI runs."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from hermes_model import base, model_dir, prompt_of

__all__ = ["base", "model_dir"]

pytestmark = pytest.mark.usefixtures("no_leaks")

RUN = {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object", "properties": {}}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Sub-agents.",
    "tools": [{"type": "function", "name": "close_agent", "parameters": {"type": "object", "properties": {}}}],
}
SERVER = [
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {"type": "local_shell"},
    {"type": "mcp", "server_label": "x", "server_url": "https://example.com"},
]
TOOLS = [RUN, AGENTS, PATCH, *SERVER]


async def ask(client: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    response = await client.post("/v1/responses", json={"model": "sql", "input": "hi", "store": False, **body})
    assert response.status_code == 200, response.text
    return response


def script(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_server_tools_are_left_out_and_named(client: httpx2.AsyncClient, engine: Any) -> None:
    include = ["reasoning.encrypted_content", "web_search_call.action.sources"]
    response = await ask(client, tools=TOOLS, include=include, text={"verbosity": "low"}, prompt_cache_key="k")
    ignored = set(response.headers["x-loraserve-ignored"].split(", "))
    left_out = {f"tools.{tool['type']}" for tool in SERVER}
    assert ignored == left_out | {
        "tools.format",
        "prompt_cache_key",
        "text.verbosity",
        *(f"include.{name}" for name in include),
    }
    prompt = prompt_of(engine)
    assert all(name in prompt for name in ("exec_command", "multi_agent_v1.close_agent", "apply_patch", "Begin Patch"))
    assert not any(tool["type"] in prompt for tool in SERVER)
    assert response.json()["tools"] == TOOLS


async def test_custom_tool_is_called_with_free_text(client: httpx2.AsyncClient, engine: Any) -> None:
    text = '*** Begin Patch\n+"ä"'
    engine.script = script("apply_patch", input=text)
    (call,) = (await ask(client, tools=TOOLS)).json()["output"]
    assert (call["type"], call["name"], call["input"], call["status"]) == (
        "custom_tool_call",
        "apply_patch",
        text,
        "completed",
    )
    assert call["id"].startswith("ctc_")
    events = [
        json.loads(line.removeprefix("data: "))
        for line in (await ask(client, tools=TOOLS, stream=True)).text.split("\n")
        if line.startswith("data: ")
    ]
    deltas = [one["delta"] for one in events if one["type"] == "response.custom_tool_call_input.delta"]
    (done,) = [one for one in events if one["type"] == "response.custom_tool_call_input.done"]
    assert ("".join(deltas), done["input"]) == (text, text)
    # and its result goes back
    items = [call, {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done!"}]
    engine.script = "Edited."
    await ask(client, tools=TOOLS, input=[{"role": "user", "content": "hi"}, *items])
    prompt = prompt_of(engine)
    assert json.dumps({"input": text}, ensure_ascii=False) in prompt
    assert "Done!" in prompt


async def test_custom_tool_may_be_required(client: httpx2.AsyncClient, engine: Any) -> None:
    await ask(client, tools=TOOLS, tool_choice={"type": "custom", "name": "apply_patch"})
    assert "apply_patch" in engine.seen[-1].params.grammar
    assert "exec_command" not in engine.seen[-1].params.grammar


async def test_namespaced_function_keeps_namespace(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = script("multi_agent_v1.close_agent")
    (call,) = (await ask(client, tools=TOOLS)).json()["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "multi_agent_v1", "close_agent")
    items = [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "closed"}]
    await ask(client, tools=TOOLS, input=[{"role": "user", "content": "hi"}, *items])
    assert '"name": "multi_agent_v1.close_agent"' in prompt_of(engine)


async def test_stored_custom_call_is_continued(client: httpx2.AsyncClient, engine: Any) -> None:
    engine.script = script("apply_patch", input="x")
    first = (await ask(client, tools=TOOLS, store=True)).json()
    (call,) = first["output"]
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done!"}
    engine.script = "Edited."
    await ask(client, tools=TOOLS, store=True, input=[output], previous_response_id=first["id"])
    assert "Done!" in prompt_of(engine)


async def test_server_items_are_left_out(client: httpx2.AsyncClient, engine: Any) -> None:
    items = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "compaction", "id": "c", "encrypted_content": "secret"},
        {"role": "user", "content": "go on"},
    ]
    response = await ask(client, input=items)
    assert response.headers["x-loraserve-ignored"] == "input.web_search_call, input.compaction"
    assert "go on" in prompt_of(engine)
    assert "secret" not in prompt_of(engine)


async def test_input_tokens_equal_prompt(client: httpx2.AsyncClient, engine: Any) -> None:
    body = {"model": "sql", "input": "how many?", "instructions": "count", "tools": TOOLS}
    counted = await client.post("/v1/responses/input_tokens", json=body)
    assert (counted.status_code, counted.json()["object"]) == (200, "response.input_tokens")
    await ask(client, **body)
    assert counted.json()["input_tokens"] == len(engine.seen[-1].prompt_token_ids)
    assert len(engine.seen) == 1
