"""HTTP: the OpenAPI document, headers, and the frames of a stream."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
from fastapi import FastAPI
from whole_app import ADMIN_KEY, BODIES, bearer

from .describing import sources

TEXTS = ("description", "summary")
NAMED_BY_USERS = ("properties", "schemas", "responses", "paths", "parameters")
"""Nodes whose keys are names: a property may be called description."""

HEADER = re.compile(r"x(-[a-z]+)+", re.ASCII)
STANDARD = frozenset(
    [
        "authorization",
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-length",
        "content-range",
        "content-type",
        "etag",
        "idempotency-key",
        "idempotent-replayed",
        "if-match",
        "if-none-match",
        "retry-after",
        "retry-after-ms",
        "server-timing",
        "transfer-encoding",
        "user-agent",
        "www-authenticate",
    ]
)
"""Headers whose names are nothing else in source; others, such as Location,
are in `answers.txt` alone.
"""
OTHER_WORDS = frozenset({"x-lora", "x-guidance"})
"""A kind of adapter, and a keyword of JSON schemas."""
CLIENT_SIDE = ("loraserve/sdk/", "loraserve/cli/", "loraserve/demo/", "loraserve/doctor/")


async def openapi(client: httpx2.AsyncClient) -> dict[str, Any]:
    answer = await client.get("/api/v1/openapi.json", headers=bearer(ADMIN_KEY))
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    # a release changes it
    document["info"]["version"] = "VERSION"
    return document


def split_texts(node: Any, path: str, texts: list[str], *, are_names: bool = False) -> Any:
    """Return the node without its texts, each of which is added to `texts` with its path."""
    if isinstance(node, list):
        return [split_texts(item, f"{path}/{index}", texts) for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    kept = {}
    for key, value in sorted(node.items()):
        here = f"{path}/{key.replace('/', '~1')}"
        if key in TEXTS and isinstance(value, str) and not are_names:
            texts.append(f"{here}: {json.dumps(value, ensure_ascii=False)}")
        else:
            kept[key] = split_texts(value, here, texts, are_names=not are_names and key in NAMED_BY_USERS)
    return kept


async def test_openapi(client: httpx2.AsyncClient, golden: Callable[..., None]) -> None:
    contract = split_texts(await openapi(client), "", [])
    golden("openapi.json", json.dumps(contract, indent=1, sort_keys=True, ensure_ascii=False).splitlines())


async def test_openapi_texts(client: httpx2.AsyncClient, golden: Callable[..., None]) -> None:
    texts: list[str] = []
    split_texts(await openapi(client), "", texts)
    golden("openapi_texts.txt", texts)


def header_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            # x-ratelimit-limit-{kind}
            start = str(node.values[0].value).lower()
            if re.fullmatch(r"x-[a-z-]+-", start):
                yield f"{start}…"
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            text = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            name = text.lower()
            if name in STANDARD or (HEADER.fullmatch(name) and name not in OTHER_WORDS):
                yield name


def test_headers(golden: Callable[..., None]) -> None:
    """The names in the server's source, whether it reads them or sets them."""
    found = {
        name
        for path, tree in sources(f"(?i)[\"'](x-|{'|'.join(STANDARD)})")
        if not path.startswith(CLIENT_SIDE)
        for name in header_names(tree)
    }
    golden("headers.txt", sorted(found))


def shape(value: Any) -> Any:
    """Return JSON with its values replaced by the names of their types."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return "null" if value is None else type(value).__name__


async def test_inference_answers(client: httpx2.AsyncClient, app: FastAPI, golden: Callable[..., None]) -> None:
    """Fields of whole answers and of a stream's frames, and the headers beside them;
    of a refusal too.
    """
    admin = bearer(ADMIN_KEY)
    tenant = await client.post("/api/v1/tenants", json={"name": "acme"}, headers=admin)
    assert tenant.status_code == 201, tenant.text
    model = app.state.services.engine.base.id
    lines = []
    openai = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    for path in (*openai, "/generate", "/", "/api/chat", "/api/generate", "/api/embed", "/api/show"):
        is_lorax = path in ("/generate", "/")
        body = BODIES[f"POST {path}"]["json"] | ({"parameters": {}} if is_lorax else {"model": model})
        forms: list[dict[str, Any]] = [{}]
        if path.startswith("/v1"):
            logprobs = {"logprobs": True, "top_logprobs": 1} if "chat" in path else {"logprobs": 1}
            forms = [{}, {"stream": True, "stream_options": {"include_usage": True}}, {"no_such_field": 1}, logprobs]
        if is_lorax:
            details = {"details": True, "decoder_input_details": True, "return_k_alternatives": 1, "top_n_tokens": 1}
            streamed = {"parameters": {"details": True}, "stream": True}
            forms = [{}, {"parameters": details}, streamed, {"parameters": {"typical_p": 0.5}}]
        if path in ("/api/chat", "/api/generate"):
            logprobs = {"logprobs": True, "top_logprobs": 1}
            forms = [
                {},
                {"stream": True},
                logprobs,
                {"keep_alive": "5m"},
                {"messages": [], "prompt": ""},
                {"stop": ["x"]},
            ]
        for form in forms:
            answer = await client.post(path, json=body | form, headers=admin | {"x-tenant": "acme"})
            lines.append(f"POST {path} {json.dumps(form)} -> {answer.status_code}")
            lines += [f"    {name}" for name in sorted(answer.headers)]
            if answer.headers["content-type"].startswith("text/event-stream"):
                for frame in filter(None, answer.text.split("\n\n")):
                    data = frame.removeprefix("data: ")
                    lines.append(f"    data: {data if data == '[DONE]' else json.dumps(shape(json.loads(data)))}")
            else:
                lines += [f"    {json.dumps(shape(json.loads(line)))}" for line in answer.text.splitlines()]
    for path, headers in (("/v1/models", {}), ("/api/v1/adapters", {}), ("/v1/no-such-route", admin), ("/livez", {})):
        answer = await client.get(path, headers=headers)
        lines.append(f"GET {path} -> {answer.status_code} {answer.headers.get('content-type')}")
        lines += [f"    {name}" for name in sorted(answer.headers)]
        lines.append(f"    {json.dumps(shape(answer.json()))}")
    golden("answers.txt", lines)
