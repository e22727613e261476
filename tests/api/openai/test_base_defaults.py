"""Defaults of the base's generation_config.json, where a request is silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from loraserve.adapters.config.generation_config import GenerationDefaults

BASE = "org/base:1"
MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}
EXPLICIT = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}


@pytest.fixture
def base_defaults() -> GenerationDefaults:
    return GenerationDefaults(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05, max_default_tokens=3
    )


@pytest.mark.parametrize("path", ROUTES)
async def test_silent_request_gets_defaults_of_base(client: httpx2.AsyncClient, engine: Any, path: str) -> None:
    for fields in ({}, EXPLICIT):
        answer = await client.post(path, json={"model": BASE, **ROUTES[path], **fields})
        assert answer.status_code == 200, answer.text
    silent, explicit = (one.params for one in engine.seen)
    found = (silent.temperature, silent.top_p, silent.top_k, silent.min_p, silent.repetition_penalty)
    assert found == (0.6, 0.95, 20, 0.05, 1.05)
    assert silent.max_tokens == ROUTES[path].get("max_tokens", 3)
    given = (explicit.temperature, explicit.top_p, explicit.top_k, explicit.min_p, explicit.repetition_penalty)
    assert given == (1, 1, 0, 0, 1)


async def test_explicit_length_exceeds_default_of_base(client: httpx2.AsyncClient, engine: Any) -> None:
    for path, field in (("chat/completions", "max_completion_tokens"), ("completions", "max_tokens")):
        await client.post(f"/v1/{path}", json={"model": BASE, **ROUTES[f"/v1/{path}"], field: 9})
    assert [one.params.max_tokens for one in engine.seen] == [9, 9]


async def test_response_reports_applied_defaults(client: httpx2.AsyncClient) -> None:
    shown = (await client.post("/v1/responses", json={"model": BASE, "input": "hi"})).json()
    assert (shown["temperature"], shown["top_p"]) == (0.6, 0.95)


async def test_version_defaults_precede_base_defaults(
    client: httpx2.AsyncClient, publish: Callable[..., Any], engine: Any
) -> None:
    version = await publish("sql", generation_config=b'{"temperature": 0.2, "max_new_tokens": 7}')
    for path in ("/v1/chat/completions", "/v1/completions"):
        await client.post(path, json={"model": f"sql@{version}", **ROUTES[path]})
    for one in engine.seen:
        assert (one.params.temperature, one.params.top_k, one.params.max_tokens) == (0.2, 20, 7)


async def test_base_resource_shows_defaults(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/api/v1/base")).json()["generation_defaults"] == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "max_tokens": 3,
    }
