"""Bounds on reasoning, from a request to its tokens, with and without speculation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from marked_model import write_marked
from server_process import ServerProcess

from loraserve.text.tokenizer import Tokenizer

TEMPLATE = (
    "<|user|>{{ messages[0].content }}<|assistant|><think>"
    "{% if not enable_thinking | default(true) %}</think>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "tell a story"}]
BUDGET, MAX_TOKENS = 6, 20
SAMPLED: list[dict[str, Any]] = [{"temperature": 0}, *({"temperature": 1.0, "seed": seed} for seed in range(4))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("marked")
    write_marked(path, ("<think>", "</think>"))
    # a file of its own, beside links into the package
    assert not (path / "chat_template.jinja").exists()
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module", params=["auto", "off"])
def client(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[httpx2.Client]:
    flags = ("--memory-budget", "64MiB", "--host-cache", "64MiB", "--model-id", "base", "--speculation", request.param)
    server = ServerProcess(tmp_path_factory.mktemp("thinking") / "data", model=model, flags=flags)
    server.start()
    headers = {"authorization": f"Bearer {server.make_tenant('acme')}"}
    with httpx2.Client(base_url=server.url, headers=headers, timeout=60) as http:
        yield http
    assert server.stop() == 0


def ask(client: httpx2.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "base", "messages": MESSAGES, "max_tokens": MAX_TOKENS, "min_tokens": MAX_TOKENS, **fields}
    answer = client.post("/v1/chat/completions", json={"return_token_ids": True, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


_TEXTS: dict[str, dict[str, list[Any]]] = {}
"""Answers by the fixture's parameter, compared once there are both."""


def test_reasoning_ends_at_budget_in_each_mode(
    client: httpx2.Client, model: Path, request: pytest.FixtureRequest
) -> None:
    closer = Tokenizer(model).token_to_id("</think>")
    answers = []
    for fields in SAMPLED:
        whole = ask(client, thinking_token_budget=BUDGET, **fields)
        ids = whole["choices"][0]["token_ids"]
        assert closer in ids[: BUDGET + 1]
        assert whole["usage"]["completion_tokens"] == len(ids) == MAX_TOKENS
        assert whole["choices"][0]["message"]["content"]
        streamed = stream(client, thinking_token_budget=BUDGET, **fields)
        message = whole["choices"][0]["message"]
        assert streamed == (message.get("reasoning_content") or "", message["content"])
        answers.append((ids, streamed))
    speculation = request.node.callspec.params["client"]
    _TEXTS.setdefault("answers", {})[speculation] = answers
    assert all(known == answers for known in _TEXTS["answers"].values())


def stream(client: httpx2.Client, **fields: Any) -> tuple[str, str]:
    reasoning, content = "", ""
    body = {"model": "base", "messages": MESSAGES, "max_tokens": MAX_TOKENS, "min_tokens": MAX_TOKENS, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json={**body, **fields}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                reasoning += delta.get("reasoning_content") or ""
                content += delta.get("content") or ""
    return reasoning, content


def test_budget_is_kept_by_each_route(client: httpx2.Client, model: Path) -> None:
    closer = Tokenizer(model).token_to_id("</think>")
    # none is asked for, or the prompt has no reasoning
    for fields in ({}, {"thinking_token_budget": -1}, {"thinking_token_budget": 0, "ignore_eos": True}):
        ids = ask(client, temperature=0, **fields)["choices"][0]["token_ids"]
        assert (ids[0] == closer) == (fields.get("thinking_token_budget") == 0)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    plain, bounded = (ask(client, temperature=0, **off, **more) for more in ({}, {"thinking_token_budget": 0}))
    assert plain["choices"][0]["token_ids"] == bounded["choices"][0]["token_ids"]
    prompts = {"model": "base", "prompt": ["a <think>", "a"], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    body = {**prompts, "thinking_token_budget": 1, "return_token_ids": True}
    one, two = client.post("/v1/completions", json=body).json()["choices"]
    assert one["token_ids"][:2].count(closer) == 1
    assert closer not in two["token_ids"]
    message = {"model": "base", "messages": MESSAGES, "max_tokens": MAX_TOKENS, "min_tokens": MAX_TOKENS}
    answer = client.post(
        "/v1/messages", json={**message, "temperature": 0, "thinking": {"type": "enabled", "budget_tokens": BUDGET}}
    )
    assert "x-loraserve-ignored" not in answer.headers
    expected = ask(client, temperature=0, thinking_token_budget=BUDGET)["choices"][0]["message"]["content"]
    assert "".join(block.get("text", "") for block in answer.json()["content"]) == expected


def test_grammar_begins_after_bounded_reasoning(client: httpx2.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}}}
    for fields in SAMPLED:
        body = {"thinking_token_budget": BUDGET, "response_format": wanted, "max_tokens": 64, "min_tokens": 0}
        answer = ask(client, **fields, **body)
        assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["a"], bool)
