"""What the project promises, over HTTP: any mix of requests, each answered as if it were alone,
and nothing left behind.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from dataclasses import dataclass, field

import httpx2
import pytest
from server_process import ServerProcess, events

from loraserve.demo.frames import ADAPTERS, fresh_prompts

MODELS = ("base", *ADAPTERS)


@dataclass
class Work:
    model: str
    prompt: str
    body: dict[str, object]
    delay_s: float = 0.0
    cancel_after: int | None = None
    """Leave after so many events."""
    pieces: list[str] = field(default_factory=list)
    finish_reason: object = None
    error: object = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def make_work(count: int, seed: int, **changes: object) -> list[Work]:
    rng = random.Random(seed)
    frames = fresh_prompts(count, seed)
    work = []
    for i, frame in enumerate(frames):
        body: dict[str, object] = {"max_tokens": 48, "temperature": 0.0, **changes}
        if i % 5 == 4:
            body |= {"temperature": 1.0, "seed": i, "max_tokens": 40}
        # some prompts carry a long history, so that prefills are chunked and prefixes shared
        prompt = frame.prompt if i % 3 else f"{frames[0].prompt} " * rng.randint(2, 8) + frame.prompt
        work.append(Work(MODELS[i % len(MODELS)], prompt, body))
    return work


async def stream(client: httpx2.AsyncClient, work: Work, base: str, on_event=None) -> None:
    await asyncio.sleep(work.delay_s)
    model = base if work.model == "base" else work.model
    body = {"model": model, "prompt": work.prompt, "stream": True, **work.body}
    seen = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            work.error = (await response.aread()).decode()
            return
        async for line in response.aiter_lines():
            for event in events([line]):
                if "error" in event:
                    work.error = event["error"]
                for choice in event.get("choices", []):
                    work.pieces.append(choice["text"])
                    work.finish_reason = choice["finish_reason"] or work.finish_reason
                seen += 1
                if on_event is not None:
                    on_event()
            if work.cancel_after is not None and seen >= work.cancel_after:
                return


def connect(server: ServerProcess, key: str) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=200, max_keepalive_connections=0)
    return httpx2.AsyncClient(
        base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=120, limits=limits
    )


async def base_id(client: httpx2.AsyncClient) -> str:
    models = (await client.get("/v1/models")).raise_for_status().json()["data"]
    return next(model["id"] for model in models if model.get("parent") is None)


async def solo(client: httpx2.AsyncClient, works: list[Work], base: str) -> list[str]:
    """Each request's text when it is the only one."""
    texts = []
    for work in works:
        alone = Work(work.model, work.prompt, work.body)
        await stream(client, alone, base)
        assert alone.error is None, alone.error
        texts.append(alone.text)
    return texts


async def settle(server: ServerProcess) -> dict[str, float]:
    """Metrics once nothing is held any more; what is still held after ten seconds is a leak."""
    names = [
        "loraserve_requests_running",
        "loraserve_requests_waiting",
        'loraserve_kv_blocks{state="used"}',
        "loraserve_adapter_pins",
    ]
    for _ in range(100):
        metrics = server.metrics()
        if all(metrics[name] == 0 for name in names) and metrics["loraserve_http_requests_live"] <= 1:
            return metrics
        await asyncio.sleep(0.1)
    raise AssertionError({name: metrics[name] for name in names})


@pytest.mark.slow
async def test_concurrent_streams_match_answers_computed_alone(server, key):
    works = make_work(64, seed=1)
    rng = random.Random(2)
    async with connect(server, key) as client:
        base = await base_id(client)
        wanted = await solo(client, works, base)
        for work in works:
            work.delay_s = rng.random() * 1.5
            if rng.random() < 0.25:
                work.cancel_after = rng.randint(1, 12)
        await asyncio.gather(*(stream(client, work, base) for work in works))
        for work, text in zip(works, wanted, strict=True):
            assert work.error is None
            if work.cancel_after is None:
                assert work.text == text, work
                assert work.finish_reason in ("stop", "length")
            else:
                assert text.startswith(work.text), work
        metrics = await settle(server)
    assert metrics["loraserve_invariant_violations_total"] == 0


@pytest.mark.slow
async def test_killing_the_engine_changes_no_streams_text(server, key):
    works = make_work(24, seed=3, ignore_eos=True, max_tokens=64)
    async with connect(server, key) as client:
        base = await base_id(client)
        wanted = await solo(client, works, base)
        first = server.engine_pid()
        assert first is not None
        num_events = 0

        def kill_once() -> None:
            nonlocal num_events
            num_events += 1
            if num_events == 200:
                os.kill(first, signal.SIGKILL)

        await asyncio.gather(*(stream(client, work, base, kill_once) for work in works))
        assert num_events > 200
        assert server.engine_pid() != first
        for work, text in zip(works, wanted, strict=True):
            assert work.error is None
            assert work.text == text, work
        await settle(server)
