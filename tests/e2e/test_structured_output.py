"""Structured output on a real server: any client's fields, and the engine's death in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from server_process import ServerProcess, events

from loraserve import Client
from loraserve.demo.pack import adapter_dirs

SCHEMA = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 12, "maxItems": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["words", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "words", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root: Path = tmp_path_factory.mktemp("structured")
    server = ServerProcess(root / "data", flags=("--memory-budget", "64MiB", "--max-num-seqs", "16"))
    server.start()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def key(server: ServerProcess) -> str:
    key = server.make_tenant("acme")
    with Client(server.url, api_key=key) as client:
        for name in ("sql", "french"):
            client.adapters.push(str(adapter_dirs()[name]), name=name)
    return key


@pytest.fixture
def client(server: ServerProcess, key: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
        yield client


def body(model: str = "sql", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "list the tickets"}]
    return {"model": model, "messages": messages, "max_tokens": 400, "response_format": FORMAT, **fields}


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def test_adapters_and_sums_answer_by_schema(client: httpx2.Client) -> None:
    for model in ("base", "sql", "french", "sql+0.5*french"):
        response = client.post("/v1/chat/completions", json=body(model, n=2, temperature=1.0, seed=1))
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            assert choice["finish_reason"] == "stop"
            check(choice["message"]["content"])


def test_a_stream_adds_up_to_a_valid_answer(client: httpx2.Client) -> None:
    fields = {"stream": True, "logprobs": True, "top_logprobs": 2}
    response = client.post("/v1/chat/completions", json=body(**fields))
    choices = [chunk["choices"][0] for chunk in events(response.text.splitlines())]  # type: ignore[index]
    check("".join(choice["delta"].get("content", "") for choice in choices))
    assert choices[-1]["finish_reason"] == "stop"


def test_the_sdk_and_openais_client_send_the_field(server: ServerProcess, key: str) -> None:
    import openai

    with Client(server.url, api_key=key) as client:
        completion = client.completions.create(
            model="sql", prompt="x", max_tokens=20, structured_outputs={"choice": ["yes", "no"]}
        )
        assert completion.choices[0].text in ("yes", "no")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as official:
        answer = official.chat.completions.create(**body())
        check(answer.choices[0].message.content or "")


async def _answers(url: str, key: str, seeds: range, during: Any = None) -> list[str]:
    """Stream answers at once; `during` runs once each has begun."""
    begun = asyncio.Barrier(len(seeds) + (during is not None))

    async def one(client: httpx2.AsyncClient, seed: int) -> str:
        pieces: list[str] = []
        fields = body("sql" if seed % 2 else "base", temperature=1.0, seed=seed, stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=fields) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                for chunk in events([line]):
                    assert "error" not in chunk, chunk
                    pieces.append(chunk["choices"][0]["delta"].get("content", ""))  # type: ignore[index]
                    if len(pieces) == 12:
                        await begun.wait()
        return "".join(pieces)

    async def disturb() -> None:
        await begun.wait()
        during()

    async with httpx2.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120) as client:
        tasks = [asyncio.create_task(one(client, seed)) for seed in seeds]
        if during is not None:
            await disturb()
        return await asyncio.gather(*tasks)


def test_structured_answers_continue_after_engine_death(server: ServerProcess, key: str) -> None:
    """The grammar's state is recomputed from the tokens that clients already have."""
    wanted = asyncio.run(_answers(server.url, key, range(6)))
    for text in wanted:
        check(text)
    engine = server.engine_pid()
    assert engine is not None
    again = asyncio.run(_answers(server.url, key, range(6), lambda: os.kill(engine, signal.SIGKILL)))
    assert again == wanted
    assert server.engine_pid() != engine
    assert server.metrics()["loraserve_engine_restarts_total"] == 1


def test_grammar_cost_is_in_metrics(server: ServerProcess, client: httpx2.Client) -> None:
    for _ in range(2):
        client.post("/v1/chat/completions", json=body())
    client.post("/v1/chat/completions", json=body(response_format={"type": "json_object", "schema": {"type": "x"}}))
    # the engine's own numbers come with its next report
    deadline = time.monotonic() + 10
    while (metrics := server.metrics())["loraserve_mask_seconds_count"] <= 10 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert metrics['loraserve_grammar_checks_total{outcome="cached"}'] > 0
    assert metrics['loraserve_grammar_checks_total{outcome="refused"}'] == 1
    assert metrics["loraserve_mask_seconds_count"] > 10
    assert metrics["loraserve_grammar_failures_total"] == 0
    assert metrics["loraserve_invariant_violations_total"] == 0
