"""kill -9 of the server while it streams: what a client was told is the end of an answer is billed,
and nothing that nobody was given.

LORASERVE_KILLS says how often; the default run has fewer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import msgspec
import pytest
from forked_server import ForkedServer
from server_process import ADMIN_KEY

from loraserve.limits import LIMITS
from loraserve.types import BaseSpec

NUM_KILLS = int(os.environ.get("LORASERVE_KILLS", "3"))
NUM_STREAMS, NUM_WHOLE = 6, 2
WHOLE_TOKENS = 8
SLACK_S = 0.35
"""For a machine that has other things to do than to write a journal in time."""


@dataclass
class Given:
    """What clients saw of answers, by when."""

    num_acknowledged: int = 0
    """Tokens of answers that came to their end."""
    num_cut: int = 0
    """Tokens of streams that a kill cut short."""
    cut_at: list[float] = field(default_factory=list)
    """Since the last kill: when each of those came."""
    num_requests: int = 0
    """Those that were answered to the end."""

    def settle(self, killed_at: float) -> int:
        """How many of the tokens that this kill cut short came long enough before it to be in a
        journal.
        """
        certain = sum(at < killed_at - LIMITS.usage_journal_s - SLACK_S for at in self.cut_at)
        self.num_cut += len(self.cut_at)
        self.cut_at.clear()
        return certain


@pytest.fixture
def server(tmp_path: Path, small_base: BaseSpec) -> Iterator[ForkedServer]:
    with ForkedServer(tmp_path / "data", msgspec.structs.replace(small_base, max_model_len=2048)) as server:
        yield server


async def stream_on(client: httpx2.AsyncClient, base: str, rng: random.Random, given: Given) -> None:
    """One stream after the other, until the server is gone."""
    while True:
        body = {"model": base, "prompt": [1, 2, 3], "max_tokens": rng.choice([5, 20, 1000]), "stream": True}
        came_at: list[float] = []
        is_over = False
        try:
            async with client.stream("POST", "/v1/completions", json=body | {"return_token_ids": True}) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        came_at += [time.monotonic()] * len(choice["token_ids"])
                        is_over |= choice["finish_reason"] is not None
        except httpx2.TransportError:
            return
        finally:
            if is_over:
                given.num_acknowledged += len(came_at)
                given.num_requests += 1
            else:
                given.cut_at += came_at


async def ask_on(client: httpx2.AsyncClient, base: str, given: Given) -> None:
    """One answer in one piece after the other, until the server is gone."""
    while True:
        body = {"model": base, "prompt": [1, 2, 3], "max_tokens": WHOLE_TOKENS}
        try:
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
        except httpx2.TransportError:
            return
        given.num_acknowledged += usage["completion_tokens"]
        given.num_requests += 1


async def billed(client: httpx2.AsyncClient, server: ForkedServer) -> dict[str, int]:
    """The sums, once what the killed ones left is counted."""
    deadline = time.monotonic() + 20
    while len(os.listdir(server.data_dir / "usage")) > 1:
        assert time.monotonic() < deadline, server.tail()
        await asyncio.sleep(0.05)
    (whole,) = (await client.get("/api/v1/usage")).raise_for_status().json()["data"]
    sums: dict[str, int] = whole
    return sums


async def test_kill_loses_no_finished_answer_and_bills_once(server: ForkedServer, small_base: BaseSpec) -> None:
    rng, given, certain = random.Random(20261121), Given(), 0
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    server.start()
    async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=30) as client:
        for _ in range(NUM_KILLS):
            working = [asyncio.create_task(stream_on(client, small_base.id, rng, given)) for _ in range(NUM_STREAMS)]
            working += [asyncio.create_task(ask_on(client, small_base.id, given)) for _ in range(NUM_WHOLE)]
            await asyncio.sleep(rng.uniform(0.3, 1.5))
            killed_at = time.monotonic()
            await asyncio.to_thread(server.kill)
            await asyncio.gather(*working)
            certain += given.settle(killed_at)
            await asyncio.to_thread(server.start)
        sums = await billed(client, server)
        # one that is asked to stop leaves nothing for the next
        assert await asyncio.to_thread(server.end, signal.SIGTERM) == 0
        assert os.listdir(server.data_dir / "usage") == []
    assert given.num_requests > 0
    assert certain > 0
    # one piece at most was in the journal, and not yet on its way, at each kill
    most = given.num_acknowledged + given.num_cut + NUM_KILLS * WHOLE_TOKENS
    assert given.num_acknowledged + certain <= sums["completion_tokens"] <= most
    assert given.num_requests <= sums["num_requests"]
    assert sums["prompt_tokens"] == 3 * sums["num_requests"]
