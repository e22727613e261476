"""Names with capitals, slashes and colons in batches and stored responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from loraserve.api.batch_lines import BatchLines
from loraserve.api.services import Services

pytestmark = pytest.mark.usefixtures("no_leaks")

NAMES = ("Qwen/My-LoRA", "x:v2")


@pytest.fixture(params=NAMES)
async def name(request: pytest.FixtureRequest, publish: Callable[..., Any], client: httpx2.AsyncClient) -> str:
    """The name of an adapter with two versions, whose `live` is the second."""
    named: str = request.param
    for seed in (1, 2):
        await publish(named, seed)
    return named


def spellings(name: str) -> list[str]:
    return [name, name.lower(), name.upper(), f"{name.upper()}@1", f"{name}@live"]


async def test_batch_takes_names_in_any_case(
    client: httpx2.AsyncClient, services: Services, app: FastAPI, name: str, engine: Any
) -> None:
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": model, "prompt": "x", "max_tokens": 2},
        }
        for number, model in enumerate(spellings(name))
    ]
    services.batch_runner.start(BatchLines(services, app))
    try:
        upload = {"file": ("in.jsonl", "\n".join(map(json.dumps, lines)).encode(), "application/jsonl")}
        file = (await client.post("/v1/files", files=upload, data={"purpose": "batch"})).raise_for_status().json()
        new = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=new)).raise_for_status().json()
        async with asyncio.timeout(60):
            while batch["status"] not in ("completed", "failed", "cancelled", "expired"):
                await asyncio.sleep(0.02)
                batch = (await client.get(f"/v1/batches/{batch['id']}")).raise_for_status().json()
    finally:
        await services.batch_runner.close()
    assert batch["request_counts"] == {"total": len(lines), "completed": len(lines), "failed": 0}
    assert {asked.adapter.name for asked in engine.seen} == {name}
    assert sorted(asked.adapter.version for asked in engine.seen) == [1, 2, 2, 2, 2]
    text = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).text
    answered = {line["custom_id"]: line["response"]["body"]["model"] for line in map(json.loads, text.splitlines())}
    assert [answered[str(number)] for number in range(len(lines))] == spellings(name)


async def test_stored_response_goes_on_under_name(client: httpx2.AsyncClient, name: str, engine: Any) -> None:
    previous = None
    for model in spellings(name):
        asked = {"model": model, "input": "hello", "max_output_tokens": 4, "previous_response_id": previous}
        answer = await client.post("/v1/responses", json=asked)
        assert answer.status_code == 200, answer.text
        previous = answer.json()["id"]
        stored = (await client.get(f"/v1/responses/{previous}")).raise_for_status().json()
        assert stored["model"] == model
    prompts = [len(asked.prompt_token_ids) for asked in engine.seen]
    assert prompts == sorted(set(prompts))
    assert {asked.adapter.name for asked in engine.seen} == {name}
