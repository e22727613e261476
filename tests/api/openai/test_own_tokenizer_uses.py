"""A version's own tokenizer with what reads its tokens: kept answers, bounds on reasoning, and
calls of tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer as HFTokenizer

from loraserve.tenancy.identity.tenants import TenantChange

from .test_own_tokenizer import base, summary_of
from .test_version_chat import HERMES

__all__ = ["base"]

pytestmark = pytest.mark.usefixtures("no_leaks")

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


def tokenizer_with(model_dir: Path, *tokens: str, is_special: bool = False) -> bytes:
    """Return the summary of the base's tokenizer with more tokens."""
    tokenizer = HFTokenizer.from_file(str(model_dir / "tokenizer.json"))
    (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(list(tokens))
    return summary_of({"tokenizer.json": tokenizer.to_str().encode()})


async def test_version_keeps_answers_per_tokenizer(
    client: httpx2.AsyncClient, publish: Callable[..., Any], services: Any, engine: Any, model_dir: Path
) -> None:
    await services.authenticator.tenants.update("acme", TenantChange({"max_cached_bytes": 1 << 20}), actor="test")
    # the same weights as those of version 1, and the same ids with other texts
    versions = [1]
    for tokens in (("<a>", "<b>"), ("<c>", "<d>")):
        versions.append(await publish("sql", tokenizer=tokenizer_with(model_dir, *tokens)))
    assert len(set(versions)) == 3
    models = [f"sql@{version}" for version in versions]
    prompt = [5, 6, engine.tokenizer.vocab_size]

    async def ask(model: str) -> tuple[str, str]:
        engine.script = f"{model} <a><c>"
        body = {"model": model, "prompt": prompt, "max_tokens": 64, "temperature": 0, "cache": {"ttl": 60}}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-loraserve-cache"], answer.json()["choices"][0]["text"]

    first, again = [await ask(model) for model in models], [await ask(model) for model in models]
    assert [outcome for outcome, _ in first + again] == ["miss"] * 3 + ["hit"] * 3
    assert [text for _, text in first] == [text for _, text in again] == [f"{model} <a><c>" for model in models]
    # of one digest the engine keeps the KV of a prefix, too
    assert len({asked.adapter.digest for asked in engine.seen}) == len(engine.seen) == 3
    assert len({asked.adapter.weights_blob for asked in engine.seen}) == 1


async def test_reasoning_is_bounded_by_own_markers(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any, model_dir: Path
) -> None:
    own = await publish(
        "sql", reasoning_parser=b"qwen3", tokenizer=tokenizer_with(model_dir, "<x>", "<think>", "</think>")
    )
    without = await publish("sql", seed=1, reasoning_parser=b"qwen3", tokenizer=tokenizer_with(model_dir, "<x>"))
    engine.script = "<think>a b c</think>yes"
    for path, prompt in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "x"})):
        body = {**prompt, "thinking_token_budget": 4, "max_tokens": 60}
        answer = await client.post(f"/v1/{path}", json={"model": f"sql@{own}", **body})
        assert answer.status_code == 200, answer.text
        asked = engine.seen[-1]
        assert asked.params.thinking.closers == (asked.tokenizer.token_to_id("</think>"),)
        assert asked.params.thinking.openers == (asked.tokenizer.token_to_id("<think>"),)
        refused = await client.post(f"/v1/{path}", json={"model": f"sql@{without}", **body})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
    chat = await client.post("/v1/chat/completions", json={"model": f"sql@{own}", "messages": HELLO, "max_tokens": 60})
    message = chat.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a b c", "yes")


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_tool_call_is_read_from_own_markers(
    client: httpx2.AsyncClient,
    publish: Callable[..., Any],
    engine: Any,
    model_dir: Path,
    is_special: bool,
    stream: bool,
) -> None:
    tokenizer = tokenizer_with(model_dir, "<tool_call>", "</tool_call>", is_special=is_special)
    own = await publish("sql", tool_parser=b"hermes", chat_template=HERMES.encode(), tokenizer=tokenizer)
    engine.script = CALL
    body = {"model": f"sql@{own}", "messages": HELLO, "tools": [TOOL], "max_tokens": 80, "stream": stream}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    asked = engine.seen[-1]
    assert asked.tokenizer.encode("<tool_call>", add_special_tokens=False) == [engine.tokenizer.vocab_size]
    if not stream:
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_time", {})
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
        return
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    calls = [call for event in events for choice in event["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert "".join(call["function"].get("name") or "" for call in calls) == "get_time"
    assert json.loads("".join(call["function"].get("arguments") or "" for call in calls)) == {}
