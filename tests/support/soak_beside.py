"""A soak's other traffic: batches, stored responses, live adapters, a tenant at its limits.

Each works in a loop until the soak is over, and says what is wrong in the soak's own list.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import httpx2

if TYPE_CHECKING:
    from test_soak import Soak, Work

LINES = 6
"""Requests of a batch."""
BATCH_S = 300.0
"""Seconds within which a batch is over, disturbances included."""
LIMITS = {"requests_per_minute": 240, "tokens_per_minute": 60_000, "max_concurrent_requests": 3}
"""Limits of the tenant that is at them all the time."""
NUM_GREEDY = 4
"""Requests that it has open at once: one more than it may."""


class Beside:
    """A soak's other traffic.

    Args:
        pool: requests with the texts that they were answered with alone.
        limited_key: a key of another tenant, with `LIMITS`.
    """

    def __init__(self, soak: Soak, pool: list[Work], limited_key: str) -> None:
        self._soak, self._pool, self._limited_key = soak, pool, limited_key

    async def run(self, has_chats: bool) -> None:
        """Do all of it until the soak is over.

        Args:
            has_chats: whether the base has a chat template, which responses need.
        """
        works: list[Callable[[httpx2.AsyncClient], Awaitable[None]]] = [self._batch, self._live_adapter]
        if has_chats:
            works.append(self._response)
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(self._repeat(work))
            for number in range(NUM_GREEDY):
                group.create_task(self._limited(number))

    async def _repeat(self, work: Callable[[httpx2.AsyncClient], Awaitable[None]]) -> None:
        async with self._soak.connect() as client:
            while not self._soak.is_over:
                try:
                    await work(client)
                except httpx2.TransportError as error:
                    if not self._soak.is_disturbed:
                        self._soak.wrong.append(f"{work.__name__}: {type(error).__name__} {error}")
                except Disturbed:
                    self._soak.counts["disturbed beside"] += 1
                await asyncio.sleep(1.0)

    async def _call(self, client: httpx2.AsyncClient, method: str, path: str, **content: Any) -> httpx2.Response:
        """Return the answer to a request that must be served.

        Raises:
            Disturbed: it was refused or cut off, and a disturbance explains that.
        """
        generation = self._soak.generation
        try:
            response = await client.request(method, path, **content)
        except httpx2.TransportError:
            if generation != self._soak.generation or self._soak.server_is_down:
                raise Disturbed from None
            raise
        if response.status_code == 503 and self._soak.is_disturbed:
            raise Disturbed
        if response.status_code >= 400:
            self._soak.wrong.append(f"{method} {path}: {response.status_code} {response.text[:300]}")
            raise Disturbed
        return response

    async def _batch(self, client: httpx2.AsyncClient) -> None:
        """Send a batch of requests, and compare its answers; it survives every disturbance."""
        works = self._soak.rng.sample(self._pool, LINES)
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": work.model, **work.body},
            }
            for number, work in enumerate(works)
        ]
        content = "\n".join(map(json.dumps, lines)).encode()
        sent = await self._call(
            client, "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}
        )
        body = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await self._call(client, "POST", "/v1/batches", json=body)).json()
        began = time.monotonic()
        while batch["status"] not in ("completed", "failed", "cancelled", "expired"):
            await asyncio.sleep(1.0)
            if time.monotonic() - began > BATCH_S:
                if not self._soak.is_over:
                    self._soak.wrong.append(f"batch {batch['id']} is {batch['status']} after {BATCH_S:.0f} s")
                return
            try:
                batch = (await self._call(client, "GET", f"/v1/batches/{batch['id']}")).json()
            except Disturbed:
                continue
        if batch["status"] != "completed" or batch["request_counts"]["completed"] != LINES:
            self._soak.wrong.append(f"batch: {batch}")
            return
        answers = await self._call(client, "GET", f"/v1/files/{batch['output_file_id']}/content")
        for line in map(json.loads, answers.text.splitlines()):
            said = line["response"]["body"]["choices"][0]["text"]
            self._soak.compare(works[int(line["custom_id"])], said, is_whole=True)
        for file in (batch["input_file_id"], batch["output_file_id"]):
            await self._call(client, "DELETE", f"/v1/files/{file}")
        self._soak.counts["batches"] += 1

    async def _live_adapter(self, client: httpx2.AsyncClient) -> None:
        """Load an adapter into memory alone, ask it twice for the same, and unload it."""
        config, weights = self._soak.adapters.files(90_000 + self._soak.rng.randrange(1000))
        name, work = "live-adapter", self._soak.make_work("live-adapter", self._soak.rng.randrange(1000))
        body = {
            "lora_name": name,
            "config_dict": json.loads(config),
            "serialized_named_tensors": [base64.b64encode(weights).decode()],
            "load_format": "safetensors",
            "ephemeral": True,
            "upsert": True,
        }
        generation = self._soak.generation
        await self._call(client, "POST", "/load_lora_adapter_from_tensors", json=body)
        work.text = await self._soak.ask(client, work)
        if generation != self._soak.generation:
            # it was in the memory of the server that was killed
            raise Disturbed
        if work.text is not None:
            await self._soak.ask(client, work)
        await self._call(client, "POST", "/unload_lora_adapter", json={"lora_name": name})
        self._soak.counts["live adapters"] += 1

    async def _response(self, client: httpx2.AsyncClient) -> None:
        """Have a response stored, continue it, read both again, and delete them."""
        body: dict[str, Any] = {"model": "base", "max_output_tokens": 24, "temperature": 0}
        first = (await self._call(client, "POST", "/v1/responses", json=body | {"input": "Name three colors."})).json()
        more = body | {"input": "Name another.", "previous_response_id": first["id"]}
        second = (await self._call(client, "POST", "/v1/responses", json=more)).json()
        for made in (first, second):
            kept = (await self._call(client, "GET", f"/v1/responses/{made['id']}")).json()
            if kept["output"] != made["output"]:
                self._soak.wrong.append(f"response {made['id']}: kept {kept['output']}, said {made['output']}")
        for made in (second, first):
            await self._call(client, "DELETE", f"/v1/responses/{made['id']}")
        self._soak.counts["responses"] += 1

    async def _limited(self, number: int) -> None:
        """Ask as a tenant that always has more open than it may: what is answered is right."""
        pool = [work for work in self._pool if work.model == "base"]
        headers = {"Authorization": f"Bearer {self._limited_key}"}
        async with self._soak.connect() as client:
            while not self._soak.is_over:
                work = pool[(number + self._soak.counts["limited"]) % len(pool)]
                generation = self._soak.generation
                try:
                    answer = await client.post("/v1/completions", json={"model": "base", **work.body}, headers=headers)
                except httpx2.TransportError as error:
                    if generation == self._soak.generation and not self._soak.server_is_down:
                        self._soak.wrong.append(f"limited: {type(error).__name__} {error}")
                    await asyncio.sleep(0.5)
                    continue
                if answer.status_code == 200:
                    self._soak.compare(work, answer.json()["choices"][0]["text"], is_whole=True)
                    self._soak.counts["limited"] += 1
                elif answer.status_code == 429:
                    self._soak.counts["limited: 429"] += 1
                    await asyncio.sleep(0.3)
                elif answer.status_code == 503 and self._soak.is_disturbed:
                    await asyncio.sleep(0.5)
                else:
                    self._soak.wrong.append(f"limited: {answer.status_code} {answer.text[:300]}")


class Disturbed(Exception):
    """A request wasn't served, for a reason that is known."""
