"""kill -9 of the server in a batch: each line is in the output once, and billed once.

LORASERVE_KILLS says how often; the default run has fewer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from forked_server import ForkedServer
from server_process import ADMIN_KEY

from loraserve.types import BaseSpec

NUM_KILLS = int(os.environ.get("LORASERVE_KILLS", "4"))
NUM_LINES, NUM_TOKENS = 120 * NUM_KILLS, 20
POINTS = ("batch.after_chunk=kill@2", "batch.after_chunk_commit=kill@2", "")
"""Faults of the servers that are killed: between blob and row, after the row, at any moment."""


@pytest.fixture
def server(tmp_path: Path, small_base: BaseSpec) -> Iterator[ForkedServer]:
    quick = {"limits.batch_lease_s": "0.5", "limits.batch_chunk_s": "0.1", "limits.batch_poll_s": "0.1"}
    base = msgspec.structs.replace(small_base, max_model_len=2048)
    with ForkedServer(tmp_path / "data", base, settings=quick) as server:
        yield server


async def test_a_batch_survives_kills_with_each_line_once(server: ForkedServer, small_base: BaseSpec) -> None:
    rng = random.Random(20261124)
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    server.start()
    async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=30) as client:
        batch = await begin(client, small_base, NUM_LINES)
        for number in range(NUM_KILLS):
            await asyncio.sleep(rng.uniform(0.2, 0.8))
            await asyncio.to_thread(server.kill)
            faults = POINTS[number % len(POINTS)]
            await asyncio.to_thread(server.start, faults)
            if faults:
                await until_gone(server)
                await asyncio.to_thread(server.start)
        await check_whole(client, batch["id"], NUM_LINES)


async def test_stopping_server_hands_over_batch(server: ForkedServer, small_base: BaseSpec) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    server.start()
    async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=30) as client:
        batch = await begin(client, small_base, 150)
        while not (await client.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]["completed"]:
            await asyncio.sleep(0.02)
        assert await asyncio.to_thread(server.end, signal.SIGTERM) == 0
        await asyncio.to_thread(server.start)
        counts = (await client.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]
        assert 0 < counts["completed"] < 150
        await check_whole(client, batch["id"], 150)


async def begin(client: httpx2.AsyncClient, base: BaseSpec, num_lines: int) -> dict[str, Any]:
    body = {"model": base.id, "prompt": [1, 2, 3], "max_tokens": NUM_TOKENS}
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number in range(num_lines)
    ]
    data = b"\n".join(json.dumps(line).encode() for line in lines)
    form: dict[str, Any] = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
    file = (await client.post("/v1/files", **form)).raise_for_status().json()
    new = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch: dict[str, Any] = (await client.post("/v1/batches", json=new)).raise_for_status().json()
    return batch


async def check_whole(client: httpx2.AsyncClient, batch_id: str, num_lines: int) -> None:
    """It ends with each line in the output once, and billed once."""
    batch = await ended(client, batch_id)
    counts = {"total": num_lines, "completed": num_lines, "failed": 0}
    assert (batch["status"], batch["request_counts"]) == ("completed", counts)
    output = await client.get(f"/v1/files/{batch['output_file_id']}/content")
    answers = [json.loads(line) for line in output.raise_for_status().text.splitlines()]
    assert Counter(answer["custom_id"] for answer in answers) == {f"c{number}": 1 for number in range(num_lines)}
    (sums,) = (await client.get("/api/v1/usage")).json()["data"]
    assert sums["num_requests"] == num_lines
    assert sums["completion_tokens"] == num_lines * NUM_TOKENS == batch["usage"]["output_tokens"]
    assert sums["prompt_tokens"] == 3 * num_lines


async def until_gone(server: ForkedServer) -> None:
    """Wait until the fault has ended the server, and take notice of it."""
    deadline = time.monotonic() + 20
    while server._lives():
        assert time.monotonic() < deadline, server.tail()
        await asyncio.sleep(0.02)
    await asyncio.to_thread(server.kill)


async def ended(client: httpx2.AsyncClient, batch_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        batch: dict[str, Any] = (await client.get(f"/v1/batches/{batch_id}")).raise_for_status().json()
        if batch["status"] in ("completed", "failed", "expired", "cancelled"):
            return batch
        assert time.monotonic() < deadline, batch
        await asyncio.sleep(0.1)
