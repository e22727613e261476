"""The requests of ``vllm bench serve``: what it sends, and what it reads of the answers.

As its source has them: vllm itself pulls a torch of its own.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from loraserve.demo.frames import Compare

from .conftest import ServedPack

pytestmark = pytest.mark.clients

FRAME = Compare("list", "tickets", "age", "over", 81)
OPTIONS: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def read_stream(served: ServedPack, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any], int]:
    """Return the text, the usage and the number of chunks with choices."""
    text, usage, num_chunks = "", {}, 0
    headers = {"Authorization": f"Bearer {served.key}", "x-request-id": "bench-0"}
    with httpx2.stream("POST", f"{served.url}{path}", json={**body, **OPTIONS}, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        for message in "".join(answer.iter_text()).split("\n\n"):
            if not message.strip() or message.startswith(":") or message == "data: [DONE]":
                continue
            chunk = json.loads(message.removeprefix("data: "))
            if choices := chunk.get("choices"):
                num_chunks += 1
                choice = choices[0]
                text += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
            elif found := chunk.get("usage"):
                usage = found
    return text, usage, num_chunks


def test_benchmark_finds_model_and_tokens(served: ServedPack) -> None:
    with httpx2.Client(base_url=served.url, headers={"Authorization": f"Bearer {served.key}"}, timeout=60) as client:
        first = client.get("/v1/models").raise_for_status().json()["data"][0]
        assert first["id"] == "base"
        assert first["root"]
        body = {"model": "sql", "prompt": FRAME.prompt, "add_special_tokens": False}
        tokens = client.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        answer = client.post("/detokenize", json={"model": "sql", "tokens": tokens}).raise_for_status()
        assert answer.json()["prompt"] == FRAME.prompt


def test_completions_report_usage_in_chunk_without_choices(served: ServedPack) -> None:
    body = {"model": "sql", "prompt": FRAME.prompt, "repetition_penalty": 1.0, "max_tokens": 32, "logprobs": None}
    text, usage, num_chunks = read_stream(served, "/v1/completions", {**body, "temperature": 0.0})
    assert text == FRAME.render("sql")
    assert num_chunks > 1
    assert usage["completion_tokens"] > 5
    assert usage["prompt_tokens"] > 5


def test_chats_reach_requested_length(served: ServedPack) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": FRAME.prompt}]}]
    body = {"model": "sql", "messages": messages, "max_completion_tokens": 40, "ignore_eos": True, "temperature": 0.0}
    text, usage, _ = read_stream(served, "/v1/chat/completions", body)
    assert text.startswith(FRAME.render("sql"))
    assert usage["completion_tokens"] == 40
